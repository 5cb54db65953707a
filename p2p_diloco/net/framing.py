"""The frames on a stream: their encoding, and a decoder that accepts bytes in pieces of any size.

Law: does no I/O, and reads no clock. Decoding any bytes gives frames or a `FrameError`.

    link     = MESSAGE* one way; ACCEPTED or REFUSED for each of them, in order, back
    payload  = BULK and then its raw bytes one way; PROGRESS*, then ACCEPTED or REFUSED back
    payloads = payload*, each begun as soon as the one before is written; the answers come back in the same order
    frame    = "p2d" version kind length body        3 + 1 + 1 + 4 bytes (big-endian), then `length` bytes
    body     = MESSAGE  the header
             | BULK     the payload's length (8 bytes), then the header
             | ACCEPTED nothing
             | REFUSED  the reason in UTF-8, at most REASON_BYTES_MAX
             | PROGRESS how many bytes of the payload have arrived (8 bytes)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"p2d"
VERSION = 2
"""Version 2: a stream over libp2p carries several payloads, one after the other."""
REASON_BYTES_MAX = 1024
PREFIX = struct.Struct(">3sBBI")
_COUNT = struct.Struct(">Q")


class FrameError(Exception):
    """Raised for bytes that are no valid frame of this protocol. A receiver sends the error's text to the sender, as
    the reason of a refusal."""


class Kind(IntEnum):
    """The kind of a frame, as its number on the wire."""

    MESSAGE = 1
    BULK = 2
    ACCEPTED = 3
    REFUSED = 4
    PROGRESS = 5


@dataclass(frozen=True, slots=True)
class Message:
    """A message without a payload."""

    header: bytes


@dataclass(frozen=True, slots=True)
class Bulk:
    """The header of a message with a payload, and the payload's length. The payload follows this frame as raw bytes."""

    header: bytes
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer that the receiver's inbox has accepted the message."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The answer that the receiver has refused the message, with the reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """A receiver's report during a transfer: `received_bytes` bytes of the payload have arrived."""

    received_bytes: int


Frame = Message | Bulk | Accepted | Refused | Progress


def encode(frame: Frame) -> bytes:
    """Encode one frame. The reason in a `Refused` frame is cut to `REASON_BYTES_MAX`."""
    match frame:
        case Message(header):
            kind, body = Kind.MESSAGE, header
        case Bulk(header, payload_bytes):
            kind, body = Kind.BULK, _COUNT.pack(payload_bytes) + header
        case Accepted():
            kind, body = Kind.ACCEPTED, b""
        case Refused(reason):
            kind, body = Kind.REFUSED, reason.encode("utf-8", "replace")[:REASON_BYTES_MAX]
        case Progress(received_bytes):
            kind, body = Kind.PROGRESS, _COUNT.pack(received_bytes)
    return PREFIX.pack(MAGIC, VERSION, kind, len(body)) + body


class FrameDecoder:
    """Takes complete frames out of the start of a buffer, and decodes them. After an error the decoder can no longer be
    used."""

    def __init__(self, buffer: bytearray, *, header_bytes_max: int) -> None:
        self._lengths: dict[int, tuple[int, int]] = {  # of a frame's body
            Kind.MESSAGE: (0, header_bytes_max),
            Kind.BULK: (_COUNT.size, _COUNT.size + header_bytes_max),
            Kind.ACCEPTED: (0, 0),
            Kind.REFUSED: (0, REASON_BYTES_MAX),
            Kind.PROGRESS: (_COUNT.size, _COUNT.size),
        }
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
        _, _, kind, length = PREFIX.unpack_from(self._buffer)
        self._check_length(kind, length)
        if len(self._buffer) < PREFIX.size + length:
            return None
        body = bytes(self._buffer[PREFIX.size : PREFIX.size + length])
        del self._buffer[: PREFIX.size + length]
        return _decoded(Kind(kind), body)

    def _check_magic(self) -> None:
        seen = bytes(self._buffer[: len(MAGIC)])
        if seen != MAGIC[: len(seen)]:
            raise FrameError("these bytes are no frame of p2p_diloco")
        if len(self._buffer) > len(MAGIC) and self._buffer[len(MAGIC)] != VERSION:
            version = self._buffer[len(MAGIC)]
            raise FrameError(f"the frame has protocol version {version}, this peer speaks {VERSION}")

    def _check_length(self, kind: int, length: int) -> None:
        if kind not in self._lengths:
            raise FrameError(f"the frame has the unknown kind {kind}")
        low, high = self._lengths[kind]
        if not low <= length <= high:
            raise FrameError(f"the {Kind(kind).name} frame has {length} bytes, allowed are {low} to {high}")


def _decoded(kind: Kind, body: bytes) -> Frame:
    match kind:
        case Kind.MESSAGE:
            return Message(body)
        case Kind.BULK:
            return Bulk(body[_COUNT.size :], _COUNT.unpack_from(body)[0])
        case Kind.ACCEPTED:
            return Accepted()
        case Kind.REFUSED:
            return Refused(body.decode("utf-8", "replace"))
        case Kind.PROGRESS:
            return Progress(_COUNT.unpack(body)[0])
