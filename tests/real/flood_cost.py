"""Measures what a flood of strangers costs a private run: `python -m tests.real.flood_cost [--turns N] [--seconds S]
[--work S] [--apart]`.

Three honest nodes in this process make rounds, with `--work` seconds of training (a sleep) between two exchanges. Turns
of three kinds follow each other. Some are quiet. In some a process of its own floods one node from four connections,
each opening stream after stream. In the others it floods another program on this machine instead, which closes each
stream at once: that shows what the attackers' own processor time takes from the nodes, since all share the cores. With
`--apart` the nodes have one core and the attackers another, as if they were on other machines.

Prints for each kind, as JSON: the rounds a second turn by turn, and the medians of these, of the streams opened a
second, of the processor seconds a second of the nodes and of the attackers, with their daemons, and of the nodes' most
memory in MB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace

from p2p_diloco.net.daemon import Daemon
from p2p_diloco.net.framing import VERSION, Bulk, Message
from p2p_diloco.net.hivemind import DIRECT
from p2p_diloco.net.pipe import Pipe
from tests.net.attacker import attacker
from tests.net.swarm import LISTEN
from tests.real.costs import measured, nodes, spent

STREAMS = f"/p2p-diloco/{VERSION}/{nodes.RUN_ID}"
FLOODS = [
    (STREAMS, Message(b"?" + bytes(900)), Bulk(b"contribution", 1 << 30)),
    (STREAMS + DIRECT,),
    (STREAMS, Message(bytes(100))),
    (STREAMS,),
]
"""The protocol and the frames of each connection's flood."""
COMMAND = [sys.executable, "-m", "tests.real.flood_cost"]


async def flood(peer: str, addresses: list[str], seconds: float) -> dict[str, float]:
    """Flood a peer from four connections; returns how many streams were opened a second, and the processor seconds a
    second of this process."""
    async with contextlib.AsyncExitStack() as strangers:
        victim = SimpleNamespace(peer_id=peer)
        ones = [await strangers.enter_async_context(attacker(victim, addresses=addresses)) for _ in FLOODS]
        print("begins", flush=True)
        began = spent()
        floods = [asyncio.create_task(one.flood(*said)) for one, said in zip(ones, FLOODS, strict=True)]
        await asyncio.sleep(seconds)
        took = spent() - began
        for task in floods:
            task.cancel()
        return {"streams": sum([await task for task in floods]) / seconds, "attackers": took / seconds}


async def elsewhere() -> None:
    """Close each stream at once, until killed. Prints the peer id and the addresses first."""
    daemon = await Daemon.start(identity_path=None, host_maddrs=LISTEN, announce_maddrs=(), client_mode=False,
                                timeout_s=30.0, on_death=None)  # fmt: skip

    async def close(peer: str, pipe: Pipe, seen_at: str) -> None:
        pipe.abort()

    for protocol in {protocol for protocol, *_ in FLOODS}:
        await daemon.serve_streams(protocol, close)
    print(daemon.peer_id, *daemon.addresses, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await daemon.close()


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--work", type=float, default=1.0)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--victim", nargs="+")
    parser.add_argument("--elsewhere", action="store_true")
    asked = parser.parse_args()
    if asked.apart:
        os.sched_setaffinity(0, {1 if asked.victim or asked.elsewhere else 0})  # child processes have the same
    if asked.victim:
        print(json.dumps(asyncio.run(flood(asked.victim[0], asked.victim[1:], asked.seconds))), flush=True)
        return
    if asked.elsewhere:
        asyncio.run(elsewhere())
        return
    nodes.STEP_S = asked.work
    if asked.apart:
        COMMAND.append("--apart")
    other = subprocess.Popen([*COMMAND, "--elsewhere"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    another = other.stdout.readline().split()
    field = nodes.Field()
    command = [*COMMAND, "--seconds", str(asked.seconds + 1.0), "--victim"]
    try:
        victims = {"quiet": [], "elsewhere": another, "flooded": [field.nodes[0].id, *field.addresses]}
        turns = defaultdict[str, list[dict[str, float]]](list)
        for _ in range(asked.turns):
            for kind, victim in victims.items():
                turns[kind].append(measured(field, asked.seconds, [*command, *victim] if victim else []))
        field.agrees()
        for kind, figures in turns.items():
            medians = {what: statistics.median([turn[what] for turn in figures]) for what in figures[0]}
            print(kind, json.dumps({"medians": medians, "rounds": [turn["rounds"] for turn in figures]}))
    finally:
        field.end()
        other.communicate()


if __name__ == "__main__":
    main()
