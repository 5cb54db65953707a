"""The receiver's side of streams: it checks each message that arrives, passes it to the inbox, and answers it.

Law: knows frames and pipes, not libp2p. A remote peer's mistake is answered with a reason and counted, and ends at most
the stream on which it was made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Hashable

import numpy as np

from p2p_diloco.net.framing import Accepted, Bulk, Frame, FrameError, FrameStream, Message, Progress, Refused
from p2p_diloco.net.interface import PEERS_COUNTED_MAX, Refusal, check_announced
from p2p_diloco.net.pipe import Pipe, PipeBroken, PipeStalled
from p2p_diloco.net.shares import Slots
from p2p_diloco.net.streams import Streams, start

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.25
"""Seconds between two progress reports on a payload, by which its sender distinguishes a slow peer from a frozen one.
"""
LINGER_S = 2.0
"""Seconds that a sender has to close its stream after a refusal. If the receiver closed at once, the refusal could be
lost on its way."""
NEXT_PAYLOAD_S = 120.0
"""How long a stream over libp2p may wait for its next payload: twice as long as a sender uses one stream."""
REFUSALS_EVERY_S = 60.0
"""Seconds between two lines in the log about refused messages of one peer."""
TURN_S, TURN_WAIT_S = 0.02, 0.5
"""The pace at which the peers of one grant (in an open run: one peer) are read once a message of theirs is refused, or
more come than honest peers send, and how long a stream waits for its turn at most. So one that sends without pause
costs this peer little.
"""
SLACK_BYTES = 256
"""How many bytes longer a payload's memory is than the payload. Once this memory is freed, it has room for an aligned
tensor of the payload's length."""


class Receiver:
    """Serves the streams that other peers open."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._links: dict[str, Pipe] = {}
        self._awaiting_payloads = 0
        self._slots = Slots(streams.limits.streams_max)
        self._receiving = self._slots.free
        self._refused_at: dict[str, float] = {}
        self._turns: dict[Hashable, float] = {}

    async def serve(self, peer: str, pipe: Pipe, *, direct: bool = False) -> None:
        """Receive messages or payloads from a peer on a stream, until the stream ends. `direct`: the stream is a direct
        connection, on which the first payload may come late."""
        read_s = self._streams.limits.read_timeout_s
        async with self._served(peer, pipe) as frames:
            match await frames.read(idle_s=None if direct else read_s, frame_s=read_s):
                case Message(header) if not direct:
                    await self._serve_link(frames, header)
                case frame:
                    await self._serve_payloads(frames, frame, direct)

    @contextlib.asynccontextmanager
    async def _served(self, peer: str, pipe: Pipe) -> AsyncIterator[FrameStream]:
        """Make a frame stream on a pipe from a peer, for the length of a `with` block. A protocol error in the block is
        answered with a refusal. At the end of the block the pipe is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._streams.tasks.add(task)
        frames = self._streams.frames(peer, pipe)
        try:
            yield frames
        except (FrameError, PipeStalled) as error:
            await self._refuse_and_linger(frames, str(error))
        except PipeBroken:
            self._streams.lost(peer)
        finally:
            self._streams.tasks.discard(task)
            pipe.close()

    # -- links

    async def _serve_link(self, frames: FrameStream, header: bytes) -> None:
        """Receive the messages of a link one after the other, until the link ends. When the same peer opens a newer
        link, the older link is closed."""
        peer, pipe, limits = frames.peer, frames.pipe, self._streams.limits
        if peer not in self._links and len(self._links) >= limits.links_max:
            reason = f"this peer allows {limits.links_max} links, and all are in use"
            await self._refuse_and_linger(frames, reason)
            return
        if (older := self._links.get(peer)) is not None:
            older.abort()
        self._links[peer] = pipe
        frame: Frame | None = Message(header)
        try:
            while frame is not None:
                if not isinstance(frame, Message):
                    raise FrameError(f"a {type(frame).__name__} frame has no place on a link")
                await self._take(frames, frame.header, None)
                await pipe.drain(self._streams.limits.write_timeout_s)
                await asyncio.sleep(0)  # many small frames may be waiting: let other tasks run between two of them
                frame = await frames.read(idle_s=None, frame_s=self._streams.limits.read_timeout_s)
        except PipeBroken:
            pass
        finally:
            if self._links.get(peer) is pipe:
                del self._links[peer]
                self._streams.lost(peer)

    # -- payloads

    async def _serve_payloads(self, frames: FrameStream, frame: Frame | None, direct: bool) -> None:
        """Receive payloads one after the other. While the inbox still processes one payload, the next one is received
        already. The answers are sent in the order of the payloads."""
        before: asyncio.Task[None] | None = None
        try:
            while frame is not None:
                if not isinstance(frame, Bulk):
                    raise FrameError(f"a {type(frame).__name__} frame has no place before a payload")
                payload = await self._payload(frames, frame, before)
                if payload is not None:
                    before = start(self._take(frames, frame.header, payload), self._streams.tasks)
                    del payload  # only the inbox keeps it now, even if the next payload takes long to come
                elif not await frames.discard(frame.payload_bytes, LINGER_S):
                    return
                with contextlib.suppress(PipeBroken):  # reading reports the break
                    await frames.pipe.drain(self._streams.limits.write_timeout_s)
                frame = await self._next(frames, direct)
        finally:
            if before is not None:
                await before

    async def _next(self, frames: FrameStream, direct: bool) -> Frame | None:
        """Wait for the frame after a payload. None at the stream's end, or if too many other streams over libp2p
        already wait for their next payload."""
        frame_s = self._streams.limits.read_timeout_s
        if direct:
            return await frames.read(idle_s=None, frame_s=frame_s)
        if self._awaiting_payloads >= self._streams.limits.links_max:
            await frames.discard(None, LINGER_S)
            return None
        self._awaiting_payloads += 1
        try:
            return await frames.read(idle_s=NEXT_PAYLOAD_S, frame_s=frame_s)
        finally:
            self._awaiting_payloads -= 1

    async def _payload(self, frames: FrameStream, bulk: Bulk, before: asyncio.Task[None] | None) -> memoryview | None:
        """Receive one payload; or refuse it without reading it, and return None. Memory is allocated only once the
        header and the length are accepted, and fewer than `streams_max` payloads are being received. The answer to this
        payload must follow that to the previous one, which the task `before` sends."""
        reason = self._objection(frames.peer, bulk.header, bulk.payload_bytes)
        slot = None if reason is not None else await self._granted(frames.peer, bulk.payload_bytes)
        if reason is None and slot is None:
            reason = f"busy: {self._streams.limits.streams_max} payloads are under way"
        if slot is not None:
            with slot:
                payload = np.empty(bulk.payload_bytes + SLACK_BYTES, dtype=np.uint8)[: bulk.payload_bytes].data
                with self._streams.traffic.receiving():
                    await self._receive(frames, payload, before)
        if before is not None:
            await before
        if reason is not None:
            self._refuse(frames, reason)
            return None
        return payload

    async def _granted(self, peer: str, payload_bytes: int) -> contextlib.ExitStack | None:
        """Wait until another payload of this peer may be received; None if that takes too long."""
        within_s = self._streams.limits.read_timeout_s / 2
        return await self._slots.take(peer, self._streams.groups(peer), payload_bytes, within_s)

    async def _receive(self, frames: FrameStream, payload: memoryview, before: asyncio.Task[None] | None) -> None:
        """Fill the memory `payload` from the stream, and report progress to the sender every `PROGRESS_EVERY_S`."""
        loop, limits, told_bytes = asyncio.get_running_loop(), self._streams.limits, 0
        timer: asyncio.TimerHandle
        measured = self._streams.traffic.bandwidth.down.begin(frames.peer, loop.time(), len(payload))

        def tell() -> None:
            nonlocal told_bytes, timer
            if (count := frames.pipe.filled_bytes) > told_bytes:
                if before is None or before.done():  # else the sender takes this for the earlier payload's progress
                    frames.write(Progress(count))
                told_bytes = count
                measured.reached(count, loop.time())
                self._streams.inbox.moving(frames.peer)
            timer = loop.call_later(PROGRESS_EVERY_S, tell)

        timer = loop.call_later(PROGRESS_EVERY_S, tell)
        try:
            total_s = limits.transfer_timeout_s(len(payload))
            await frames.read_payload(payload, stall_s=limits.read_timeout_s, total_s=total_s)
        finally:
            timer.cancel()
            measured.reached(frames.pipe.filled_bytes, loop.time())
            if before is None or before.done():
                measured.end(loop.time())
            else:  # until then no further payload is read, but bytes arrive in the kernel: count that time
                before.add_done_callback(lambda _: measured.end(loop.time()))

    # -- checking and answering

    async def _take(self, frames: FrameStream, header: bytes, payload: memoryview | None) -> None:
        """Pass a message to the inbox. Then answer the sender that the message is accepted, or refused with the inbox's
        reason. The next message waits for its turn if this one was refused, or one too many."""
        waits: bool | None = True
        try:
            waits = await self._streams.inbox.deliver(frames.peer, header, payload)
        except Refusal as refusal:
            self._refuse(frames, refusal.reason)
        except Exception:
            log.exception("an error while receiving a message of %s", frames.peer)
            self._refuse(frames, "the receiver failed on this message")
        else:
            frames.write(Accepted())
        if waits:
            await asyncio.sleep(self._turn(frames.peer))

    def _objection(self, peer: str, header: bytes, payload_bytes: int) -> str | None:
        """Check an announced payload; returns the reason for refusing it, or None if it may come."""
        try:
            check_announced(self._streams.limits, payload_bytes, self._streams.inbox.admit(peer, header))
        except Refusal as refusal:
            return refusal.reason
        except Exception:
            log.exception("an error while checking a header of %s", peer)
            return "the receiver failed on this header"
        return None

    def _refuse(self, frames: FrameStream, reason: str, level: int = logging.INFO) -> None:
        log.log(self._level_of_refusal(frames.peer, level), "refused a message of %s: %s", frames.peer, reason)
        self._streams.traffic.refuse(frames.peer)
        frames.write(Refused(reason))

    def _turn(self, peer: str) -> float:
        """Return how long a stream waits before the next message of a peer is read."""
        group, now = self._streams.groups(peer), asyncio.get_running_loop().time()
        group = peer if group is None else group
        turn = min(max(now, self._turns.get(group, now)) + TURN_S, now + TURN_WAIT_S)
        if len(self._turns) >= PEERS_COUNTED_MAX:
            self._turns.clear()
        self._turns[group] = turn
        return turn - now

    def _level_of_refusal(self, peer: str, level: int) -> int:
        """Choose the log level for a refused message: the given one at most once in `REFUSALS_EVERY_S` for each peer,
        else DEBUG, because a refused peer may go on sending."""
        now = asyncio.get_running_loop().time()
        if now - self._refused_at.get(peer, -math.inf) < REFUSALS_EVERY_S:
            return logging.DEBUG
        if len(self._refused_at) >= PEERS_COUNTED_MAX:
            self._refused_at.clear()
        self._refused_at[peer] = now
        return level

    async def _refuse_and_linger(self, frames: FrameStream, reason: str) -> None:
        """Refuse a message, and keep the stream open for a while, so that the sender can read the refusal before the
        stream is closed."""
        self._refuse(frames, reason, logging.WARNING)  # the inbox, which logs other refusals, does not see this one
        await frames.discard(None, LINGER_S)
