"""A stream on which this peer sends messages, with payloads or without; and the state that all streams of this peer
share: limits, counts, the inbox, the open pipes, and the tasks.

Law: an `Outgoing` knows one stream; the caller chooses the next message. Messages leave one after the other, and their
answers come back in the same order. The next payload may be written before the last one is answered: so the link stays
busy, and TCP keeps its estimate of the link's rate. If a stream stalls, every send that waits on it fails. A retired
stream ends after the last answer.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import islice
from weakref import WeakKeyDictionary

from p2p_diloco.net.framing import Accepted, Bulk, Frame, FrameError, FrameStream, Message, Progress, Refused
from p2p_diloco.net.interface import Inbox, Limits, Traffic, Unreachable
from p2p_diloco.net.pipe import Pipe, PipeStalled
from p2p_diloco.net.shares import Groups, no_groups

Verdict = Accepted | Refused | None
"""A receiver's answer to a message; None: the stream ended before the answer came. It may have broken before the
message was sent, so it makes sense to send that once more on another stream."""


@dataclass(slots=True, eq=False)
class _Sent:
    """A message without an answer. Its `answer` is cancelled if its send was."""

    answer: asyncio.Future[Verdict]
    may_take_s: float
    payload_bytes: int
    """-1 for a message without a payload, of which no progress is reported."""
    reached: Callable[[int], None]
    reached_bytes: int = -1


class Outgoing:
    """Sends messages on one stream, writing one at a time. `way`: the stream's path ("direct", "libp2p" or "relayed").
    The owner runs `read`."""

    def __init__(self, frames: FrameStream, way: str) -> None:
        self.frames, self.way = frames, way
        self._waiting = deque[_Sent]()
        self._loop = asyncio.get_running_loop()
        self.heard_at = -math.inf
        """When the last answer or progress came, by the loop's clock."""
        self._answered_at = -math.inf
        self.used = self._retired = False
        self.lent, self.carried_bytes = False, 0
        """Whether a payload is being written, and how much was written; kept for direct connections alone, by `Way`."""

    @property
    def fit(self) -> bool:
        """Whether another message may be written on this stream. False if bytes came while no answer was awaited: they
        would be taken for the next message's answer."""
        return not self._retired and not self.ended and (bool(self._waiting) or self.frames.pipe.quiet)

    @property
    def ended(self) -> bool:
        return self.frames.pipe.ended is not None

    @property
    def awaited(self) -> bool:
        """Whether a send waits for an answer."""
        return any(not sent.answer.done() for sent in self._waiting)

    def retire(self) -> None:
        """Stop accepting messages, and end the stream once no `send` waits for an answer."""
        self._retired = True
        if not self.awaited:
            self.frames.pipe.abort()

    async def send(
        self,
        header: bytes,
        payload: memoryview | None,
        *,
        limits: Limits,
        over: Callable[[asyncio.Future[None]], None] = lambda written: None,
        reached: Callable[[int], None] = lambda count: None,
    ) -> Verdict:
        """Write a message, and wait for the receiver's answer. `over` is called as soon as the next payload may be
        written; its argument is the future of this payload's writing, which is done or cancelled. `reached` is called
        now and then with the number of this payload's bytes that have arrived.

        A cancelled send does not affect other messages' answers.

        Raises:
            Unreachable: a deadline passed, or the bytes that came are no answer.
        """
        nbytes = -1 if payload is None else len(payload)
        may_take_s = math.inf if payload is None else limits.transfer_timeout_s(nbytes)
        sent = _Sent(self._loop.create_future(), may_take_s, nbytes, reached)
        self.used = True
        self._waiting.append(sent)
        written: asyncio.Future[None] | None = None
        if payload is None:
            self.frames.write(Message(header))
        else:
            self.frames.write(Bulk(header, nbytes))
            written = self.frames.pipe.write_view(payload)
            written.add_done_callback(over)
        try:
            if self.ended:
                self._settle()
            return await self._answered(sent, limits.read_timeout_s)
        finally:
            sent.answer.cancel()
            if written is not None and written.cancel():  # partly written, and its memory may change from now on
                self._retired = True
                self.frames.pipe.forget_unsent()
            if self._retired:
                self.retire()

    async def _answered(self, sent: _Sent, stall_s: float) -> Verdict:
        """Wait for the answer. Messages written before this one must arrive first, even if their sends were cancelled;
        so the deadline includes the time that they may take."""
        began = self._loop.time()
        while not sent.answer.done():
            before = islice(self._waiting, self._waiting.index(sent) + 1)
            late_at = max(began, self._answered_at) + (total_s := sum(each.may_take_s for each in before))
            stalled_at = max(began, self.heard_at) + stall_s
            left_s = min(late_at, stalled_at) - self._loop.time()
            if left_s <= 0:
                late = late_at < stalled_at
                self.fail(f"the payload took longer than {total_s:g} s" if late else f"nothing came for {stall_s:g} s")
            else:
                await asyncio.wait({sent.answer}, timeout=left_s)
        return sent.answer.result()

    async def read(self, frame_s: float) -> None:
        """Read answers until the stream ends, and pass each to the `send` that waits for it. Then those that still wait
        fail. A frame that has begun must be complete within `frame_s`."""
        try:
            while (frame := await self.frames.read(idle_s=None, frame_s=frame_s)) is not None:
                self._take(frame)
            self._settle()
        except (FrameError, PipeStalled) as error:
            self.fail(str(error))
        finally:
            self.fail("this peer is closing")

    def _take(self, frame: Frame) -> None:
        first = self._waiting[0] if self._waiting else None
        match frame:
            case Accepted() | Refused() if first is not None:
                self._waiting.popleft()
                self._answered_at = self._loop.time()
                if not first.answer.done():  # else its send was cancelled
                    if isinstance(frame, Accepted):
                        first.reached(first.payload_bytes)
                    first.answer.set_result(frame)
            case Progress() if first is not None and first.answer.done():
                pass
            case Progress(count) if first is not None and first.reached_bytes < count <= first.payload_bytes:
                first.reached_bytes = count
                first.reached(count)
            case _:
                raise FrameError(f"a {type(frame).__name__} frame was not asked for")
        self.heard_at = self._loop.time()

    def fail(self, why: str) -> None:
        """End the stream now: every send that waits on it raises `Unreachable`."""
        self.frames.pipe.abort()
        self._settle(f"{self.frames.peer}: {why}")

    def _settle(self, why: str | None = None) -> None:
        """End the wait of every send: with no answer, or with `Unreachable` if there is a reason."""
        while self._waiting:
            if (answer := self._waiting.popleft().answer).done():
                continue
            if why is None:
                answer.set_result(None)
            else:
                answer.set_exception(Unreachable(why))


CLOSE_S = 1.0
"""Seconds that streams have to end before their tasks are cancelled."""


def start(coroutine: Coroutine[object, object, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Run a coroutine as a task. The task stays in the set `tasks` until it ends."""
    task = asyncio.create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def stop(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Streams:
    """The open streams of a peer and the tasks that serve them."""

    def __init__(self, inbox: Inbox, limits: Limits, traffic: Traffic) -> None:
        self.inbox, self.limits, self.traffic = inbox, limits, traffic
        self.pipes = WeakKeyDictionary[Pipe, str]()  # with their peers; weak: the code that uses a pipe keeps it alive
        self.tasks: set[asyncio.Task[None]] = set()
        self.closing = False
        self.admits: Callable[[str], bool] = lambda peer: True
        """Whether streams with this peer are allowed. A private run allows streams with its members only."""
        self.groups: Groups = no_groups

    def frames(self, peer: str, pipe: Pipe) -> FrameStream:
        """Make a frame stream over a pipe, which `Streams.close` will end. If the peer isn't admitted, the pipe ends at
        once."""
        self.pipes[pipe] = peer
        if not self.admits(peer):
            _cut(pipe)
        return FrameStream(pipe, peer, self.limits, self.traffic)

    def outgoing(
        self, peer: str, pipe: Pipe, way: str, ended: Callable[[Outgoing], None] = lambda stream: None
    ) -> Outgoing:
        """Make a stream on which this peer sends, over a pipe. `ended` is called when the stream has ended.

        Raises:
            Unreachable: this peer is closing.
        """
        if self.closing:
            pipe.abort()
            raise Unreachable("this peer is closing")
        stream = Outgoing(self.frames(peer, pipe), way)
        start(self._read(stream, ended), self.tasks)
        return stream

    async def _read(self, stream: Outgoing, ended: Callable[[Outgoing], None]) -> None:
        try:
            await stream.read(self.limits.read_timeout_s)
        finally:
            ended(stream)

    def cut(self, peer: str) -> None:
        """End every stream and connection with a peer at once."""
        for pipe in [pipe for pipe, other in self.pipes.items() if other == peer]:
            _cut(pipe)

    def lost(self, peer: str) -> None:
        """Tell the inbox that a stream of `peer` broke, unless this peer is closing."""
        if not self.closing:
            self.inbox.closed(peer)

    def abort(self) -> None:
        """End every stream and connection."""
        for pipe in list(self.pipes):
            pipe.abort()

    async def close(self) -> None:
        self.closing = True
        self.abort()
        if tasks := self.tasks - {asyncio.current_task()}:
            _, unfinished = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in unfinished:
                task.cancel()


def _cut(pipe: Pipe) -> None:
    """End a pipe at once; bytes that have come already are not read."""
    pipe.abort()
    pipe.unread.clear()
