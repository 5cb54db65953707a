"""Encodes messages as header bytes, and decodes them: msgpack of [protocol, token, [tag, fields...]].

Law: any bytes give a message or a `Refusal`, and take memory by their length, whatever lengths they claim. Payloads go
beside the header, and their hashes are not in it: who receives a payload computes its hash.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Annotated, Any, Union, get_args

import msgspec

from p2p_diloco.core import messages as m
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import rooted
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.signing import SIGNATURE_BYTES
from p2p_diloco.node import fields
from p2p_diloco.node import forms as f
from p2p_diloco.node.fields import DIGESTS, FORMS, HASH_BYTES, VERSION, check_place
from p2p_diloco.node.forms import NO_RUN, NOWHERE, About, refusing
from p2p_diloco.node.signatures import LIFE_BYTES
from p2p_diloco.node.wire import ANY_RUN, PROTOCOL, AnyMessage, DataMessage, NodeMessage, OfMean

Buffer = bytes | bytearray | memoryview

BYTES_MAX = 2**28
"""The longest message, and the longest payload of one."""
LENGTH = Annotated[int, msgspec.Meta(ge=1, le=BYTES_MAX)]

KINDS = (*get_args(m.Message), *get_args(NodeMessage))
"""All messages; a message's tag is its place."""
OF_LIFE = f.octets(0, LIFE_BYTES + SIGNATURE_BYTES)
OWN: dict[type[Any], dict[str, f.Form]] = {
    m.Close: {"seal": OF_LIFE}, m.Commit: {"seal": OF_LIFE}, m.Head: {"digests": DIGESTS},
    OfMean: {"hash": f.digest(HASH_BYTES)},
}  # fmt: skip
"""The forms of fields that are unlike those of other messages."""
fields.OWN |= {kind: FORMS.row(kind, None, **own) for kind, own in OWN.items()}  # as parts of other messages
OF_KIND = {kind: FORMS.row(kind, tag, **OWN.get(kind, {})) for tag, kind in enumerate(KINDS)}
_OF_STRUCT = {form.type: (kind, form) for kind, form in OF_KIND.items()}
_BODY = msgspec.msgpack.Decoder(Union[tuple(form.type for form in OF_KIND.values())])  # noqa: UP007
_ENCODER = msgspec.msgpack.Encoder()


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A header. `body`: the message, or the length of a message that comes as the payload."""

    protocol: int
    token: bytes = b""
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


SHORTER_MAX = 64
"""A long message is compressed to no less than this part of its bytes; names and signatures, most of it, to a half."""
LONG = 16 * 1024
"""A message longer than this comes as a payload, for which transports have other limits."""


def pack(message: AnyMessage, rules: Rules, token: bytes, long: int = LONG) -> tuple[bytes, bytes | None]:
    """Encode a message: the header and, if the message has more than `long` bytes, the payload, which is compressed.
    Another payload of the message is sent beside the header."""
    about = About(rules, getattr(message, "fragment", None) or 0, getattr(message, "base", NOWHERE))
    body = _ENCODER.encode(OF_KIND[type(message)].write(message, about))
    apart = zlib.compress(body, 1) if len(body) > long else None
    return _ENCODER.encode([PROTOCOL, token, msgspec.Raw(body) if apart is None else len(apart)]), apart


def packed(message: NodeMessage, token: bytes = ANY_RUN) -> bytes:
    """Encode the header of a message of nodes. `token`: the run's; ignored for a `DataMessage`."""
    return pack(message, NO_RUN.rules, ANY_RUN if isinstance(message, DataMessage) else token)[0]


def opened(header: bytes, token: bytes) -> memoryview | int:
    """Open a header: returns the message's bytes, for `unpack`, or the length of the payload that has them.

    Raises:
        Refusal: another protocol, or another run (settings, model).
    """
    try:
        envelope = msgspec.msgpack.decode(header, type=Envelope)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(f"the header can't be read ({error})") from None
    if envelope.protocol != PROTOCOL:
        raise Refusal(f"this peer uses protocol {PROTOCOL}, but the message uses protocol {envelope.protocol}")
    body = memoryview(envelope.body)
    if envelope.token != (ANY_RUN if bytes(body[1:2]) in _DATA else token):
        raise Refusal("wrong run token: the sender has another run id, other settings or another model")
    if body[:1] and (body[0] & 0xF0 == 0x90 or body[0] in (0xDC, 0xDD)):
        return body
    try:
        return int(msgspec.msgpack.decode(body, type=LENGTH))
    except msgspec.MsgspecError as error:
        raise Refusal(f"the header has neither a message nor the length of one ({error})") from None


def expanded(payload: Buffer) -> memoryview:
    """The bytes of a long message, for `unpack`. Raises Refusal if they are damaged, or far more than the payload's."""
    reader = zlib.decompressobj()
    try:
        body = reader.decompress(payload, min(SHORTER_MAX * len(payload), BYTES_MAX))
    except zlib.error as error:
        raise Refusal(f"the message can't be read: {error}") from None
    if not reader.eof:
        raise Refusal("the message is cut off, or far longer than its payload")
    return memoryview(body)


_DATA = {bytes([KINDS.index(kind)]) for kind in get_args(DataMessage)}
"""The tags of messages that have no run's token: the second byte of a short message."""


def unpack(body: Buffer, rules: Rules) -> AnyMessage:
    """Decode a message, without its payload. `rules`: of the run; a node that is in none has `NO_RUN`'s.

    Raises:
        Refusal: the bytes are no message, one of its fields can't be used, or it can't belong to the run.
    """
    try:
        struct = _BODY.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refusal(f"the message can't be read: {error}") from None
    kind, form = _OF_STRUCT[type(struct)]
    with refusing(kind):
        about = About(rules, getattr(struct, "fragment", None) or 0)
        if hasattr(struct, "fragment") and about.fragment >= len(rules.fragments):
            raise Refusal(f"the run has no fragment {about.fragment}")
        if hasattr(struct, "base"):
            about = replace(about, base=VERSION.read(struct.base, about))
        message: AnyMessage = form.read(struct, about)
        if isinstance(message, m.Ready) and message.hashes:
            message = rooted(message)
        if rules.fragments and not isinstance(message, NodeMessage):
            check_place(message, rules)
    return message
