"""Measures what others cost a private run: `python -m tests.real.member_cost [--seconds S] [--kinds K ...]`.

Three honest nodes in this process make rounds, each kind in a run of its own. The hostile member is a process of its
own with a lower priority, because it stands for another machine; `beside` shows what such a process takes from the
nodes by sharing their cores. All its peers have one invitation, but for the two of `ahead`. Some kinds cost two waits
for a deadline at their beginning, so a short measurement shows these.

    quiet    nothing
    beside   a process of the same priority computes without pause, and sends nothing
    scales   it contributes -1000 times what the others do
    idles    it says that it works, and contributes nothing
    holds    it leads in its turn, and never commits
    ahead    two say that they are a thousand epochs ahead, and send nothing
    fetches  three ask all nodes for the whole state, again and again
    nudges   three ask all nodes to exchange now, again and again
    probes   three tell all nodes what they do, again and again
    readies  one sends all nodes a contribution to the present round, ever another one
    slices   the same with a slice of it
    describes  three ask all nodes what the model is, again and again
    litters  it stores junk where records lie, again and again

In the last kinds a stranger asks for much, of the DHT in the nodes, or floods the first of them:

    keys     each node for 180,000 keys at once, every 4 s (4 MB)
    records  it has stored 1,000 records of 1 kB under one key at the first node, and asks that node for this key again
             and again, 600 times in each request (13 kB)
    stores   it stores 20,000 records of a few bytes at each node, in each request (1 MB)
    ids      it pings each node again and again, each time with another id of the DHT
    floods   it opens stream after stream, over four connections

Prints for each kind, as JSON: the rounds a second, their part of those of `quiet`, the processor seconds a second of
the nodes and of the hostile member, each with its daemons, how often a second the member did its thing to a node, and
the most memory of the nodes' process, in MB.
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
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from liar import Liar, liar
from nodes import RUN_ID, SLICES, Field

from p2p_diloco.addresses import peer_of
from p2p_diloco.core.messages import Ask, Probe
from p2p_diloco.net.framing import VERSION, Bulk, Message
from p2p_diloco.net.hivemind import DIRECT
from p2p_diloco.net.hivemind_library import DHTID, PeerID, dht_pb2
from p2p_diloco.node.wire import Describe, Nudge
from tests.net.attacker import attacker
from tests.net.members import invitation, membership
from tests.net.swarm import join

WITHOUT_PAUSE = ("fetches", "nudges", "probes", "readies", "slices", "describes", "litters")
OF_THE_DHT = ("keys", "records", "stores", "ids")
KINDS = ("quiet", "beside", "scales", "idles", "holds", "ahead", *WITHOUT_PAUSE, *OF_THE_DHT, "floods")
TOGETHER = {"ahead": 2, "fetches": 3, "nudges": 3, "probes": 3, "describes": 3}
"""How many peers the hostile member has; else one."""
NICE = 10
AT_ONCE = 4
"""How many messages to all nodes each peer has under way, if it sends without pause."""
STEP_S = 0.3
KEYS, EVERY_S = 180_000, 4.0
RECORDS, RECORD_BYTES, NAMED = 1000, 1000, 600
STORED = 20_000
STREAMS = f"/p2p-diloco/{VERSION}/{RUN_ID}"
FLOODS = [
    (STREAMS, Message(b"?" + bytes(900)), Bulk(b"contribution", 1 << 30)),
    (STREAMS + DIRECT,),
    (STREAMS, Message(bytes(100))),
    (STREAMS,),
]
"""The protocol and the frames of each connection's flood."""
ENDS_S = 120.0


def spent() -> float:
    """The processor seconds of this process and the daemons that it has started."""
    daemons = [child for child in psutil.Process().children() if child.name().startswith("p2pd")]
    return time.process_time() + sum(sum(daemon.cpu_times()[:2]) for daemon in daemons)


def measured(field: Field, seconds: float, command: Sequence[str] = ()) -> dict[str, float]:
    """The rounds a second, the processor seconds a second of this process and its daemons, and its most memory in MB,
    while this command does something to the nodes. It says when it begins, and may tell its own figures at its end."""
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if command else None
    if other is not None:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == "begins"
    began, cost, epoch, most = time.monotonic(), spent(), field.epoch, 0.0
    while time.monotonic() < began + seconds:
        time.sleep(0.1)
        most = max(most, psutil.Process().memory_info().rss / 1e6)
    took = time.monotonic() - began
    figures = {"rounds": round((field.epoch - epoch) / took, 2), "nodes": round((spent() - cost) / took, 2)}
    told = "" if other is None else other.communicate(timeout=ENDS_S)[0]
    return figures | {"MB": round(most)} | json.loads(told or "{}")


class Seen(Field):
    """The run as a process of its own knows it that was told these addresses of its nodes."""

    def __init__(self, addresses: list[str]) -> None:
        self.set(len(addresses), {})
        self.nodes: Any = [
            SimpleNamespace(
                id=peer_of(address),
                transport=SimpleNamespace(addresses=lambda address=address: [address]),
                access=SimpleNamespace(member=membership(peer_of(address))),
                failed=lambda: None,
            )
            for address in addresses
        ]


async def attack(kind: str, seconds: float, addresses: list[str]) -> None:
    """Do such a thing to the nodes at these addresses. Prints how often a second it was done to each, and the processor
    seconds a second."""
    field, invited, done = Seen(addresses), invitation(name="one"), [0]
    async with contextlib.AsyncExitStack() as stack:
        tasks = list[asyncio.Task[None]]()
        for number in range(TOGETHER.get(kind, 1)):
            given = invitation(name=f"other-{number}") if kind == "ahead" else invited
            member = await stack.enter_async_context(liar(field, f"{kind}-{number}", given))
            member.ahead = 1000 if kind == "ahead" else 0
            member.delta = -1000.0
            if kind not in WITHOUT_PAUSE:
                await member.take_part(works=kind in ("scales", "holds"))
            else:
                await member.look()
                tasks += [asyncio.create_task(again_and_again(member, kind, done)) for _ in range(AT_ONCE)]
        print("begins", flush=True)
        began = spent()
        await asyncio.sleep(seconds)
        print(json.dumps({"times": round(done[0] / seconds), "its": round((spent() - began) / seconds, 2)}), flush=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def again_and_again(member: Liar, kind: str, done: list[int]) -> None:
    """Say or store the same thing until cancelled."""
    while True:
        if kind == "fetches":
            await member.tell_all(Ask(0, tuple(range(SLICES))))
        elif kind == "nudges":
            await member.tell_all(Nudge(member.held.version.epoch + done[0]))
        elif kind == "probes":
            await member.tell_all(Probe(member.summary(role="aggregator")))
        elif kind == "readies":
            await member.tell_all(member.contribution())
        elif kind == "slices":
            ready = member.contribution()
            await member.tell_all(member.part(ready, 0), member.gradient())
        elif kind == "describes":
            await member.tell_all(Describe())
        else:
            place = f"{RUN_ID}/peers/{os.urandom(1)[0] % 4}"
            await member.transport.store(place, member.id, os.urandom(900), 60.0)
        done[0] += 1


async def ask_the_dht(kind: str, seconds: float, addresses: list[str]) -> None:
    """Ask the nodes at these addresses for too much, as a stranger. Prints what `attack` does."""
    eve = await join(initial_peers=addresses)
    protocol, until, done = eve._dht._node.protocol, time.time() + 600.0, 0
    stubs = [protocol.get_stub(PeerID.from_base58(peer_of(address))) for address in addresses]
    junk, many = DHTID.generate(source="junk").to_bytes(), [os.urandom(20) for _ in range(KEYS)]

    async def find(stub: Any, keys: list[bytes]) -> None:
        await stub.rpc_find(dht_pb2.FindRequest(keys=keys, peer=protocol.node_info), timeout=20.0)

    async def store(stub: Any, key: bytes, value: bytes, numbers: range) -> None:
        count, subkeys = len(numbers), [protocol.serializer.dumps(b"%d" % number) for number in numbers]
        said = {"values": [protocol.serializer.dumps(value)] * count, "in_cache": [False] * count}
        said |= {"keys": [key] * count, "subkeys": subkeys, "expiration_time": [until] * count}
        await stub.rpc_store(dht_pb2.StoreRequest(peer=protocol.node_info, **said), timeout=20.0)

    async def ping(stub: Any) -> None:
        invented = dht_pb2.NodeInfo(node_id=DHTID(int.from_bytes(os.urandom(20), "big")).to_bytes())
        await stub.rpc_ping(dht_pb2.PingRequest(peer=invented), timeout=20.0)

    def asked() -> list[Any]:
        if kind == "records":
            return [find(stubs[0], [junk] * NAMED)]
        if kind == "stores":
            return [store(stub, os.urandom(20), b"x", range(STORED)) for stub in stubs]
        if kind == "ids":
            return [ping(stub) for stub in stubs]
        return [*(find(stub, many) for stub in stubs), asyncio.sleep(EVERY_S)]

    if kind == "records":
        for at in range(0, RECORDS, 100):
            await store(stubs[0], junk, bytes(RECORD_BYTES), range(at, at + 100))
    print("begins", flush=True)
    give_up_at, began = time.monotonic() + seconds, spent()
    while time.monotonic() < give_up_at:
        await asyncio.gather(*asked(), return_exceptions=True)
        done += 1
    print(json.dumps({"times": round(done / seconds), "its": round((spent() - began) / seconds, 2)}), flush=True)
    await eve.close()


async def flood(kind: str, seconds: float, addresses: list[str]) -> None:
    """Flood the node at the first address. Prints what `attack` does."""
    async with contextlib.AsyncExitStack() as strangers:
        victim = SimpleNamespace(peer_id=peer_of(addresses[0]))
        ones = [await strangers.enter_async_context(attacker(victim, addresses=addresses[:1])) for _ in FLOODS]
        print("begins", flush=True)
        began = spent()
        floods = [asyncio.create_task(one.flood(*said)) for one, said in zip(ones, FLOODS, strict=True)]
        await asyncio.sleep(seconds)
        its = round((spent() - began) / seconds, 2)
        for task in floods:
            task.cancel()
        print(json.dumps({"times": round(sum([await task for task in floods]) / seconds), "its": its}), flush=True)


def compute(seconds: float) -> None:
    """Use a core without pause."""
    print("begins", flush=True)
    began, cost = time.monotonic(), spent()
    while time.monotonic() < began + seconds:
        sum(range(10_000))
    print(json.dumps({"its": round((spent() - cost) / seconds, 2)}), flush=True)


def attacked(field: Field, kind: str, seconds: float) -> dict[str, float]:
    """What came of it while a process of its own did such a thing."""
    addresses = [node.transport.addresses()[0] for node in field.nodes]
    command = [sys.executable, "-m", "tests.real.member_cost", "--seconds", str(seconds), "--attack", kind, *addresses]
    return measured(field, seconds, [] if kind == "quiet" else ["nice", "-n", str(NICE), *command])


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--attack", nargs="+")
    asked = parser.parse_args()
    if asked.attack:
        kind, *addresses = asked.attack
        attacks = ask_the_dht if kind in OF_THE_DHT else flood if kind == "floods" else attack
        compute(asked.seconds) if kind == "beside" else asyncio.run(attacks(kind, asked.seconds, addresses))
        return
    quiet = 0.0
    for kind in asked.kinds:
        field = Field()
        try:
            for node in field.nodes:
                node.step_s = STEP_S
            figures = attacked(field, kind, asked.seconds)
            field.agrees()
        finally:
            field.end()
        quiet = quiet or figures["rounds"]
        print(kind, json.dumps({"part": round(figures["rounds"] / quiet, 2), **figures}), flush=True)


if __name__ == "__main__":
    main()
