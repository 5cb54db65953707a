"""Sends outgoing messages, each in a task of its own.

Law: each message is accepted by its receiver, or its sender gets the reason why not; nothing is sent twice. Payloads to
one peer leave in order, as fast as the transport writes them, so a slow peer delays neither the payloads to other peers
nor the probes to itself. Messages for a peer that catches up wait for the payloads of rounds, leave a few at a time,
and are dropped when a newer one replaces them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from p2p_diloco.net.interface import Refusal, Transport, Unreachable

BULK_AT_ONCE = 4
"""The most payloads to one peer that the transport is writing at a time. Payloads that are written and wait for their
answers don't count, because a path of long delay carries many."""
LATE_BYTES = 4 * 2**20
"""Messages to a peer that catches up leave in batches; a batch is full once its payloads have this length together.
Many short messages, sent one by one, would take a round trip each."""
GIVE_WAY = 2.0
"""The longest time that messages to a peer that catches up wait for rounds, as a multiple of the time that sending the
last such messages took: a run whose rounds leave no gap must not shut newcomers out."""
GIVE_WAY_S = 5.0
"""The longest such wait in seconds. The first message to a peer may wait this long."""

Outcome = Refusal | Unreachable | None
"""The reason why a message was not accepted; None: it was accepted."""
Answer = Callable[[Outcome], None]
Made = Callable[[], Awaitable[tuple[bytes, memoryview]]]
"""A function that makes a header and its payload when their turn has come."""

log = logging.getLogger(__name__)


class Outbox:
    """Sends messages to other peers. When a message's outcome is known, its `answer` is called once, unless the outbox
    is closed before. `sending` makes a context that is entered while a round's payload is queued or under way.
    `gives_way`: whether messages for a peer that catches up wait for the payloads of rounds; False in asynchronous
    mode, where submitters wait for these messages."""

    def __init__(
        self,
        transport: Transport,
        sending: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        gives_way: bool = True,
    ) -> None:
        self._transport, self._sending, self._gives_way = transport, sending, gives_way
        self.failed = 0
        """How many times a message was sent and not accepted."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._keyed: dict[Hashable, dict[asyncio.Task[None], Answer]] = {}
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._lines: dict[str, dict[Hashable, tuple[Made, Answer]]] = {}  # by peer: queued messages, oldest first
        self._patience_s: dict[str, float] = {}
        self._rounds, self._late = set[asyncio.Task[None]](), set[asyncio.Task[None]]()  # payloads, and lines

    def put(
        self,
        to: str,
        header: bytes,
        payload: memoryview | None = None,
        answer: Answer = lambda outcome: None,
        key: Hashable = None,
    ) -> None:
        """Send a message; `answer` is called with the outcome. For a message with a payload, `key`: by which `withdraw`
        finds it; None: it can't be withdrawn."""
        if payload is None:
            self._start(self._send(to, header, answer))
            return
        task = self._start(self._send_bulk(to, header, payload, answer), self._rounds)
        if key is not None:
            sendings = self._keyed.setdefault(key, {})
            sendings[task] = answer
            task.add_done_callback(lambda task: sendings.pop(task, None))

    async def withdraw(self, key: Hashable) -> None:
        """Stop all messages that were put here under this key, and wait until none of them is under way."""
        if sendings := self._keyed.pop(key, {}):
            for task, answer in list(sendings.items()):
                if task.cancel():
                    answer(Refusal("the message is not needed any more"))
            await asyncio.wait(list(sendings))

    def put_late(self, to: str, make: Made, answer: Answer, key: Hashable = None) -> None:
        """Send a message to a peer that catches up. `make` makes the message only when its turn has come; before that
        it takes no memory.

        An older message that is still queued for the same peer under the same `key`, other than None, is dropped.
        """
        line = self._lines.get(to)
        if line is None:
            line = self._lines[to] = {}
            self._start(self._send_late(to, line), self._late)
        older = line.pop(key, None)
        line[object() if key is None else key] = make, answer
        if older is not None:
            older[1](Refusal("a newer message was queued in its place"))

    async def drained(self, timeout_s: float) -> bool:
        """Wait, for at most `timeout_s`, until no payload is queued or under way. Returns False if some still are."""
        return await _ended(self._rounds, self._late, within_s=timeout_s)

    async def emptied(self, timeout_s: float) -> None:
        """Wait, for at most `timeout_s`, until no message is queued or under way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def close(self) -> None:
        """Cancel every message that is queued or under way."""
        for task in self._tasks:
            task.cancel()

    def _start(self, sending: Coroutine[Any, Any, None], *kinds: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.create_task(sending)
        for tasks in (self._tasks, *kinds):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task

    async def _send(self, to: str, header: bytes, answer: Answer, payload: memoryview | None = None) -> None:
        answer(await self._outcome(to, self._transport.send(to, header, payload)))

    async def _send_bulk(self, to: str, header: bytes, payload: memoryview, answer: Answer) -> None:
        turns = self._turns.setdefault(to, asyncio.Semaphore(BULK_AT_ONCE))
        with self._sending(), ExitStack() as turn:
            await turns.acquire()
            turn.callback(turns.release)
            answer(await self._outcome(to, self._transport.send(to, header, payload, written=turn.close)))

    async def _send_late(self, to: str, line: dict[Hashable, tuple[Made, Answer]]) -> None:
        clock = asyncio.get_running_loop().time
        while line:
            if self._gives_way:
                await _ended(self._rounds, within_s=self._patience_s.get(to, GIVE_WAY_S))
            began = clock()
            await self._send_some(to, line)
            self._patience_s[to] = min(GIVE_WAY * (clock() - began), GIVE_WAY_S)
        del self._lines[to]

    async def _send_some(self, to: str, line: dict[Hashable, tuple[Made, Answer]]) -> None:
        """Send one batch of the queue `line`: the oldest messages, until their payloads together have `LATE_BYTES`.
        Return when all of them are answered."""
        under_way, made_bytes = list[asyncio.Task[None]](), 0
        while line and made_bytes < LATE_BYTES:
            make, answer = line.pop(next(iter(line)))
            made = asyncio.ensure_future(make())
            if (failure := await self._outcome(to, made)) is not None:
                answer(failure)
                continue
            header, payload = made.result()
            under_way.append(self._start(self._send(to, header, answer, payload)))
            made_bytes += payload.nbytes
        if under_way:
            await asyncio.wait(under_way)

    async def _outcome(self, to: str, sending: Awaitable[object]) -> Outcome:
        try:
            await sending
        except (Refusal, Unreachable) as error:
            self.failed += 1
            return error
        except Exception as error:  # the sender waits for an answer after any exception
            self.failed += 1
            log.exception("a message to %s could not be sent", to)
            return Unreachable(f"{to}: sending failed: {error!r}")
        return None


async def _ended(*kinds: set[asyncio.Task[None]], within_s: float) -> bool:
    """Wait, for at most `within_s`, until there are no such tasks. Returns False if there still are some."""
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + within_s
    while (tasks := set().union(*kinds)) and (left_s := give_up_at - clock()) > 0:
        await asyncio.wait(tasks, timeout=left_s)
    return not tasks
