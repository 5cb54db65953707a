"""Messages as header bytes, and back: msgpack of [protocol, token, kind, fields].

Law: bytes in, a message or a `Refusal` out, whatever comes; payloads are none of its business. What a field
may be is read off the dataclasses of `core.messages`, so that nothing can be sent that isn't described
there. Never pickle.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from p2p_diloco.core import messages
from p2p_diloco.net.interface import Refusal

PROTOCOL = 3
"""Version of what is described here. Peers of another one are refused, by name."""

TOKEN_BYTES = 16
"""Length of the token that stands for a run, its settings and its model."""

_INT_MAX = 2**63 - 1
_TEXT_MAX = 1024
_ITEMS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Describe:
    """What model does the run train? Asked by who doesn't fit, or brings none of its own."""


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

_Reader = Callable[[object], Any]


def pack(message: AnyMessage, token: bytes) -> bytes:
    """The header of a message. Its payload, if it has one, goes beside it."""
    return bytes(msgpack.packb([PROTOCOL, token, type(message).__name__, _plain(message)]))


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
        raise Refusal("the message is of another run, or of other settings or another model under its name")
    if (read := _READERS.get(kind)) is None:
        raise Refusal(f"the message is of the unknown kind {kind[:40]!r}")
    try:
        message: AnyMessage = read(fields)
    except _Unfit as error:
        raise Refusal(f"the {kind} message has a field that is {error}") from None
    return message


def to_plain(message: AnyMessage) -> list[object]:
    """A message's fields as lists, numbers and text, for a file."""
    return [_plain(field) for field in _fields(message)]


def from_plain(kind: type[Any], fields: object) -> Any:
    """The message of `kind` that `to_plain` was given. Raises ValueError for fields that are not its own."""
    try:
        return _READERS[kind.__name__](fields)
    except _Unfit as error:
        raise ValueError(f"no {kind.__name__}: a field is {error}") from None


_NAMES: dict[type[Any], tuple[str, ...]] = {}
"""What `names` has found so far."""


class _Unfit(Exception):
    """A field isn't what its type says. Its text goes into the refusal."""


def names(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a dataclass that a header carries, in order. Raises TypeError for any other type."""
    if kind not in _NAMES:
        if not dataclasses.is_dataclass(kind):
            raise TypeError(f"a {kind.__name__} has no place in a header, or is too large for one")
        _NAMES[kind] = tuple(f.name for f in dataclasses.fields(kind) if f.name != "payload")
    return _NAMES[kind]


def _fields(value: object) -> list[Any]:
    return [getattr(value, name) for name in names(type(value))]


def _plain(value: object) -> object:
    """As lists, numbers and text; a mapping as its sorted pairs, so that equal ones have equal bytes."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return [[key, _plain(item)] for key, item in sorted(value.items())]
    return [_plain(field) for field in _fields(value)] if dataclasses.is_dataclass(value) else value


def _reader(hint: Any) -> _Reader:
    """What turns a plain value into one of this type, or says that it isn't."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_reader(hint)
    match get_origin(hint), get_args(hint):
        case (origin, (kind, other)) if origin in (Union, UnionType) and other is NoneType:
            read = _reader(kind)
            return lambda value: None if value is None else read(value)
        case (origin, (item, last)) if origin is tuple and last is Ellipsis:
            return _list_reader(_reader(item))
        case (origin, items) if origin is tuple:
            return _row_reader([_reader(item) for item in items])
        case (origin, (key, item)) if origin is Mapping:
            pairs = _list_reader(_row_reader([_reader(key), _reader(item)]))
            return lambda value: _unique(pairs(value))
    return _SCALARS[hint]


def _dataclass_reader(kind: type[Any]) -> _Reader:
    hints = get_type_hints(kind)
    row = _row_reader([_reader(hints[name]) for name in names(kind)])
    everything = [f.name for f in dataclasses.fields(kind)]
    if "payload" not in everything:
        return lambda value: kind(*row(value))
    at = everything.index("payload")

    def read(value: object) -> Any:
        fields = row(value)
        return kind(*fields[:at], None, *fields[at:])

    return read


def _row_reader(readers: list[_Reader]) -> _Reader:
    def read(value: object) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(readers):
            raise _Unfit(f"no list of {len(readers)}")
        return tuple([reader(item) for reader, item in zip(readers, value, strict=True)])

    return read


def _list_reader(reader: _Reader) -> _Reader:
    def read(value: object) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > _ITEMS_MAX:
            raise _Unfit("no list, or too long")
        return tuple(map(reader, value))

    return read


def _unique(pairs: tuple[tuple[Any, Any], ...]) -> dict[Any, Any]:
    if len(mapping := dict(pairs)) != len(pairs):
        raise _Unfit("no mapping: a key comes twice")
    return mapping


def _int(value: object) -> int:
    """-1 is the one negative number that means something: the generation of who holds no state."""
    if type(value) is not int or not -1 <= value <= _INT_MAX:
        raise _Unfit("no whole number, or out of range")
    return value


def _float(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise _Unfit("no finite number")
    return float(value)


def _text(value: object) -> str:
    if type(value) is not str or len(value) > _TEXT_MAX:
        raise _Unfit("no text, or too long")
    return value


def _bool(value: object) -> bool:
    if type(value) is not bool:
        raise _Unfit("neither true nor false")
    return value


_SCALARS: dict[Any, _Reader] = {int: _int, float: _float, str: _text, bool: _bool}

_READERS: dict[str, _Reader] = {kind.__name__: _reader(kind) for kind in get_args(AnyMessage)}
