"""The form in which a history records events and effects: plain values that msgpack packs.

Law: nothing secret and nothing large is recorded. Payloads are recorded as their lengths; signatures, seals, and bytes
that follow from other fields are left out. An event, an effect or a message is a list that begins with the name of its
kind; any other dataclass is the list of its leaves (`_leaves`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

import msgpack

from p2p_diloco.core.events import Carry, Effect, Event
from p2p_diloco.core.messages import Message
from p2p_diloco.core.version import ContributionId
from p2p_diloco.node.plain import Reader, Unfit, reader

LEFT_OUT: Mapping[str, Any] = {"seal": b"", "proof": "", "meta": b"", "held": None}
"""Fields that are not recorded, with the values that they have when a record is read."""
SIZED = ("payload", "payloads")
_EVENTS, _EFFECTS, _MESSAGES = get_args(Event), get_args(Effect), get_args(Message)
_NAMED = {kind: kind.__name__ for kind in (*_EVENTS, *_EFFECTS, *_MESSAGES)}


@dataclasses.dataclass(frozen=True, slots=True)
class Payload:
    """Stands for a payload of which only the length was recorded."""

    nbytes: int


# -- writing


def packer() -> Callable[[object], bytes]:
    """Make the function that packs values in full."""
    return _packer(_lister)


def batch_packer() -> Callable[[Sequence[object]], bytes]:
    """Make the function that packs a batch of records. In place of a message that was packed earlier in the batch, its
    number is packed. Most messages come twice (sent and delivered, received and applied), so this halves the work."""
    seen: dict[int, int] = {}  # by id(message): its number; the batch holds all messages, so ids are not used again

    def lister(kind: type[Any]) -> Lister:
        whole = _lister(kind)
        if kind not in _MESSAGES:
            return whole

        def listed(message: Any) -> Any:
            if (number := seen.get(id(message))) is not None:
                return number
            seen[id(message)] = len(seen)
            return whole(message)

        return listed

    pack_all = _packer(lister)

    def pack(records: Sequence[object]) -> bytes:
        seen.clear()
        return pack_all(records)

    return pack


Lister = Callable[[Any], Any]
"""Turns a value of one type into what msgpack packs."""


def _packer(lister: Callable[[type[Any]], Lister]) -> Callable[[object], bytes]:
    """Make a packer. `lister` is called once for each type, and makes the function that prepares values of this type.
    That function is called for each part of each event, so it must do little."""
    listers: dict[type[Any], Lister] = {}

    def listed(value: Any) -> Any:
        try:
            return listers[value.__class__](value)
        except KeyError:
            made = listers[value.__class__] = lister(value.__class__)
            return made(value)

    pack: Callable[[object], bytes] = msgpack.Packer(default=listed).pack
    return pack


def _lister(kind: type[Any]) -> Lister:
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"a {kind.__name__} is not recorded")
    head, sized = (_NAMED[kind],) if kind in _NAMED else (), _sized_of(kind)
    paths = [f"{path}.value" if _is_enum(hint) else path for path, hint in _leaves(kind)]
    get: Lister = attrgetter(*paths) if paths else lambda value: ()
    if sized is not None:
        return lambda value: (*head, *get(value), _size(getattr(value, sized)))
    if len(paths) == 1:
        return lambda value: (*head, get(value))
    return (lambda value: (*head, *get(value))) if head else get


@cache
def _leaves(kind: type[Any]) -> list[tuple[str, Any]]:
    """The recorded values of a dataclass, as (path, type): its fields; but in place of a field that is a dataclass
    outside `_NAMED`, the leaves of that dataclass. One call of C reads all paths, which is faster than nested lists."""
    found: list[tuple[str, Any]] = []
    for name, hint in _recorded(kind):
        if _is_flat(hint):
            found += [(f"{name}.{path}", inner) for path, inner in _leaves(hint)]
        else:
            found.append((name, hint))
    return found


def _recorded(kind: type[Any]) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return [(name, hints[name]) for name in names if name not in LEFT_OUT and name not in SIZED]


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _is_flat(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint not in _NAMED


def _sized_of(kind: type[Any]) -> str | None:
    """The name of the field of which only the length is recorded; None: there is none."""
    return next((field.name for field in dataclasses.fields(kind) if field.name in SIZED), None)


def _size(payload: Any) -> Any:
    """The length of a payload in bytes; None: there is no payload, or its length is unknown."""
    if isinstance(payload, tuple):
        return [_size(one) for one in payload]
    return getattr(payload, "nbytes", None)


def _sized(size: Any) -> Any:
    """What stands for a payload of this length when a record is read."""
    if isinstance(size, list):
        return tuple(map(_sized, size))
    return None if size is None else Payload(_only(int)(size))


# -- reading


class Met:
    """The messages of a batch that were read so far. Later records refer to them by number."""

    def __init__(self) -> None:
        self.messages: list[Message] = []


def event_of(value: object, met: Met) -> Event:
    """Read a recorded event. Raises Unfit for anything else."""
    event: Event = _of_kind(_EVENTS, met)(value)
    return event


def effect_of(value: object, met: Met) -> Effect:
    """Read a recorded effect. Raises Unfit for anything else."""
    effect: Effect = _of_kind(_EFFECTS, met)(value)
    return effect


@cache
def _of_kind(kinds: tuple[type[Any], ...], met: Met) -> Reader:
    """The reader of values of these kinds. A value is a list that begins with the name of its kind."""
    readers = {kind.__name__: _reader(kind, met) for kind in kinds}  # type: ignore[arg-type]

    def read(value: object) -> Any:
        match value:
            case [str(name), *fields] if name in readers:
                return readers[name](fields)
        raise Unfit(f"none of {', '.join(readers)}")

    return read


@cache
def _reader(kind: type[Any], met: Met) -> Reader:
    """The reader of a dataclass that is recorded as the list of its leaves."""
    build, sized, count = _builder(kind, met), _sized_of(kind), len(_leaves(kind))  # type: ignore[arg-type]

    def read(value: object) -> Any:
        if not isinstance(value, list) or len(value) != count + (sized is not None):
            raise Unfit(f"no {kind.__name__}")
        return build(iter(value), {} if sized is None else {sized: _sized(value[-1])})

    return read


@cache
def _builder(kind: type[Any], met: Met) -> Callable[[Iterator[object], Mapping[str, Any]], Any]:
    """Make the function that builds a dataclass of this kind. Its arguments: the leaves, of which it takes the next
    ones, and the values of the fields that are no leaves."""
    left_out = {field.name: LEFT_OUT[field.name] for field in dataclasses.fields(kind) if field.name in LEFT_OUT}
    parts = [
        (name, _builder(hint, met) if _is_flat(hint) else None, None if _is_flat(hint) else reader(hint, _scalars(met)))
        for name, hint in _recorded(kind)
    ]

    def build(leaves: Iterator[object], others: Mapping[str, Any] = MappingProxyType({})) -> Any:
        fields = {
            name: build(leaves) if build is not None else read(next(leaves))  # type: ignore[misc,call-arg]
            for name, build, read in parts
        }
        return kind(**fields, **left_out, **others)

    return build


class _Scalars(dict[Any, Reader]):
    """The readers of leaves, for `plain.reader`. The reader of a dataclass that is recorded without its name is made
    when it is first asked for."""

    def __init__(self, met: Met, readers: Mapping[Any, Reader]) -> None:
        super().__init__(readers)
        self._met = met

    def __contains__(self, hint: object) -> bool:
        return super().__contains__(hint) or _is_flat(hint)

    def __missing__(self, hint: Any) -> Reader:
        return _reader(hint, self._met)


@cache
def _scalars(met: Met) -> _Scalars:
    readers = {
        **{kind: _only(kind) for kind in (int, str, bool)},
        **{kind: _later(met, kind) for kind in _MESSAGES},
        float: _only((int, float)),
        Message: _later(met, *_MESSAGES),
        Carry: Carry,
        Mapping[str, ContributionId]: _mapping(lambda value: _reader(ContributionId, met)(value)),
        Mapping[int, str]: _mapping(_only(str)),
    }
    return _Scalars(met, readers)


def _later(met: Met, *kinds: type[Any]) -> Reader:
    """The reader of messages of these kinds. Its parts are made at its first use: messages may contain each other."""

    def read(value: object) -> Any:
        if not isinstance(value, int):
            message = _of_kind(kinds, met)(value)
            met.messages.append(message)
        elif not 0 <= value < len(met.messages) or not isinstance(message := met.messages[value], kinds):
            raise Unfit("a message that the batch does not have")
        return message

    return read


def _only(kind: Any) -> Reader:
    def read(value: object) -> Any:
        if not isinstance(value, kind):
            raise Unfit(f"{value!r}")
        return value

    return read


def _mapping(read_item: Reader) -> Reader:
    def read(value: object) -> Any:
        if not isinstance(value, dict):
            raise Unfit("not a mapping")
        return {key: read_item(item) for key, item in value.items()}

    return read
