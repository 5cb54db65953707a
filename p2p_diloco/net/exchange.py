"""Messages over streams: a link for the small ones, another stream for payloads, one after the other.

Law: knows frames and pipes, not libp2p. Whoever opens a stream is the one that sends messages on it; answers
go back on the same stream. What a remote does wrong is answered with a reason, counted, and ends that stream
alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from p2p_diloco.net.addresses import leads_over_a_relay
from p2p_diloco.net.bandwidth import LARGE_BYTES, Meter, Payload
from p2p_diloco.net.direct import DirectChannel, Opened
from p2p_diloco.net.framing import Accepted, Bulk, Frame, FrameError, Message, Progress, Refused
from p2p_diloco.net.interface import (
    PEERS_COUNTED_MAX,
    Inbox,
    Limits,
    Refusal,
    Traffic,
    Unreachable,
    check_announced,
    check_outgoing,
)
from p2p_diloco.net.link import FrameStream, Link
from p2p_diloco.net.payload_stream import PayloadStream, Verdict
from p2p_diloco.net.per_peer import OnePerPeer
from p2p_diloco.net.pipe import Pipe, PipeBroken, PipeStalled

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.25
"""How often a receiver tells how far a payload has come: by this a sender tells a slow peer from a frozen
one."""

LINGER_S = 2.0
"""How long a sender may take to hang up once it has its answer. Closing at once could destroy the answer on its way."""

KEPT_S = 60.0
"""How long after it was opened a stream over libp2p takes further payloads; its receiver waits twice as long for each.
By then there may be a better way than over a relay, and what leads to a peer that has gone quietly ends."""

REFUSALS_EVERY_S = 60.0
"""How often a peer whose messages are refused is named in the log."""

SLACK_BYTES = 256
"""How much longer the memory is that a payload is received into: then what it leaves in the heap has room for a tensor
of the payload's length, which is aligned, and the two can take each other's place."""
CLOSE_S = 1.0
"""How long streams may take to end before they are cancelled."""


class Exchange:
    """All streams of one peer, in both directions. `dial` opens a stream to a peer and tells the multiaddr at which
    that was found, or raises `Unreachable`.
    """

    def __init__(
        self, inbox: Inbox, *, limits: Limits, traffic: Traffic, dial: Callable[[str], Awaitable[Opened]]
    ) -> None:
        self.limits = limits
        self._inbox = inbox
        self.traffic = traffic
        self._dial = dial
        self.direct: DirectChannel | None = None
        """Where payloads go first, if there is one."""
        self._links, self._payload_streams = OnePerPeer(self._open_link), OnePerPeer(self._open_payload_stream)
        self._incoming_links: dict[str, Pipe] = {}
        self._awaiting_payloads = 0
        self._pipes = WeakSet[Pipe]()  # who uses one holds it
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Semaphore(limits.streams_max)
        self._writing = WeakValueDictionary[str, asyncio.Lock]()
        self._receiving = asyncio.Semaphore(limits.streams_max)
        self._refused_at: dict[str, float] = {}
        self._closing = False

    # -- sending

    async def send(self, peer: str, header: bytes, payload: memoryview | None) -> None:
        """As `Transport.send`."""
        check_outgoing(self.limits, header, payload)
        if self._closing:
            raise Unreachable("this peer is closing")
        if payload is None:
            link = await self._links.to(peer)
            await link.send(header)
        else:
            async with self._sending:
                await self._send_payload(peer, header, payload.cast("B"))

    async def _open_link(self, peer: str) -> Link:
        stream, _ = await self._open(peer)
        link = Link(stream, self.limits)
        self._start(self._keep_link(peer, link))
        return link

    async def _keep_link(self, peer: str, link: Link) -> None:
        why = "this peer is closing"
        try:
            why = await link.read_answers()
        finally:
            self._links.drop(peer, link)
            link.fail(why)
            self._lost(peer)

    async def _open_payload_stream(self, peer: str) -> PayloadStream:
        frames, found_at = await self._open(peer)
        stream = PayloadStream(frames, "relayed" if leads_over_a_relay(found_at) else "libp2p")
        asyncio.get_running_loop().call_later(KEPT_S, self._leave, peer, stream)
        return stream

    def _leave(self, peer: str, stream: PayloadStream) -> None:
        """Write no more on a stream over libp2p."""
        self._payload_streams.drop(peer, stream)
        stream.retire()

    async def _send_payload(self, peer: str, header: bytes, payload: memoryview) -> None:
        """Over a direct connection if there is one, and over libp2p if there is none, or it breaks.

        To one peer they are written one after the other: each is there as early as can be, and while its answer is on
        its way the next one keeps the link busy. Together they would end together, and all wait for answers at once.
        """
        turns = self._writing.setdefault(peer, asyncio.Lock())
        if self.direct is None or not await self._sent_directly(self.direct, _Turn(turns), peer, header, payload):
            await self._send_over_libp2p(turns, peer, header, payload)

    async def _send_over_libp2p(self, turns: asyncio.Lock, peer: str, header: bytes, payload: memoryview) -> None:
        """On the stream that is kept. If that breaks after it has carried others, once more: it may have been broken
        before, unseen.
        """
        once_more = True
        while True:
            stream = await self._payload_streams.to(peer)  # before any deadline runs
            async with _Turn(turns) as turn:
                fresh = stream.fresh
                if not fresh and not stream.fit:
                    self._leave(peer, stream)
                    continue
                verdict = await self._transfer(stream, header, payload, turn.over)
            if verdict is not None:
                break
            self._lost(peer)
            if fresh or self._closing or not once_more:
                raise Unreachable(f"{peer}: the stream ended before the payload was accepted")
            once_more = False
        if isinstance(verdict, Refused):
            raise Refusal(verdict.reason)

    async def _sent_directly(
        self, direct: DirectChannel, turn: _Turn, peer: str, header: bytes, payload: memoryview
    ) -> bool:
        """Whether a payload came to its verdict on a direct connection; if not, there is none, or it broke."""
        async with turn:
            stream = await direct.take(peer)
            if stream is None:
                return False

            def over() -> None:
                direct.give_back(peer, stream, len(payload))
                turn.over()

            try:
                verdict = await self._transfer(stream, header, payload, over)
            except Unreachable as error:
                direct.failed(peer, str(error))
                raise
        match verdict:
            case None:
                self._lost(peer)
                direct.failed(peer, "the direct connection broke")
                if self._closing:
                    raise Unreachable("this peer is closing")
            case _:
                direct.succeeded(peer)
        if isinstance(verdict, Refused):
            raise Refusal(verdict.reason)
        return verdict is not None

    async def _transfer(
        self, stream: PayloadStream, header: bytes, payload: memoryview, over: Callable[[], None]
    ) -> Verdict:
        """As `PayloadStream.send`, counted and measured; `over` is called when the next one may be written."""
        peer, clock = stream.frames.peer, asyncio.get_running_loop().time
        self.traffic.went(peer, stream.way)
        metered = _metered(self.traffic.bandwidth.up, peer, len(payload))

        def ended(written: asyncio.Future[None]) -> None:
            if not written.cancelled() and written.exception() is None:  # who reads the verdict notices what breaks
                self.traffic.sent(peer, len(payload))
            over()

        def reached(count: int) -> None:
            metered.reached(count, clock())
            self._inbox.moving(peer)

        try:
            return await stream.send(header, payload, limits=self.limits, over=ended, reached=reached)
        finally:
            metered.end(clock())

    async def _open(self, peer: str) -> tuple[FrameStream, str]:
        """A stream to a peer, and the multiaddr at which that was found."""
        pipe, found_at = await self._dial(peer)
        if self._closing:
            pipe.abort()
            raise Unreachable("this peer is closing")
        self._pipes.add(pipe)
        return FrameStream(pipe, peer, self.limits, self.traffic), found_at

    # -- receiving

    async def serve(self, peer: str, pipe: Pipe) -> None:
        """Take whatever a peer sends on a stream over libp2p that it opened, until that ends."""
        read_s = self.limits.read_timeout_s
        async with self._served(peer, pipe) as stream:
            match await stream.read(idle_s=read_s, frame_s=read_s):
                case Message(header):
                    await self._serve_link(stream, header)
                case frame:
                    await self._serve_payloads(stream, frame, self._next_payload)

    async def serve_direct(self, peer: str, pipe: Pipe) -> None:
        """Take payloads, one after the other, on a direct connection, until that ends."""

        async def next_payload(stream: FrameStream) -> Frame | None:
            return await stream.read(idle_s=None, frame_s=self.limits.read_timeout_s)

        async with self._served(peer, pipe) as stream:
            await self._serve_payloads(stream, await next_payload(stream), next_payload)

    async def _serve_payloads(
        self, stream: FrameStream, frame: Frame | None, following: Callable[[FrameStream], Awaitable[Frame | None]]
    ) -> None:
        """One comes while the inbox takes the one before it; they are answered in their order."""
        before: asyncio.Task[None] | None = None
        try:
            while frame is not None:
                if not isinstance(frame, Bulk):
                    raise FrameError(f"a {type(frame).__name__} frame has no place before a payload")
                payload = await self._payload(stream, frame, before)
                if payload is not None:
                    before = self._start(self._take(stream, frame.header, payload))
                    del payload  # the inbox's now, however long it takes until the next one comes
                elif not await self._read_off(stream, frame.payload_bytes):
                    return
                with contextlib.suppress(PipeBroken):  # that it has ended is read
                    await stream.pipe.drain(self.limits.write_timeout_s)
                frame = await following(stream)
        finally:
            if before is not None:
                await before

    async def _next_payload(self, stream: FrameStream) -> Frame | None:
        """What follows a payload on a stream over libp2p; None also if more such are open than there may be."""
        if self._awaiting_payloads >= self.limits.links_max:
            await self._linger(stream)
            return None
        self._awaiting_payloads += 1
        try:
            return await stream.read(idle_s=2 * KEPT_S, frame_s=self.limits.read_timeout_s)
        finally:
            self._awaiting_payloads -= 1

    @contextlib.asynccontextmanager
    async def _served(self, peer: str, pipe: Pipe) -> AsyncIterator[FrameStream]:
        """Frames of a peer for as long as it behaves; at the end the stream is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._pipes.add(pipe)
        stream = FrameStream(pipe, peer, self.limits, self.traffic)
        try:
            yield stream
        except (FrameError, PipeStalled) as error:
            await self._refuse_and_linger(stream, str(error))
        except PipeBroken:
            self._lost(peer)
        finally:
            self._tasks.discard(task)
            pipe.close()

    async def _serve_link(self, stream: FrameStream, header: bytes) -> None:
        """Take the messages of a link one after the other. A newer link of the peer ends this one without a
        word.
        """
        peer, pipe = stream.peer, stream.pipe
        if peer not in self._incoming_links and len(self._incoming_links) >= self.limits.links_max:
            reason = f"this peer allows {self.limits.links_max} links, and all are taken"
            await self._refuse_and_linger(stream, reason)
            return
        if (older := self._incoming_links.get(peer)) is not None:
            older.abort()
        self._incoming_links[peer] = pipe
        frame: Frame | None = Message(header)
        try:
            while frame is not None:
                if not isinstance(frame, Message):
                    raise FrameError(f"a {type(frame).__name__} frame has no place on a link")
                await self._take(stream, frame.header, None)
                await pipe.drain(self.limits.write_timeout_s)
                await asyncio.sleep(0)  # many small frames may be here already: let others run between them
                frame = await stream.read(idle_s=None, frame_s=self.limits.read_timeout_s)
        except PipeBroken:
            pass
        finally:
            if self._incoming_links.get(peer) is pipe:
                del self._incoming_links[peer]
                self._lost(peer)

    async def _payload(
        self, stream: FrameStream, bulk: Bulk, before: asyncio.Task[None] | None = None
    ) -> memoryview | None:
        """Receive one payload, or refuse it before it is read; that is None. Memory is set aside for it only once
        header, size and turn are granted. Of its coming, and of its end, nothing is said until what came `before` was
        answered.
        """
        reason = self._objection(stream.peer, bulk.header, bulk.payload_bytes)
        if reason is None and not await self._granted():
            reason = f"busy: {self.limits.streams_max} payloads are under way"
        elif reason is None:
            try:
                payload = await self._received(stream, bulk.payload_bytes, before)
            finally:
                self._receiving.release()
        if before is not None:
            await before
        if reason is not None:
            self._refuse(stream, reason)
            return None
        return payload

    async def _received(self, stream: FrameStream, payload_bytes: int, before: asyncio.Task[None] | None) -> memoryview:
        payload = np.empty(payload_bytes + SLACK_BYTES, dtype=np.uint8)[:payload_bytes].data
        early = stream.decoder.take(payload_bytes)
        payload[: len(early)] = early
        with self.traffic.receiving():
            await self._receive(stream, payload, len(early), before)
        return payload

    async def _granted(self) -> bool:
        """Wait for a turn to receive a payload; False if none comes soon."""
        if not self._receiving.locked():
            return await self._receiving.acquire()
        try:
            return await asyncio.wait_for(self._receiving.acquire(), self.limits.read_timeout_s / 2)
        except asyncio.TimeoutError:
            return False

    async def _receive(
        self, stream: FrameStream, payload: memoryview, early_bytes: int, before: asyncio.Task[None] | None
    ) -> None:
        """Fill the rest of the payload, and tell the sender how far it has come."""
        loop, pipe = asyncio.get_running_loop(), stream.pipe
        timer: asyncio.TimerHandle
        told_bytes = 0
        metered = _metered(self.traffic.bandwidth.down, stream.peer, len(payload))

        def tell() -> None:
            nonlocal told_bytes, timer
            if (count := early_bytes + pipe.filled_bytes) > told_bytes:
                if before is None or before.done():  # else it would be taken for that one's
                    stream.write(Progress(count))
                told_bytes = count
                metered.reached(count, loop.time())
                self._inbox.moving(stream.peer)
            timer = loop.call_later(PROGRESS_EVERY_S, tell)

        timer = loop.call_later(PROGRESS_EVERY_S, tell)
        try:
            total_s = self.limits.transfer_timeout_s(len(payload))
            await pipe.read_into(payload[early_bytes:], stall_s=self.limits.read_timeout_s, total_s=total_s)
        finally:
            timer.cancel()
            self.traffic.received(stream.peer, pipe.filled_bytes)
            metered.reached(early_bytes + pipe.filled_bytes, loop.time())
            if before is None or before.done():
                metered.end(loop.time())
            else:  # until then nothing is read, and what comes waits in the system: that is time, too
                before.add_done_callback(lambda _: metered.end(loop.time()))

    async def _take(self, stream: FrameStream, header: bytes, payload: memoryview | None) -> None:
        """Let the inbox judge and take a message, and answer it."""
        try:
            if payload is None:
                self._inbox.admit(stream.peer, header)
            await self._inbox.deliver(stream.peer, header, payload)
        except Refusal as refusal:
            self._refuse(stream, refusal.reason)
        except Exception:
            log.exception("a message of %s could not be taken", stream.peer)
            self._refuse(stream, "the receiver failed on this message")
        else:
            stream.write(Accepted())

    def _objection(self, peer: str, header: bytes, payload_bytes: int) -> str | None:
        """Why a payload may not come, judged before any memory is set aside for it."""
        try:
            check_announced(self.limits, payload_bytes, self._inbox.admit(peer, header))
        except Refusal as refusal:
            return refusal.reason
        except Exception:
            log.exception("a header of %s could not be judged", peer)
            return "the receiver failed on this header"
        return None

    def _refuse(self, stream: FrameStream, reason: str) -> None:
        log.log(self._level_of_refusal(stream.peer), "refused a message of %s: %s", stream.peer, reason)
        self.traffic.refuse(stream.peer)
        stream.write(Refused(reason))

    def _level_of_refusal(self, peer: str) -> int:
        """INFO, but for each peer no more often than `REFUSALS_EVERY_S`: whoever is refused may go on asking."""
        now = asyncio.get_running_loop().time()
        if now - self._refused_at.get(peer, -math.inf) < REFUSALS_EVERY_S:
            return logging.DEBUG
        if len(self._refused_at) >= PEERS_COUNTED_MAX:
            self._refused_at.clear()
        self._refused_at[peer] = now
        return logging.INFO

    async def _refuse_and_linger(self, stream: FrameStream, reason: str) -> None:
        """Refuse what ends the stream."""
        self._refuse(stream, reason)
        await self._linger(stream)

    async def _read_off(self, stream: FrameStream, count: int) -> bool:
        """Read a refused payload off unseen, so that the next may follow; False if it ends or takes long."""
        clock = asyncio.get_running_loop().time
        until = clock() + LINGER_S
        count -= len(stream.decoder.take(count))
        with contextlib.suppress(PipeStalled):
            while count:
                if not (data := await stream.pipe.read_some(max(0.0, until - clock()))):
                    return False
                self.traffic.received(stream.peer, len(data))
                stream.decoder.feed(data)
                count -= len(stream.decoder.take(count))
            return True
        return False

    async def _linger(self, stream: FrameStream) -> None:
        """Read a stream off unseen until the sender, which has its answer, hangs up."""

        async def read_off() -> None:
            while await stream.pipe.read_some(LINGER_S):
                pass

        with contextlib.suppress(asyncio.TimeoutError, PipeStalled):
            await asyncio.wait_for(read_off(), LINGER_S)

    # -- ending

    async def close(self) -> None:
        """End every stream; what waits for an answer becomes `Unreachable`."""
        self._closing = True
        self._links.end()
        self._payload_streams.end()
        for pipe in list(self._pipes):
            pipe.abort()
        tasks = self._tasks - {asyncio.current_task()}
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in unfinished:
                task.cancel()

    def _lost(self, peer: str) -> None:
        if not self._closing:
            self._inbox.closed(peer)

    def _start(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Turn:
    """One payload's turn to be written, which may be over before its answer has come."""

    def __init__(self, turns: asyncio.Lock) -> None:
        self._turns, self._held = turns, False

    async def __aenter__(self) -> _Turn:
        self._held = await self._turns.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.over()

    def over(self) -> None:
        """Let the next one write."""
        if self._held:
            self._held = False
            self._turns.release()


def _metered(meter: Meter, peer: str, payload_bytes: int) -> Payload:
    """A payload that begins now, told to the meter if it is long enough to say something."""
    return (meter if payload_bytes >= LARGE_BYTES else Meter()).begin(peer, asyncio.get_running_loop().time())
