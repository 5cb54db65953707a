"""Writes and reads frames, and the payloads between them, on one pipe to one peer.

Law: knows one stream, and counts its bytes. The callers decide what a frame means.
"""

from __future__ import annotations

import asyncio
import sys

from p2p_diloco.net.framing import Frame, FrameDecoder, FrameError, Message, Refused, encode
from p2p_diloco.net.interface import Limits, Refusal, Traffic
from p2p_diloco.net.pipe import Pipe, PipeStalled


class FrameStream:
    """Exchanges frames and payloads with one peer over a pipe, and counts their bytes."""

    def __init__(self, pipe: Pipe, peer: str, limits: Limits, traffic: Traffic) -> None:
        self.pipe = pipe
        self.peer = peer
        self._decoder = FrameDecoder(pipe.unread, header_bytes_max=limits.header_bytes_max)
        self._traffic = traffic

    def write(self, frame: Frame) -> None:
        """Queue a frame for sending. Frames leave in the order of the calls."""
        data = encode(frame)
        self._traffic.sent(self.peer, len(data))
        self.pipe.write(data)

    async def read(self, *, idle_s: float | None, frame_s: float) -> Frame | None:
        """Wait for the next frame; None at the end of the stream. The frame's first byte must come within `idle_s`, and
        the rest of the frame within `frame_s` after that byte.

        Raises:
            FrameError: the bytes are no frame, or the stream ended within one.
            PipeStalled: the frame didn't come in time.
        """
        now = asyncio.get_running_loop().time
        give_up_at: float | None = None
        while (frame := self._next()) is None:
            if self.pipe.unread and give_up_at is None:
                give_up_at = now() + frame_s
            if not await self.pipe.more(idle_s if give_up_at is None else max(0.0, give_up_at - now())):
                if self.pipe.unread:
                    raise FrameError("the stream ended within a frame")
                return None
        return frame

    async def answer(self, within_s: float) -> bytes:
        """Wait for the other end's answer to this end's message; returns the answer's header.

        Raises:
            Refusal: the other end refused.
            FrameError: as `read`; also, another frame came, or the stream ended.
            PipeStalled: as `read`.
        """
        match await self.read(idle_s=within_s, frame_s=within_s):
            case Message(header):
                return header
            case Refused(reason):
                raise Refusal(reason)
            case None:
                raise FrameError("the stream ended before the answer")
            case frame:
                raise FrameError(f"{frame} is no answer")

    def _next(self) -> Frame | None:
        before = len(self.pipe.unread)
        frame = self._decoder.next_frame()
        self._traffic.received(self.peer, before - len(self.pipe.unread))
        return frame

    async def read_payload(self, payload: memoryview, *, stall_s: float, total_s: float) -> None:
        """Fill `payload` with the raw bytes that follow a frame. Raises the same errors as `Pipe.read_into`."""
        try:
            await self.pipe.read_into(payload, stall_s=stall_s, total_s=total_s)
        finally:
            self._traffic.received(self.peer, self.pipe.filled_bytes)

    async def discard(self, count: int | None, within_s: float) -> bool:
        """Read and drop `count` bytes, or all bytes until the stream's end if `count` is None. Returns False if not all
        of them came within `within_s`."""
        now = asyncio.get_running_loop().time
        give_up_at = now() + within_s
        left = sys.maxsize if count is None else count
        while True:
            dropped = min(left, len(self.pipe.unread))
            del self.pipe.unread[:dropped]
            self._traffic.received(self.peer, dropped)
            left -= dropped
            if not left:
                return True
            try:
                if not await self.pipe.more(max(0.0, give_up_at - now())):
                    return count is None
            except PipeStalled:
                return False
