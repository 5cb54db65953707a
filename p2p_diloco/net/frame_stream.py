"""Frames of one peer, and the payloads between them, over one pipe.

Law: knows a single stream, and counts its bytes. What a frame means is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import sys

from p2p_diloco.net.framing import Frame, FrameDecoder, FrameError, encode
from p2p_diloco.net.interface import Limits, Traffic
from p2p_diloco.net.pipe import Pipe, PipeStalled


class FrameStream:
    """Frames and payloads of one peer over a pipe, counted."""

    def __init__(self, pipe: Pipe, peer: str, limits: Limits, traffic: Traffic) -> None:
        self.pipe = pipe
        self.peer = peer
        self.decoder = FrameDecoder(header_bytes_max=limits.header_bytes_max)
        self._traffic = traffic
        self._early_bytes = 0

    def write(self, frame: Frame) -> None:
        """Queue a frame, in the order of the calls."""
        data = encode(frame)
        self._traffic.sent(self.peer, len(data))
        self.pipe.write(data)

    async def read(self, *, idle_s: float | None, frame_s: float) -> Frame | None:
        """The next frame, or None at the end. It may take `idle_s` to begin, and `frame_s` more to be complete.

        Raises:
            FrameError: the bytes are no frame, or the stream ended within one.
            PipeStalled: the frame didn't come in time.
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
            self._received(data)
        return frame

    async def read_payload(self, payload: memoryview, *, stall_s: float, total_s: float) -> None:
        """Fill the memory with the raw bytes that follow a frame. Raises as `Pipe.read_into`."""
        early = self.decoder.take(len(payload))
        self._early_bytes = len(early)
        payload[: len(early)] = early
        try:
            await self.pipe.read_into(payload[len(early) :], stall_s=stall_s, total_s=total_s)
        finally:
            self._traffic.received(self.peer, self.pipe.filled_bytes)

    @property
    def payload_bytes(self) -> int:
        """How much of the memory given to `read_payload` is filled."""
        return self._early_bytes + self.pipe.filled_bytes

    async def discard(self, count: int | None, within_s: float) -> bool:
        """Read so many bytes and drop them, None: until the stream ends. False if they didn't come in time."""
        now = asyncio.get_running_loop().time
        give_up_at = now() + within_s
        left = sys.maxsize if count is None else count
        left -= len(self.decoder.take(left))
        while left:
            try:
                data = await self.pipe.read_some(max(0.0, give_up_at - now()))
            except PipeStalled:
                return False
            if not data:
                return count is None
            self._received(data)
            left -= len(self.decoder.take(left))
        return True

    def _received(self, data: bytes) -> None:
        self._traffic.received(self.peer, len(data))
        self.decoder.feed(data)
