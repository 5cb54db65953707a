"""Measures what large requests to the DHT cost a private run: `python -m tests.real.dht_flood_cost [--seconds S]`.

Three honest nodes in this process make rounds. Turns of these kinds follow each other, in which a stranger in a process
of its own does something to them:

    quiet    nothing
    keys     it asks each node for 180,000 keys at once, every 4 s (4 MB)
    records  it has stored 1,000 records of 1 kB under one key at the first node, and asks that node for this key again
             and again, 600 times in each request (13 kB)
    stores   it stores 20,000 records of a few bytes at each node, in each request (1 MB)
    ids      it pings each node again and again, each time with another id of the DHT

Prints for each kind, as JSON: the rounds a second turn by turn, and the most memory of this process meanwhile, in MB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

import nodes

from p2p_diloco.addresses import peer_of
from p2p_diloco.net.hivemind_library import DHTID, PeerID, dht_pb2
from tests.net.swarm import join

KEYS, EVERY_S = 180_000, 4.0
RECORDS, RECORD_BYTES, NAMED = 1000, 1000, 600
STORED = 20_000
TURNS = 2


async def attack(kind: str, seconds: float, victims: list[str]) -> None:
    """Ask the victims, each named by an address, for too much."""
    eve = await join(initial_peers=victims)
    protocol = eve._dht._node.protocol
    stubs = [protocol.get_stub(PeerID.from_base58(peer_of(address))) for address in victims]
    junk = DHTID.generate(source="junk")
    until = time.time() + 600.0

    async def find(stub: Any, keys: list[bytes]) -> None:
        with contextlib.suppress(Exception):
            await stub.rpc_find(dht_pb2.FindRequest(keys=keys, peer=protocol.node_info), timeout=20.0)

    async def store(stub: Any) -> None:
        keys = [os.urandom(20)] * STORED
        values = [protocol.serializer.dumps(b"x")] * STORED
        subkeys = [protocol.serializer.dumps(b"%d" % number) for number in range(STORED)]
        said = {"values": values, "in_cache": [False] * STORED, "peer": protocol.node_info}
        request = dht_pb2.StoreRequest(keys=keys, subkeys=subkeys, expiration_time=[until] * STORED, **said)
        with contextlib.suppress(Exception):
            await stub.rpc_store(request, timeout=20.0)

    async def ping(stub: Any) -> None:
        invented = dht_pb2.NodeInfo(node_id=DHTID(int.from_bytes(os.urandom(20), "big")).to_bytes())
        with contextlib.suppress(Exception):
            await stub.rpc_ping(dht_pb2.PingRequest(peer=invented), timeout=20.0)

    if kind == "records":
        names = [protocol.serializer.dumps(f"{number}".encode()) for number in range(RECORDS)]
        value = protocol.serializer.dumps(bytes(RECORD_BYTES))
        for at in range(0, RECORDS, 100):
            some = names[at : at + 100]
            said = {
                "keys": [junk.to_bytes()] * len(some),
                "values": [value] * len(some),
                "in_cache": [False] * len(some),
            }
            request = dht_pb2.StoreRequest(subkeys=some, expiration_time=[until] * len(some), **said)
            await stubs[0].rpc_store(request, timeout=20.0)
    print("begins", flush=True)
    give_up_at = time.monotonic() + seconds
    many = [os.urandom(20) for _ in range(KEYS)]
    while time.monotonic() < give_up_at:
        began = time.monotonic()
        if kind == "stores":
            await asyncio.gather(*(store(stub) for stub in stubs))
        elif kind == "ids":
            await asyncio.gather(*(ping(stub) for stub in stubs))
        elif kind == "keys":
            await asyncio.gather(*(find(stub, many) for stub in stubs))
            await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))
        else:
            await find(stubs[0], [junk.to_bytes()] * NAMED)
    await eve.close()


def measured(field: nodes.Field, kind: str, seconds: float) -> tuple[float, float]:
    """The rounds a second, and the most memory in MB, while a process of its own attacks in this way."""
    attacker = None
    if kind != "quiet":
        addresses = [node.transport.addresses()[0] for node in field.nodes]
        command = [sys.executable, "-m", "tests.real.dht_flood_cost", "--seconds", str(seconds + 1.0)]
        attacker = subprocess.Popen(
            [*command, "--kind", kind, "--victims", *addresses], stdout=subprocess.PIPE, text=True
        )
        assert attacker.stdout is not None
        assert attacker.stdout.readline().strip() == "begins"
    began, epoch, most = time.monotonic(), field.epoch, 0.0
    while time.monotonic() < began + seconds:
        time.sleep(0.1)
        most = max(most, psutil.Process().memory_info().rss / 1e6)
    figures = (field.epoch - epoch) / (time.monotonic() - began), most
    if attacker is not None:
        attacker.wait(120.0)
    return figures


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--kind")
    parser.add_argument("--victims", nargs="+")
    asked = parser.parse_args()
    if asked.victims:
        asyncio.run(attack(asked.kind, asked.seconds, asked.victims))
        return
    field = nodes.Field()
    try:
        turns = defaultdict[str, list[tuple[float, float]]](list)
        for _ in range(TURNS):
            for kind in ("quiet", "keys", "records", "stores", "ids"):
                turns[kind].append(measured(field, kind, asked.seconds))
        for kind, figures in turns.items():
            told = {"rounds": [round(rate, 2) for rate, _ in figures], "MB": round(max(most for _, most in figures))}
            print(kind, json.dumps(told), flush=True)
    finally:
        field.end()


if __name__ == "__main__":
    main()
