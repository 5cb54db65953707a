"""The form in which a history records events and effects: one line of JSON for each event.

Law: nothing secret and nothing large is recorded. Payloads are recorded as their lengths; signatures are left out. A
dataclass is the list of its fields, in order, after the name of its kind if it is an event, an effect or a message.
msgspec checks each line that is read against the types of these fields.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from p2p_diloco.core.events import Effect, Event
from p2p_diloco.core.messages import Message
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import State

FORM = 2
"""The version of this form."""
SIGNED, SIZED = ("seal", "proof"), ("payload", "payloads")
"""Fields that are not recorded, and those of which only the length is."""
NAMED = {*get_args(Event), *get_args(Effect), *get_args(Message)}
Seconds = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of each file. `began`, `now`: when the replica and this file were made, by the replica's clock.
    `started`, `time`: the same two moments, in seconds since 1970. `file`: its number. `names`: of the peers known when
    it was begun."""

    history: int = FORM
    version: str
    protocol: int
    run_id: str
    founder: str
    founded: Seconds
    peer: str
    name: str
    role: str
    eligible: bool
    incarnation: int
    grant: str = ""
    started: Seconds
    began: Seconds
    rules: Rules
    file: int = 1
    now: Seconds = 0.0
    time: Seconds = 0.0
    names: dict[str, str] = {}
    settings: dict[str, Any] = {}
    local: dict[str, Any] = {}


class Fed(NamedTuple):
    """An event that the replica was told, and the effects that it answered."""

    now: float
    event: Event
    effects: tuple[Effect, ...]


class Clock(msgspec.Struct, array_like=True, tag="clock"):
    """The wall clock, in seconds since 1970, if it was changed against the replica's."""

    now: float
    time: Seconds


class Name(msgspec.Struct, array_like=True, tag="name"):
    """The name of another peer."""

    now: float
    peer: str
    name: str


class End(msgspec.Struct, array_like=True, tag="end"):
    """The node has ended without being killed."""

    now: float


# -- writing


def packed(records: Iterable[Any]) -> bytes:
    """Return records as lines. A record is a `Head`, or a tuple: the name of its kind and its fields."""
    return "".join([_encode(record) + "\n" for record in records]).encode()


def _listed(value: Any) -> Any:
    """Return a value that JSON doesn't know as one that it knows."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.value if isinstance(value, Enum) else _writer(value.__class__)(value)


@cache
def _writer(kind: type[Any]) -> Callable[[Any], Any]:
    """Make the function that lists the fields of a dataclass. It is called for each part of each event, so it must do
    little."""
    if kind is Rules:
        return dataclasses.asdict
    if issubclass(kind, msgspec.Struct):
        return msgspec.structs.asdict
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"a {kind.__name__} is not recorded")
    names, head = _recorded(kind), [kind.__name__] if kind in NAMED else []
    if not names:
        return lambda value: head
    get = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
    if set(names).isdisjoint(SIZED):
        return lambda value: [*head, *get(value)]
    at = next(at for at, name in enumerate(names) if name in SIZED)

    def sized(value: Any) -> Any:
        found = [*get(value)]
        found[at] = _size(found[at]) if names[at] == "payload" else [*map(_size, found[at])]
        return [*head, *found]

    return sized


def _recorded(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name not in SIGNED]


def _size(payload: Any) -> int | None:
    """Return the length of a payload in bytes; None: there is no payload, or its length is unknown."""
    return getattr(payload, "nbytes", None)


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_listed).encode


# -- reading

_MADE: dict[type[Any], tuple[type[Any], list[str]]] = {}
"""By type that msgspec makes of a line's part: the dataclass that it stands for, and its recorded fields."""


@cache
def _struct(kind: type[Any]) -> Any:
    """Make the type by which msgspec checks the list of a dataclass's fields."""
    hints, names = get_type_hints(kind, localns={"State": State}), _recorded(kind)
    fields = [(name, _checked(hints[name])) for name in names]
    tag = kind.__name__ if kind in NAMED else None
    made: Any = msgspec.defstruct(kind.__name__, fields, array_like=True, forbid_unknown_fields=True, gc=False, tag=tag)
    _MADE[made] = kind, names
    return made


def _checked(hint: Any) -> Any:
    """Return the type of a recorded field, by that of the dataclass's field."""
    if hint is Any:
        return int | None  # the length of a payload
    if hint is float:
        return int | float  # as it was written: hashes tell 3 from 3.0
    if dataclasses.is_dataclass(hint):
        return _struct(hint)  # type: ignore[arg-type]
    if not (args := get_args(hint)):
        return hint
    inner = tuple(one if one is ... else _checked(one) for one in args)
    if isinstance(hint, UnionType):
        return Union[inner]  # noqa: UP007
    return get_origin(hint)[inner]


def _back(value: Any) -> Any:
    """Return what a checked part of a line stands for."""
    if (made := _MADE.get(type(value))) is not None:
        kind, names = made
        return kind(**{name: _back(getattr(value, name)) for name in names})
    if isinstance(value, tuple):
        return tuple(map(_back, value))
    return {key: _back(one) for key, one in value.items()} if isinstance(value, dict) else value


_FED = msgspec.defstruct(
    "Fed", [("now", float), ("event", _checked(Event)), ("effects", tuple[_checked(Effect), ...])],  # type: ignore[misc]
    array_like=True, tag="fed",
)  # fmt: skip
_line: Any = msgspec.json.Decoder(Union[_FED, Clock, Name, End])  # noqa: UP007


def read_line(line: bytes) -> Fed | Clock | Name | End:
    """Read a line of a history. Raises msgspec.MsgspecError if it is none."""
    record: Any = _line.decode(line)
    if isinstance(record, Clock | Name | End):
        return record
    return Fed(record.now, _back(record.event), _back(record.effects))


def read_head(line: bytes) -> Head:
    """Read the first line of a history. Raises ValueError if it is none."""
    try:
        values = json.loads(line, parse_constant={"Infinity": math.inf, "-Infinity": -math.inf}.__getitem__)
    except (ValueError, KeyError, RecursionError):  # KeyError: a number that is none
        values = None
    if not isinstance(values, dict) or "history" not in values:
        raise ValueError("it does not begin as a history does")
    if values["history"] == FORM:
        head = msgspec.convert(values, Head)
        if not head.rules.fragments:
            raise ValueError("its rules name no fragment")
        return head
    made = f"by p2p_diloco {values.get('version')}, in form {values['history']}"
    raise ValueError(f"it was written {made}; this version reads form {FORM}")
