"""The form in which a history records events and effects: one line of JSON for each event.

Law: nothing secret and nothing large is recorded. Payloads are recorded as their lengths; signatures are left out. A
dataclass is the list of its fields (see `forms`), after the name of its kind if it is an event, an effect or a message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, Union, get_args

import msgspec

from p2p_diloco.core.events import Effect, Event
from p2p_diloco.core.messages import Message
from p2p_diloco.core.rules import Rules
from p2p_diloco.node.forms import NO_RUN, Form, Forms

FORM = 3
"""The version of this form."""
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


Record = Head | Fed | Clock | Name | End


def _scalar(hint: Any, name: str) -> Form:
    if hint is Any:  # a payload, of which only the length is recorded
        return Form(int | None, lambda value, _: getattr(value, "nbytes", None))
    return Form(int | float if hint is float else hint)  # as it was written: hashes tell 3 from 3.0


_NAMED = {*get_args(Event), *get_args(Effect), *get_args(Message)}
_FORMS = Forms(_scalar, {}, left_out=("seal", "proof"), tagged=_NAMED)
_EVENT, _EFFECTS = _FORMS.of(Event), _FORMS.of(tuple[Effect, ...])
_FED = msgspec.defstruct(
    "Fed", [("now", float), ("event", _EVENT.type), ("effects", _EFFECTS.type)], array_like=True, tag="fed"
)
_line: Any = msgspec.json.Decoder(Union[_FED, Clock, Name, End])  # noqa: UP007
_encode = msgspec.json.Encoder().encode


def packed(records: Iterable[Record]) -> bytes:
    """Return records as lines."""
    return b"".join([_packed(record) + b"\n" for record in records])


def _packed(record: Record) -> bytes:
    match record:
        case Head():  # rules may have no end, which msgspec writes as null
            return json.dumps(msgspec.to_builtins(record)).encode()
        case Fed(now, event, effects):
            return _encode(["fed", now, _EVENT.write(event, NO_RUN), _EFFECTS.write(effects, NO_RUN)])
    return _encode(record)


def read_line(line: bytes) -> Fed | Clock | Name | End:
    """Read a line of a history. Raises msgspec.MsgspecError if it is none."""
    record: Any = _line.decode(line)
    if isinstance(record, Clock | Name | End):
        return record
    return Fed(record.now, _EVENT.read(record.event, NO_RUN), _EFFECTS.read(record.effects, NO_RUN))


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
