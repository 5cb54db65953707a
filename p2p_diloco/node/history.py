"""Writes a peer's history: each event that its replica was told, with the effects that the replica answered.

Law: the only module that writes histories. It changes nothing in the run: a history that can't be written ends, with
one warning, and the run goes on. Nothing secret and nothing large is recorded: payloads are recorded as their lengths,
signatures are left out. A dataclass is the list of its fields (see `forms`), after the name of its kind if it is an
event, an effect or a message.

A history is a sequence of at most `FILES` files; for a further file the oldest is deleted. Each file is text in the
form of gzip: one line of JSON for its head, and one for each further record:

    {"history": 3, ...}           the head
    ["fed", now, event, effects]  `now`: the replica's clock, which is the monotonic clock
    ["clock", now, time]          the wall clock, in seconds since 1970, if it was changed against the replica's
    ["name", now, peer, name]     the name of another peer
    ["end", now]                  the node has ended without being killed
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple, Union, get_args

import msgspec

from p2p_diloco import __version__
from p2p_diloco.core.events import Effect, Event, Received
from p2p_diloco.core.messages import Message
from p2p_diloco.core.rules import Rules
from p2p_diloco.node.forms import NO_RUN, Form, Forms
from p2p_diloco.node.wire import PROTOCOL
from p2p_diloco.remembered import state_folder

if TYPE_CHECKING:
    from p2p_diloco.node.common import Common  # would load torch, and `replay` reads histories without it

SUFFIX = ".history.gz"
FILES = 4
"""The most files of one history. Each gets an equal part of `history_bytes`, so of a long history at least three
quarters of this length are kept."""
LIVES_KEPT = 4
"""When a peer starts, it deletes the oldest files of all histories, down to `LIVES_KEPT` times `history_bytes`."""
WAITS_S, OF_LIFE = 10.0, 0.25
"""Events are written together, which takes a fifth of the time that writing each alone takes: code that runs rarely is
not in the processor's caches. An event waits for at most WAITS_S seconds, and at most the share OF_LIFE of the peer's
life so far. The history of a killed peer lacks at most that time and one heartbeat."""
TOGETHER = 128
"""The most events that are written together: about 5 ms of work, for which the node's loop stands still."""
HELD_BYTES = 16 * 2**20
"""If the waiting events hold more bytes of received payloads than this, they are written at once, to free memory."""
CLOCK_S = 0.5
"""A change of the wall clock against the monotonic clock by this many seconds is recorded."""
LEVEL, GZIP = 1, 31
"""zlib's fastest level. Events repeat the ids of peers, so even this level makes a history ten times shorter. And the
number by which zlib knows the form of gzip."""
TOLD_OF_A_PEER = ("role", "client_mode", "direct", "map_port", "relay_mbit", "on_exit", "save_every", "restart_wait")
"""The settings of a peer that its history records: no address, no path and no invitation."""
FORM = 4
"""The version of this form."""
Seconds = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]

log = logging.getLogger(__name__)


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


# -- writing


class History:
    """The history of one peer from its start to its end. Until `begin`, and after an error, nothing is written."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._file: BinaryIO | None = None
        self._stream = zlib.compressobj(LEVEL, wbits=GZIP)
        self._names: dict[str, str] = {}
        self._number, self._written, self._file_bytes = 0, 0, 0
        self._ahead = 0.0  # the wall clock minus the replica's clock
        self._waiting: list[Record] = []  # records that are not written yet
        self._write_by, self._held = 0.0, 0

    def begin(self, place: Path, head: Head, bytes_max: int, now: float, time: float) -> None:
        """Begin to write. `place`: the path of the files, without their numbers. `head`: the head of each file.
        `bytes_max`: the length of all files. `now`, `time`: one moment by the replica's clock and by the wall clock."""
        self._place, self._head, self._file_bytes, self._ahead = place, head, bytes_max // FILES, time - now
        self._began = now
        self._guarded(self._open_next, now)
        if self._file is not None:
            log.info("this peer's history, for p2p-diloco replay: %s", self._path(1))

    def write(self, now: float, event: Event, effects: Sequence[Effect]) -> None:
        """Record an event and the effects that the replica answered. They may be written later, with further ones."""
        if self._file is None:
            return
        if not self._waiting:
            self._write_by = now + min(WAITS_S, OF_LIFE * (now - self._began))
        self._waiting.append(Fed(now, event, tuple(effects)))
        if isinstance(event, Received):
            self._held += getattr(getattr(event.message, "payload", None), "nbytes", 0)
        if now >= self._write_by or self._held > HELD_BYTES or len(self._waiting) >= TOGETHER:
            self._write_out(now)

    def name(self, now: float, peer: str, name: str) -> None:
        """Record the name of another peer, once."""
        if self._file is not None and self._names.get(peer) != name:
            self._names[peer] = name
            self._waiting.append(Name(now, peer, name))

    def end(self, now: float, *, left: bool) -> None:
        """Write nothing more. `left`: record that this peer has ended on purpose."""
        if self._file is not None:
            if left:
                self._waiting.append(End(now))
            self._write_out(now)
        self._guarded(self._close)

    def _write_out(self, now: float) -> None:
        ahead = self._wall() - now
        if abs(ahead - self._ahead) > CLOCK_S:
            self._ahead = ahead
            self._waiting.append(Clock(now, now + ahead))
        waiting, self._waiting, self._held = self._waiting, [], 0
        self._guarded(self._put, waiting)
        if self._written >= self._file_bytes:
            self._guarded(self._open_next, now)

    # -- files

    def _path(self, number: int) -> Path:
        return self._place.with_name(f"{self._place.name}.{number:03d}{SUFFIX}")

    def _open_next(self, now: float) -> None:
        self._close()
        self._number, self._written = self._number + 1, 0
        self._place.parent.mkdir(parents=True, exist_ok=True)
        private = os.open(self._path(self._number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._file, self._stream = os.fdopen(private, "wb", buffering=0), zlib.compressobj(LEVEL, wbits=GZIP)
        of = {"file": self._number, "now": now, "time": now + self._ahead, "names": dict(self._names)}
        self._put([msgspec.structs.replace(self._head, **of)])
        with suppress(FileNotFoundError):
            self._path(self._number - FILES).unlink()

    def _put(self, records: Sequence[Record]) -> None:
        """Write records through to the operating system, so that they survive this process."""
        assert self._file is not None, "records need a file"
        data = self._stream.compress(packed(records)) + self._stream.flush(zlib.Z_SYNC_FLUSH)
        if self._file.write(data) != len(data):
            raise OSError("the disk is full")
        self._written += len(data)

    def _guarded(self, write: Any, *arguments: object) -> None:
        try:
            write(*arguments)
        except (OSError, TypeError, ValueError, OverflowError) as error:
            log.warning("this peer's history ends here, because it can't be written: %s", error)
            with suppress(OSError):
                self._close()
            self._file = None

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.write(self._stream.flush())


def begun(common: Common, now: float, grant: str) -> History:
    """The history of a peer; nothing is written if the peer is to have none. `now`: when its replica was made, by the
    replica's clock; `grant`: as it was made."""
    history, local, run, founding, replica = History(), common.local, common.run, common.founding, common.replica
    if not local.history_bytes:
        return history
    started, mine = common.started_at, replica.roster.mine
    name = local.name or os.uname().nodename[:64]
    head = Head(
        version=__version__, protocol=PROTOCOL, run_id=run.run_id, founder=founding.founder, founded=founding.time,
        peer=replica.me, name=name, role=mine.role, eligible=mine.eligible, incarnation=mine.incarnation, grant=grant,
        started=started, began=now, rules=run.rules, settings=run.config.to_wire(),
        local={key: getattr(local, key) for key in TOLD_OF_A_PEER},
    )  # fmt: skip
    try:
        root = local.history_path or state_folder() / "history"
    except RuntimeError:  # this user has no home folder, so no place for lasting files
        return history
    _prune(root, LIVES_KEPT * local.history_bytes)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))
    history.begin(root / run.run_id / f"{name}-{replica.me[-6:]}-{stamp}", head, local.history_bytes, now, started)
    return history


def _prune(root: Path, bytes_max: int) -> None:
    """Delete the oldest files of all histories until the rest has at most `bytes_max` bytes. A running peer writes
    often, so its newest file is never among the oldest."""
    with suppress(OSError):
        newest_first = sorted(
            ((path.stat(), path) for path in root.glob(f"*/*{SUFFIX}")), key=lambda it: -it[0].st_mtime
        )
        kept = 0
        for stat, path in newest_first:
            kept += stat.st_size
            if kept > bytes_max:
                path.unlink(missing_ok=True)
