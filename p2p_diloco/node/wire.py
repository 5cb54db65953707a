"""Encodes messages as header bytes, and decodes them: msgpack of [protocol, token, kind, fields].

Law: any bytes give a message or a `Refusal`. Payloads go beside the header, and are not read here. The dataclasses of
`core.messages` say which field values are valid (`plain`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import msgpack

from p2p_diloco.core import messages
from p2p_diloco.core.version import Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.plain import Reader, Unfit, reader, to_plain

PROTOCOL = 9
"""The version of the protocol. Peers of another version are refused with both numbers."""

OF_NODES = b"\x94"
"""The first byte of a header of this module, which has four parts. One of `headers` has three."""

TOKEN_BYTES = 16
"""Length of the token that identifies a run, its settings and its model."""


@dataclass(frozen=True, slots=True)
class Describe:
    """A request for the description of the run's model. A peer sends it if its own model differs from the run's, or if
    it has no model."""


@dataclass(frozen=True, slots=True)
class Description:
    """The answer to `Describe`. `payload` is the layout in its wire form, encoded by msgpack."""

    nbytes: int
    payload: Any = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Nudge:
    """A request to contribute after every inner step from now on, until the run has made `goal` commits, summed over
    fragments."""

    goal: int


@dataclass(frozen=True, slots=True)
class OfMean:
    """Names a mean: that of one slice of a fragment, over the entries of the choice with this key, as its owner has
    signed it. `hash`: of its payload."""

    fragment: int
    key: str
    number: int
    owner: str
    hash: str


@dataclass(frozen=True, slots=True)
class Audit:
    """A request for the contributions from which a mean was computed."""

    mean: OfMean


@dataclass(frozen=True, slots=True)
class Copy:
    """An answer to `Audit`: the contribution of one author. `seal`: the author's signature of its `Ready`. `payload`:
    the hashes of all its slices, as the `Ready` has them, and then the slice."""

    mean: OfMean
    author: str
    seal: bytes
    payload: Any = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Accusation:
    """The news that the sender's audit of a mean found a lie, with what the owner has signed (`seal`). The receiver
    audits the mean itself. `payload`, of `nbytes` bytes: the choice with the mean's key, if the sender can hand over
    the contributions that prove the lie; none if the lie is that the owner showed no contributions."""

    mean: OfMean
    base: Version
    seal: bytes
    nbytes: int = 0
    payload: Any = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Contradicts:
    """The proof that a peer lies: `payload` has two statements of this kind that it signed, each with its signature, of
    which an honest peer signs only one."""

    peer: str
    kind: bytes
    nbytes: int
    payload: Any = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class ListSlices:
    """A request to a data node for the manifest of the data set that it serves under this name."""

    name: str


@dataclass(frozen=True, slots=True)
class SliceList:
    """The answer to `ListSlices`. `payload`: the packed manifest."""

    name: str
    nbytes: int
    payload: Any = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class GetSlice:
    """A request to a data node for one slice of the data set with this identity."""

    data_set: str
    index: int


@dataclass(frozen=True, slots=True)
class SliceBytes:
    """The answer to `GetSlice`. `payload`: the slice."""

    data_set: str
    index: int
    nbytes: int
    payload: Any = field(compare=False, repr=False, default=None)


DataMessage = ListSlices | SliceList | GetSlice | SliceBytes
"""Messages to and from data nodes. They don't have the run's token, because a data node knows neither the settings nor
the model of its run. What they carry is checked by its hash."""
ANY_RUN = bytes(TOKEN_BYTES)
"""The token of a `DataMessage`."""

NodeMessage = Describe | Description | Nudge | Audit | Copy | Accusation | Contradicts | DataMessage
"""Messages that nodes handle themselves, and do not pass to their replicas."""

AnyMessage = messages.Message | NodeMessage


def pack(message: NodeMessage, token: bytes = ANY_RUN) -> bytes:
    """Encode a message's header. The message's payload, if there is one, is sent beside the header. `token`: the run's;
    ignored for a `DataMessage`."""
    token = ANY_RUN if isinstance(message, DataMessage) else token
    return bytes(msgpack.packb([PROTOCOL, token, type(message).__name__, to_plain(message)]))


def unpack(header: bytes, token: bytes) -> NodeMessage:
    """Decode a header; returns the message without its payload.

    Raises:
        Refusal: another protocol, another run (settings, model), an unknown kind, or unfit fields.
    """
    try:
        match msgpack.unpackb(header):
            case [int(protocol), *_] if protocol != PROTOCOL:
                raise Refusal(f"this peer uses protocol {PROTOCOL}, but the message uses protocol {protocol}")
            case [int(), bytes(theirs), str(kind), list(fields)]:
                pass
            case _:
                raise Refusal("the header is no message of this protocol")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Refusal(f"the header can't be read ({type(error).__name__})") from None
    if theirs != (ANY_RUN if kind in _DATA else token):
        raise Refusal("wrong run token: the sender has another run id, other settings or another model")
    if (read := _READERS.get(kind)) is None:
        raise Refusal(f"the message has the unknown kind {kind[:40]!r}")
    try:
        message: NodeMessage = read(fields)
    except Unfit as error:
        raise Refusal(f"the {kind} message has a field that is {error}") from None
    return message


_DATA = {kind.__name__ for kind in get_args(DataMessage)}
_READERS: dict[str, Reader] = {kind.__name__: reader(kind) for kind in get_args(NodeMessage)}
