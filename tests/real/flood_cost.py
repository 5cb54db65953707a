"""Measures what a flood of strangers costs a private run: `python -m tests.real.flood_cost [--turns N] [--seconds S]
[--work S]`.

Three honest nodes in this process make rounds, with `--work` seconds of training (a sleep) between two exchanges. In
every second turn a process of its own floods one of them from four connections, each opening stream after stream.
Prints rounds a second with and without the flood, turn by turn, with their medians, and the streams that were opened,
as JSON. All share the cores of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))

import nodes

from p2p_diloco.net.framing import VERSION, Bulk, Message
from p2p_diloco.net.hivemind import DIRECT
from tests.net.attacker import attacker

STREAMS = f"/p2p-diloco/{VERSION}/{nodes.RUN_ID}"
FLOODS = [
    (STREAMS, Message(b"?" + bytes(900)), Bulk(b"contribution", 1 << 30)),
    (STREAMS + DIRECT,),
    (STREAMS, Message(bytes(100))),
    (STREAMS,),
]
"""The protocol and the frames of each connection's flood."""


async def flood(peer: str, addresses: list[str], seconds: float) -> int:
    """Flood a peer from four connections; returns how many streams were opened."""
    async with contextlib.AsyncExitStack() as strangers:
        victim = SimpleNamespace(peer_id=peer)
        ones = [await strangers.enter_async_context(attacker(victim, addresses=addresses)) for _ in FLOODS]
        print("begins", flush=True)
        floods = [asyncio.create_task(one.flood(*said)) for one, said in zip(ones, FLOODS, strict=True)]
        await asyncio.sleep(seconds)
        for task in floods:
            task.cancel()
        return sum([await task for task in floods])


def rate(field: nodes.Field, seconds: float) -> float:
    """Rounds a second of the slowest node."""
    began, at = field.epoch, time.monotonic()
    time.sleep(seconds)
    return (field.epoch - began) / (time.monotonic() - at)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--work", type=float, default=1.0)
    parser.add_argument("--victim", nargs="+")
    asked = parser.parse_args()
    if asked.victim:
        print(asyncio.run(flood(asked.victim[0], asked.victim[1:], asked.seconds)), flush=True)
        return
    nodes.STEP_S = asked.work
    field = nodes.Field()
    try:
        quiet, flooded, opened = list[float](), list[float](), 0
        for _ in range(asked.turns):
            quiet.append(rate(field, asked.seconds))
            first = field.nodes[0]
            command = [sys.executable, "-m", "tests.real.flood_cost", "--seconds", str(asked.seconds + 1.0)]
            attack = subprocess.Popen(
                [*command, "--victim", first.id, *field.addresses], stdout=subprocess.PIPE, text=True
            )
            assert attack.stdout is not None
            assert attack.stdout.readline().strip() == "begins"
            flooded.append(rate(field, asked.seconds))
            opened += int(attack.communicate(timeout=60.0)[0])
        field.agrees()
        medians = {"quiet": statistics.median(quiet), "flooded": statistics.median(flooded)}
        print(json.dumps({"quiet": quiet, "flooded": flooded, "medians": medians, "streams": opened}))
    finally:
        field.end()


if __name__ == "__main__":
    main()
