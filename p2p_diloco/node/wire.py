"""Messages as header bytes, and back: msgpack of [protocol, token, kind, fields].

Law: bytes in, a message or a `Refusal` out, whatever comes. Payloads go beside the header, and are not read here. What
a field may be is read off the dataclasses of `core.messages` (`plain`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import msgpack

from p2p_diloco.core import messages
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.plain import Reader, Unfit, reader, to_plain

PROTOCOL = 4
"""Version of what is described here. Peers of another one are refused, by name."""

TOKEN_BYTES = 16
"""Length of the token that stands for a run, its settings and its model."""


@dataclass(frozen=True, slots=True)
class Describe:
    """What model does the run train? Asked by a peer whose model differs, or that brings none."""


@dataclass(frozen=True, slots=True)
class Description:
    """The answer. payload: the layout's wire form, as msgpack."""

    nbytes: int
    payload: Any = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Nudge:
    """Contribute at each next inner step until the run has made `goal` commits, summed over fragments."""

    goal: int


NodeMessage = Describe | Description | Nudge
"""What nodes say to each other beside their replicas."""

AnyMessage = messages.Message | NodeMessage


def pack(message: AnyMessage, token: bytes) -> bytes:
    """The header of a message. Its payload, if it has one, goes beside it."""
    return bytes(msgpack.packb([PROTOCOL, token, type(message).__name__, to_plain(message)]))


def unpack(header: bytes, token: bytes) -> AnyMessage:
    """The message of a header, without its payload.

    Raises:
        Refusal: another protocol, another run (settings, model), an unknown kind, or unfit fields.
    """
    try:
        match msgpack.unpackb(header):
            case [int(protocol), *_] if protocol != PROTOCOL:
                raise Refusal(f"this peer speaks protocol {PROTOCOL}, the message protocol {protocol}")
            case [int(), bytes(theirs), str(kind), list(fields)]:
                pass
            case _:
                raise Refusal("the header is no message of this protocol")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Refusal(f"the header can't be read ({type(error).__name__})") from None
    if theirs != token:
        raise Refusal("wrong run token: run id, settings or model differ")
    if (read := _READERS.get(kind)) is None:
        raise Refusal(f"the message is of the unknown kind {kind[:40]!r}")
    try:
        message: AnyMessage = read(fields)
    except Unfit as error:
        raise Refusal(f"the {kind} message has a field that is {error}") from None
    return message


_READERS: dict[str, Reader] = {kind.__name__: reader(kind) for kind in get_args(AnyMessage)}
