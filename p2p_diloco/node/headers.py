"""Encodes messages as header bytes, and decodes them: msgpack of [protocol, token, message].

Law: any bytes give a message or a `Refusal`, and take memory by their length, whatever lengths they claim. Payloads go
beside the header, and their hashes are not in it: who receives a payload computes its hash.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec

from p2p_diloco.core.rules import Rules
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.fields import MESSAGE, check_place, completed, decoded, encoded
from p2p_diloco.node.wire import ANY_RUN, PROTOCOL, AnyMessage, DataMessage, NodeMessage

Buffer = bytes | bytearray | memoryview

BYTES_MAX = 2**28
"""The longest message, and the longest payload of one."""
COMPRESSED_FROM = 256
"""A message of more bytes than this is compressed: it names the same peers and versions again and again. Shorter ones
are those that go with each slice."""
EXPANDED_MAX, EXPANDED_LEAST = 64, 2**20
"""A compressed message expands to at most so many times its bytes, or to so many bytes if that is more."""
_COMPRESSED = b"\x78"
"""The first byte of what zlib makes, and of no message."""
LONG = 16 * 1024
"""A message longer than this comes as a payload, for which transports have other limits."""
NO_RUN = Rules(run="", fragments=())
"""The rules of a node that is in no run."""


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A header. `body`: the message, or the length of a message that comes as the payload."""

    protocol: int
    token: bytes = b""
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


_ENVELOPE = msgspec.msgpack.Decoder(Envelope)
_BODY = msgspec.msgpack.Decoder(bytes | Annotated[int, msgspec.Meta(ge=1, le=BYTES_MAX)])


@contextmanager
def refusing(kind: type[Any]) -> Iterator[None]:
    """If the block refuses a message of this kind, let the reason name the kind."""
    try:
        yield
    except Refusal as refusal:
        raise Refusal(f"the {kind.__name__} is refused: {refusal.reason}") from None


def pack(message: AnyMessage, token: bytes, long: int = LONG) -> tuple[bytes, bytes | None]:
    """Encode a message: the header and, if the message has more than `long` bytes, the payload. Another payload of the
    message is sent beside the header. `token`: the run's; a `DataMessage` has none."""
    body = encoded(message)
    if len(body) > COMPRESSED_FROM:
        body = zlib.compress(body, 1)
    apart = body if len(body) > long else None
    token = ANY_RUN if isinstance(message, DataMessage) else token
    return msgspec.msgpack.encode([PROTOCOL, token, body if apart is None else len(apart)]), apart


def packed(message: NodeMessage, token: bytes = ANY_RUN) -> bytes:
    """Encode the header of a message of nodes, which is never long."""
    return pack(message, token)[0]


def opened(header: bytes, token: bytes, rules: Rules) -> AnyMessage | int:
    """Decode a header: returns the message without its payload, or the length of the payload that has it, for `unpack`.

    Raises:
        Refusal: another protocol, or another run (settings, model); or as `unpack`.
    """
    try:
        envelope = _ENVELOPE.decode(header)
        if envelope.protocol != PROTOCOL:
            raise Refusal(f"this peer uses protocol {PROTOCOL}, but the message uses protocol {envelope.protocol}")
        body = _BODY.decode(envelope.body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(f"the header can't be read ({error})") from None
    wrong = Refusal("wrong run token: the sender has another run id, other settings or another model")
    if envelope.token not in (token, ANY_RUN):
        raise wrong
    message = body if isinstance(body, int) else unpack(body, rules)
    if envelope.token != token and not isinstance(message, DataMessage):
        raise wrong
    return message


def unpack(body: Buffer, rules: Rules) -> AnyMessage:
    """Decode a message, without its payload. `rules`: of the run; a node that is in none has `NO_RUN`.

    Raises:
        Refusal: the bytes are no message, one of its fields can't be used, or it can't belong to the run.
    """
    message: Any = decoded(_expanded(body) if bytes(body[:1]) == _COMPRESSED else body, MESSAGE)
    if not isinstance(message, NodeMessage):
        with refusing(type(message)):
            message = completed(message, rules)
            if rules.fragments:
                check_place(message, rules)
    found: AnyMessage = message
    return found


def _expanded(body: Buffer) -> bytes:
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(body, min(max(EXPANDED_MAX * len(body), EXPANDED_LEAST), BYTES_MAX))
    except zlib.error as error:
        raise Refusal(f"it can't be read: {error}") from None
    if not reader.eof:
        raise Refusal("it is cut off, or far longer than its bytes")
    return content
