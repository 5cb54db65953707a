"""Frames of one peer over one pipe, and the link: the outgoing, ordered stream that carries small messages.

Law: knows a single stream. Which streams exist, and what an incoming message may do, is for `exchange`.
"""

from __future__ import annotations

import asyncio
from collections import deque

from p2p_diloco.net.framing import Accepted, Frame, FrameDecoder, FrameError, Message, Refused, encode
from p2p_diloco.net.interface import Limits, Refusal, Traffic, Unreachable
from p2p_diloco.net.pipe import Pipe, PipeBroken, PipeStalled


class FrameStream:
    """Frames of one peer over a pipe, counted."""

    def __init__(self, pipe: Pipe, peer: str, limits: Limits, traffic: Traffic) -> None:
        self.pipe = pipe
        self.peer = peer
        self.decoder = FrameDecoder(header_bytes_max=limits.header_bytes_max)
        self._traffic = traffic

    def write(self, frame: Frame) -> None:
        """Queue a frame, in the order of the calls."""
        data = encode(frame)
        self._traffic.sent(self.peer, len(data))
        self.pipe.write(data)

    async def read(self, *, idle_s: float | None, frame_s: float) -> Frame | None:
        """The next frame, or None at the end. It may take `idle_s` to begin, and `frame_s` more to be whole.

        Raises:
            FrameError: what came is no frame, or it was cut short.
            PipeStalled: it didn't come in time.
        """
        now = asyncio.get_running_loop().time
        give_up_at: float | None = None
        while (frame := self.decoder.next_frame()) is None:
            if self.decoder.midway and give_up_at is None:
                give_up_at = now() + frame_s
            data = await self.pipe.read_some(idle_s if give_up_at is None else max(0.0, give_up_at - now()))
            if not data:
                if self.decoder.midway:
                    raise FrameError("the stream ended within a frame")
                return None
            self._traffic.received(self.peer, len(data))
            self.decoder.feed(data)
        return frame


class Link:
    """The outgoing, ordered stream to one peer, and the messages on it that wait for their answer."""

    def __init__(self, stream: FrameStream, limits: Limits) -> None:
        self._stream = stream
        self._limits = limits
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def send(self, header: bytes) -> None:
        """Send a message and wait for its answer; one that stays out breaks the link.

        Raises:
            Refusal: the remote's reason.
            Unreachable: the link broke, or no answer came in time.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_seen)
        self._waiting.append(answer)
        self._stream.write(Message(header))
        try:
            await self._stream.pipe.drain(self._limits.write_timeout_s)
            await asyncio.wait_for(answer, self._limits.read_timeout_s)
        except (PipeBroken, PipeStalled) as error:
            self.fail(str(error))
            raise Unreachable(f"{self._stream.peer}: {error}") from None
        except asyncio.TimeoutError:
            why = f"no answer within {self._limits.read_timeout_s:g} s"
            self.fail(why)
            raise Unreachable(f"{self._stream.peer}: {why}") from None

    async def read_answers(self) -> str:
        """Hand the answers to those that wait for them, in order, until the link ends; returns why it did."""
        frame_s = self._limits.read_timeout_s
        try:
            while (frame := await self._stream.read(idle_s=None, frame_s=frame_s)) is not None:
                if not isinstance(frame, (Accepted, Refused)) or not self._waiting:
                    raise FrameError(f"a {type(frame).__name__} frame was not asked for")
                answer = self._waiting.popleft()
                if answer.done():  # whoever asked has gone
                    continue
                if isinstance(frame, Refused):
                    answer.set_exception(Refusal(frame.reason))
                else:
                    answer.set_result(None)
        except (FrameError, PipeStalled) as error:
            return str(error)
        return self._stream.pipe.ended or "the link was closed"

    def fail(self, why: str) -> None:
        """End the link; everything that waits on it becomes `Unreachable`."""
        self._stream.pipe.abort()
        while self._waiting:
            if not (answer := self._waiting.popleft()).done():
                answer.set_exception(Unreachable(f"{self._stream.peer}: {why}"))


def _seen(answer: asyncio.Future[None]) -> None:
    """Look at an answer that nobody may be waiting for any more, or asyncio complains."""
    if not answer.cancelled():
        answer.exception()
