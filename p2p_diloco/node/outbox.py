"""Messages on their way out, each a task of its own.

Law: what was put here either is accepted by the remote, or is answered with why not; nothing is repeated.
Payloads to one peer go in the order they came, two at a time, so that a slow peer holds neither the others'
payloads nor its own probes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from p2p_diloco.net.interface import Refusal, Transport, Unreachable

BULK_AT_ONCE = 2
"""Payloads under way to one peer."""

Outcome = Refusal | Unreachable | None
"""Why a message was not accepted; None: it was."""
Answer = Callable[[Outcome], None]
Made = Callable[[], Awaitable[tuple[bytes, memoryview]]]
"""Makes a header and its payload once it is their turn."""

log = logging.getLogger(__name__)


class Outbox:
    """`answer` is called once for each message put here, in the loop, unless the outbox is closed before."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._bulk = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, to: str, header: bytes, payload: memoryview | None, answer: Answer) -> None:
        """Send a message; `answer` gets the outcome."""
        if payload is None:
            self._start(self._send(to, header, answer))
        else:
            self.put_made(to, _ready(header, payload), answer)

    def put_made(self, to: str, make: Made, answer: Answer) -> None:
        """Send a payload that is not to take memory before it is its turn."""
        self._start(self._send_bulk(to, make, answer))

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no payload is under way, at most so long; whether that is so."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def emptied(self, timeout_s: float) -> None:
        """Wait until nothing is under way, at most so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def close(self) -> None:
        """Give up on whatever is under way."""
        for task in self._tasks:
            task.cancel()

    def _start(self, sending: Awaitable[None]) -> None:
        task = asyncio.ensure_future(sending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, to: str, header: bytes, answer: Answer) -> None:
        answer(await self._outcome(to, self._transport.send(to, header, None)))

    async def _send_bulk(self, to: str, make: Made, answer: Answer) -> None:
        async def send() -> None:
            header, payload = await make()
            await self._transport.send(to, header, payload)

        self._bulk += 1
        self._idle.clear()
        try:
            async with self._turns.setdefault(to, asyncio.Semaphore(BULK_AT_ONCE)):
                outcome = await self._outcome(to, send())
            answer(outcome)
        finally:
            self._bulk -= 1
            if not self._bulk:
                self._idle.set()

    async def _outcome(self, to: str, sending: Awaitable[None]) -> Outcome:
        try:
            await sending
        except (Refusal, Unreachable) as error:
            return error
        except Exception as error:  # whoever put the message waits for an answer, whatever went wrong
            log.exception("a message to %s could not be sent", to)
            return Unreachable(f"{to}: sending failed: {error!r}")
        return None


def _ready(header: bytes, payload: memoryview) -> Made:
    async def make() -> tuple[bytes, memoryview]:
        return header, payload

    return make
