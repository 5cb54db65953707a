"""Feeds damaged bytes to three nodes that train together: `python -m tests.fuzz.live --minutes 10`.

A stranger opens streams of each kind to them, and connections to each port that listens. A member with an invitation
sends messages and payloads, and stores records. Everything begins as something right, which is then damaged.

Prints a line of JSON: how many cases of each kind there were, the rounds a second before and meanwhile, and the memory
of this process early and at the end. The exit code is 1 if a node's loop or log shows an exception that is not ours,
if rounds end, or if memory grows by half.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))

from liar import ZEROS, Liar, liar
from nodes import RUN_ID, Field

from p2p_diloco.core import messages as m
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.net.framing import VERSION, Accepted, Bulk, Message, Progress, encode
from p2p_diloco.net.hivemind import DIRECT
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.net.relay import RELAY, RELAYED
from p2p_diloco.node.headers import pack
from p2p_diloco.node.run_record import BOARD
from tests.fuzz.mutations import mutated
from tests.net.attacker import attacker
from tests.net.members import id_of, membership

SHOWN = 5
PROTOCOLS = (f"/p2p-diloco/{VERSION}/{RUN_ID}", f"/p2p-diloco/{VERSION}/{RUN_ID}{DIRECT}", RELAY, RELAYED)
QUIET_PART, WARM_PART = 0.1, 0.2
"""Of the time: without an attack, and from its beginning until memory is read for the first time."""
GROWTH = 1.5
CASE_S = 10.0


class Faults(logging.Handler):
    """Exceptions in logs that are not this package's own. A case that ends in one was not refused, but fell over."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if record.levelno >= logging.ERROR or (error is not None and not isinstance(error, P2PDilocoError)):
            self.found.append(f"{record.name}: {record.getMessage()[:200]} ({error!r})"[:400])


def streams(field: Field) -> list[bytes]:
    """What a stranger may write on a stream: frames of each kind, and certificates that are not its own."""
    stolen = membership(id_of("x")).chain
    asked = [{"open": field.nodes[0].id}, {"register": True}, {"check": ["/ip4/127.0.0.1/tcp/22"]}]
    said = [Message(b""), Message(b"?" + stolen), Bulk(b"header", 1000), Accepted(), Progress(7)]
    return [*map(encode, said), *(encode(Message(msgpack.packb({**one, "member": stolen}))) for one in asked)]


def headers(member: Liar) -> list[bytes]:
    """Headers of right messages."""
    ready = member.contribution()
    said = [m.Probe(member.summary()), m.Ask(0), ready, member.part(ready, 0), member.commit(member.choice())]
    said += [m.Claim(0, member.held.version, 1), m.Want(0, member.held.version, m.What.READY)]
    return [pack(member.signatures.signed(one), member.token)[0] for one in said]


async def attack(field: Field, seconds: float, seed: int) -> Counter[str]:
    """Feed cases for so long; returns how many of each kind."""
    rng, cases = Random(seed), Counter[str]()
    async with contextlib.AsyncExitStack() as stack:
        victims = [node.transport for node in field.nodes]
        strangers = [await stack.enter_async_context(attacker(victim)) for victim in victims]
        member = await stack.enter_async_context(liar(field, "fuzzer"))
        await member.take_part()
        at_streams, at_headers = streams(field), headers(member)
        kept = list((await BOARD.fetch(victims[0], RUN_ID)).values())
        libp2p = [int(address.split("/tcp/")[1].split("/")[0]) for address in field.addresses]
        ports = [*libp2p, *(port for victim in victims for _, port in victim._exchange.direct.listener.ports)]
        hello = b"\x16\x03\x01\x00\x2a\x01\x00\x00\x26\x03\x03" + bytes(37)

        async def on_a_stream() -> None:
            pipe, _ = await rng.choice(strangers).stream(rng.choice(PROTOCOLS))
            pipe.write(mutated(rng, at_streams))
            asyncio.get_running_loop().call_later(1.0, pipe.abort)

        async def on_a_port() -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", rng.choice(ports))
            writer.write(mutated(rng, [hello, b"/multistream/1.0.0\n", *at_streams]))
            await asyncio.sleep(0.01)
            writer.close()

        async def a_message() -> None:
            payload = rng.choice([None, ZEROS, memoryview(mutated(rng, [bytes(ZEROS)]))])
            await member.transport.send(rng.choice(field.nodes).id, mutated(rng, at_headers), payload)

        async def a_record() -> None:
            place = rng.choice([f"{RUN_ID}/peers/{rng.randrange(4)}", BOARD.key(RUN_ID, member.id)])
            await member.transport.store(place, member.id, mutated(rng, kept)[:1000], 30.0)

        ways: Sequence[Callable[[], Awaitable[None]]] = (on_a_stream, on_a_port, a_message, a_record)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            way = rng.choice(ways)
            cases[way.__name__] += 1
            with contextlib.suppress(Refusal, Unreachable, OSError, asyncio.TimeoutError):
                await asyncio.wait_for(way(), CASE_S)
    return cases


def play(seconds: float, seed: int) -> dict[str, Any]:
    """Let three nodes train, without an attack at first; returns what came of it."""
    faults, process = Faults(), psutil.Process()
    logging.getLogger("p2p_diloco").addHandler(faults)
    logging.getLogger("asyncio").addHandler(faults)
    field = Field()

    def rounds_in(epoch: int, during_s: float) -> float:
        return round((field.epoch - epoch) / during_s, 2)

    async def watched() -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, told: faults.found.append(repr(told)[:400]))
        epoch = field.epoch
        await asyncio.sleep(QUIET_PART * seconds)
        quiet, epoch = rounds_in(epoch, QUIET_PART * seconds), field.epoch
        memory: list[float] = []
        loop.call_later(WARM_PART * seconds, lambda: memory.append(process.memory_info().rss / 1e6))
        cases = await attack(field, (1.0 - QUIET_PART) * seconds, seed)
        memory.append(process.memory_info().rss / 1e6)
        meanwhile = rounds_in(epoch, (1.0 - QUIET_PART) * seconds)
        await field.goes_on()
        return {"cases": cases, "rounds": [quiet, meanwhile], "MB": [round(one) for one in memory]}

    try:
        told = asyncio.run_coroutine_threadsafe(watched(), field._loop).result(2 * seconds + 120.0)
        if told["MB"][-1] > GROWTH * told["MB"][0]:
            faults.found.append("memory grew by half")
        return {**told, "faults": faults.found[:SHOWN]}
    finally:
        field.end()
        logging.getLogger("p2p_diloco").removeHandler(faults)
        logging.getLogger("asyncio").removeHandler(faults)


def main() -> int:
    """Play, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    told = play(asked.minutes * 60.0, asked.seed)
    print(json.dumps(told), flush=True)
    return 1 if told["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
