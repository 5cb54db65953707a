"""The frames on a stream: their encoding, a decoder that accepts bytes in pieces of any size, and a stream of them.

Law: decoding any bytes gives frames or a `FrameError`. A `FrameStream` knows one pipe to one peer, and counts its
bytes; the callers decide what a frame means.

    link     = MESSAGE* one way; ACCEPTED or REFUSED for each of them, in order, back
    payload  = BULK and then its raw bytes one way; PROGRESS*, then ACCEPTED or REFUSED back
    payloads = payload*, each begun as soon as the one before is written; the answers come back in the same order
    frame    = "p2d" version length body             3 + 1 + 4 bytes (big-endian), then `length` bytes
    body     = in msgpack [1, header]                        MESSAGE
                        | [2, header, payload's length]      BULK
                        | [3]                                ACCEPTED
                        | [4, reason]                        REFUSED
                        | [5, bytes that have arrived]       PROGRESS of a payload
"""

from __future__ import annotations

import asyncio
import struct
import sys
from typing import Annotated

import msgspec

from p2p_diloco.net.interface import Limits, Refusal, Traffic
from p2p_diloco.net.pipe import Pipe, PipeStalled

MAGIC = b"p2d"
VERSION = 4
"""Version 4: the bodies of frames are msgpack."""
REASON_BYTES_MAX = 1024
FIELDS_BYTES = 20
"""The most bytes of a body beside its header or reason."""
PREFIX = struct.Struct(">3sBI")

Count = Annotated[int, msgspec.Meta(ge=0)]


class FrameError(Exception):
    """Raised for bytes that are no valid frame of this protocol. A receiver sends the error's text to the sender, as
    the reason of a refusal."""


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A frame's body."""


class Message(_Body, frozen=True, tag=1):
    """A message without a payload."""

    header: bytes


class Bulk(_Body, frozen=True, tag=2):
    """The header of a message with a payload, and the payload's length. The payload follows this frame as raw bytes."""

    header: bytes
    payload_bytes: Count


class Accepted(_Body, frozen=True, tag=3):
    """The answer that the receiver's inbox has accepted the message."""


class Refused(_Body, frozen=True, tag=4):
    """The answer that the receiver has refused the message, with the reason."""

    reason: str


class Progress(_Body, frozen=True, tag=5):
    """A receiver's report during a transfer: `received_bytes` bytes of the payload have arrived."""

    received_bytes: Count


Frame = Message | Bulk | Accepted | Refused | Progress
_BODIES = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """Encode one frame. The reason in a `Refused` frame is cut to `REASON_BYTES_MAX`."""
    if isinstance(frame, Refused):
        frame = Refused(frame.reason.encode("utf-8", "replace")[:REASON_BYTES_MAX].decode("utf-8", "ignore"))
    body = msgspec.msgpack.encode(frame)
    return PREFIX.pack(MAGIC, VERSION, len(body)) + body


class FrameDecoder:
    """Takes complete frames out of the start of a buffer, and decodes them. After an error the decoder can no longer be
    used."""

    def __init__(self, buffer: bytearray, *, header_bytes_max: int) -> None:
        self._bytes_max = max(header_bytes_max, REASON_BYTES_MAX) + FIELDS_BYTES
        self._buffer = buffer

    def next_frame(self) -> Frame | None:
        """Take the next frame out of the buffer and decode it; None while the buffer holds only a part of the frame.
        The frame's prefix is checked even before the body has come.

        Raises:
            FrameError: garbage, another version, an unknown kind, or a length over its limit.
        """
        self._check_magic()
        if len(self._buffer) < PREFIX.size:
            return None
        _, _, length = PREFIX.unpack_from(self._buffer)
        if length > self._bytes_max:
            raise FrameError(f"the frame has {length} bytes, allowed are {self._bytes_max}")
        if len(self._buffer) < PREFIX.size + length:
            return None
        body = bytes(self._buffer[PREFIX.size : PREFIX.size + length])
        del self._buffer[: PREFIX.size + length]
        try:
            frame: Frame = _BODIES.decode(body)
            return frame
        except (msgspec.MsgspecError, ValueError) as error:
            raise FrameError(f"the frame can't be read: {error}") from None

    def _check_magic(self) -> None:
        seen = bytes(self._buffer[: len(MAGIC)])
        if seen != MAGIC[: len(seen)]:
            raise FrameError("these bytes are no frame of p2p_diloco")
        if len(self._buffer) > len(MAGIC) and self._buffer[len(MAGIC)] != VERSION:
            version = self._buffer[len(MAGIC)]
            raise FrameError(f"the frame has protocol version {version}, this peer speaks {VERSION}")


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
