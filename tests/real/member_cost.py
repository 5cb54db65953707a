"""Measures what a hostile member costs a private run: `python -m tests.real.member_cost [--seconds S]`.

Three honest nodes in this process make rounds, each kind in a run of its own. All peers of the hostile member have one
invitation, but for the two of `ahead`. They share this process with the nodes, so what they do without pause
(`fetches`, `nudges`, `litters`) costs the nodes more than it would from elsewhere.

    quiet    nothing
    scales   it contributes -1000 times what the others do
    idles    it says that it works, and contributes nothing
    holds    it leads in its turn, and never commits
    ahead    two say that they are a thousand epochs ahead, and send nothing
    fetches  three ask all nodes for the whole state, again and again
    nudges   three ask all nodes to exchange now, again and again
    litters  it stores junk where records lie, again and again

Prints for each kind, as JSON: the rounds a second, their part of those of `quiet`, and the most memory of this process
meanwhile, in MB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from liar import Liar, liar
from nodes import RUN_ID, SHARDS, Field

from p2p_diloco.core.messages import Ask
from p2p_diloco.node.wire import Nudge
from tests.net.members import invitation

KINDS = ("quiet", "scales", "idles", "holds", "ahead", "fetches", "nudges", "litters")
TOGETHER = {"ahead": 2, "fetches": 3, "nudges": 3}
"""How many peers the hostile member has; else one."""


@contextlib.asynccontextmanager
async def hostile(field: Field, kind: str) -> AsyncIterator[None]:
    """While this is open, a hostile member does such a thing."""
    async with contextlib.AsyncExitStack() as stack:
        invited, begun = invitation(name="one"), list[asyncio.Task[None]]()
        for number in range(TOGETHER.get(kind, 1) if kind != "quiet" else 0):
            given = invitation(name=f"other-{number}") if kind == "ahead" else invited
            member = await stack.enter_async_context(liar(field, f"{kind}-{number}", given))
            member.ahead = 1000 if kind == "ahead" else 0
            member.delta = -1000.0
            await member.take_part(works=kind in ("scales", "holds"))
            if kind in ("fetches", "nudges", "litters"):
                begun.append(asyncio.create_task(again_and_again(member, kind)))
        try:
            yield
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)


async def again_and_again(member: Liar, kind: str) -> None:
    """Say or store the same thing until cancelled."""
    while True:
        if kind == "fetches":
            await member.tell_all(Ask(0, tuple(range(SHARDS))))
        elif kind == "nudges":
            await member.tell_all(Nudge(max(node.epoch for node in member.field.nodes) + 2))
        else:
            place = f"{RUN_ID}/peers/{os.urandom(1)[0] % 4}"
            await member.transport.store(place, member.id, os.urandom(900), 60.0)


async def measured(field: Field, kind: str, seconds: float) -> tuple[float, float]:
    """The rounds a second, and the most memory in MB."""
    for node in field.nodes:
        node.step_s = 0.3
    async with hostile(field, kind):
        began, epoch, most = time.monotonic(), field.epoch, 0.0
        while time.monotonic() < began + seconds:
            await asyncio.sleep(0.1)
            most = max(most, psutil.Process().memory_info().rss / 1e6)
        return (field.epoch - epoch) / (time.monotonic() - began), most


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    asked = parser.parse_args()
    quiet = 0.0
    for kind in asked.kinds:
        field = Field()
        try:
            work = measured(field, kind, asked.seconds)
            rate, most = asyncio.run_coroutine_threadsafe(work, field._loop).result(asked.seconds + 120.0)
        finally:
            field.end()
        quiet = quiet or rate
        print(
            kind, json.dumps({"rounds": round(rate, 2), "part": round(rate / quiet, 2), "MB": round(most)}), flush=True
        )


if __name__ == "__main__":
    main()
