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
import sys
import time
from collections import defaultdict
from typing import Any

from p2p_diloco.addresses import peer_of
from p2p_diloco.net.hivemind_library import DHTID, PeerID, dht_pb2
from tests.net.swarm import join
from tests.real.costs import measured, nodes

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
        addresses = [node.transport.addresses()[0] for node in field.nodes]
        command = [sys.executable, "-m", "tests.real.dht_flood_cost", "--seconds", str(asked.seconds + 1.0)]
        turns = defaultdict[str, list[dict[str, float]]](list)
        for _ in range(TURNS):
            for kind in ("quiet", "keys", "records", "stores", "ids"):
                attacking = [] if kind == "quiet" else [*command, "--kind", kind, "--victims", *addresses]
                turns[kind].append(measured(field, asked.seconds, attacking))
        for kind, figures in turns.items():
            told = {"rounds": [turn["rounds"] for turn in figures], "MB": max(turn["MB"] for turn in figures)}
            print(kind, json.dumps(told), flush=True)
    finally:
        field.end()


if __name__ == "__main__":
    main()
