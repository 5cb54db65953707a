"""Writes a peer's history: each event that its replica was told, with the effects that the replica answered.

Law: the only module that writes histories. It changes nothing in the run: a history that can't be written ends, with
one warning, and the run goes on. Nothing secret and nothing large is recorded: payloads are recorded as their lengths,
signatures are left out.

A history is a sequence of at most `FILES` files; for a further file the oldest is deleted. Each file is text in the
form of gzip, a line of JSON for each record. A record is one of two:

    {"history": 8, ...}    a head: at the beginning of the file, and again whenever something in it has changed
    [now, event, effects]  `now`: the replica's clock, which is the monotonic clock. A dataclass is the list of its
                           fields (see `forms`), after the name of its kind if it is an event, an effect or a message
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec

from p2p_diloco import __version__
from p2p_diloco.core.events import Effect, Event, Received
from p2p_diloco.core.messages import Message
from p2p_diloco.core.rules import Rules
from p2p_diloco.node.forms import Forms
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
LEVEL = 1
"""zlib's fastest level. Events repeat the ids of peers, so even this level makes a history ten times shorter."""
TOLD_OF_A_PEER = ("role", "client_mode", "direct", "map_port", "relay_mbit", "on_exit", "save_every", "restart_wait")
"""The settings of a peer that its history records: no address, no path and no invitation."""
FORM = 8
"""The version of this form."""
Seconds = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]

log = logging.getLogger(__name__)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a peer's life. `started`: in seconds since 1970. `began`: when its replica was made, by the
    replica's clock. `file`: the number of this file. `ahead`: the seconds since 1970 minus the replica's clock.
    `names`: of the other peers. `left`: the node has ended without being killed."""

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
    file: int = 0
    ahead: Seconds = 0.0
    names: dict[str, str] = {}
    left: bool = False
    settings: dict[str, Any] = {}
    local: dict[str, Any] = {}


Fed = tuple[float, Event, tuple[Effect, ...]]
"""When the replica was told an event, by its clock, the event, and the effects that it answered."""


def _scalar(hint: Any, field: str) -> Any:
    if hint is Any:  # a payload, of which only the length is recorded
        return int | None
    return int | float if hint is float else hint  # as it was written: hashes tell 3 from 3.0


def _nbytes(payload: Any) -> int | None:
    return getattr(payload, "nbytes", None)


_FORMS = Forms(
    _scalar,
    ("seal", "proof"),
    {*get_args(Event), *get_args(Effect), *get_args(Message)},
    told={"payload": _nbytes, "payloads": lambda payloads: list(map(_nbytes, payloads))},
)
_decoder: Any = msgspec.json.Decoder(_FORMS.of(Fed))


def packed(record: Head | Fed) -> bytes:
    """Return a record as a line."""
    if isinstance(record, Head):  # rules may have no end, which msgspec writes as null
        return json.dumps(msgspec.to_builtins(record)).encode() + b"\n"
    return msgspec.json.encode(_FORMS.write(record)) + b"\n"


def read_line(line: bytes) -> Head | Fed:
    """Read a line of a history. Raises ValueError if it is none."""
    if not line.startswith(b"{"):
        return _FORMS.read(_decoder.decode(line))  # type: ignore[no-any-return]
    values = json.loads(line, parse_constant={"Infinity": math.inf, "-Infinity": -math.inf}.get)
    if values.get("history") != FORM:
        made = f"by p2p_diloco {values.get('version')}, in form {values.get('history')}"
        raise ValueError(f"it was written {made}; this version reads form {FORM}")
    head = msgspec.convert(values, Head)
    if not head.rules.fragments:
        raise ValueError("its rules name no fragment")
    return head


class History:
    """The history of one peer from its start to its end. Until `begin`, and after an error, nothing is written."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._file: gzip.GzipFile | None = None
        self._waiting: list[Head | Fed] = []
        self._write_by, self._held = 0.0, 0

    def begin(self, place: Path, head: Head, bytes_max: int) -> None:
        """Begin to write. `place`: the path of the files, without their numbers. `bytes_max`: the length of all
        files."""
        self._place, self._head, self._file_bytes = place, head, bytes_max // FILES
        self._guarded(self._open_next)
        if self._file is not None:
            log.info("this peer's history, for p2p-diloco replay: %s", self._path(1))

    def write(self, now: float, event: Event, effects: Sequence[Effect]) -> None:
        """Record an event and the effects that the replica answered. They may be written later, with further ones."""
        if self._file is None:
            return
        if not self._waiting:
            self._write_by = now + min(WAITS_S, OF_LIFE * (now - self._head.began))
        self._waiting.append((now, event, tuple(effects)))
        if isinstance(event, Received):
            self._held += getattr(getattr(event.message, "payload", None), "nbytes", 0)
        if now >= self._write_by or self._held > HELD_BYTES or len(self._waiting) >= TOGETHER:
            self._write_out(now)

    def name(self, now: float, peer: str, name: str) -> None:
        """Record the name of another peer, once."""
        if self._file is not None and self._head.names.get(peer) != name:
            self._tell(now, names={**self._head.names, peer: name})

    def end(self, now: float, *, left: bool) -> None:
        """Write nothing more. `left`: record that this peer has ended on purpose."""
        if self._file is not None:
            if left:
                self._tell(now, left=True)
            self._write_out(now)
        self._guarded(self._close)

    def _tell(self, now: float, **changed: object) -> None:
        self._head = msgspec.structs.replace(self._head, ahead=self._wall() - now, **changed)
        self._waiting.append(self._head)

    def _write_out(self, now: float) -> None:
        if abs(self._wall() - now - self._head.ahead) > CLOCK_S:
            self._tell(now)
        waiting, self._waiting, self._held = self._waiting, [], 0
        self._guarded(self._put, waiting)

    # -- files

    def _path(self, number: int) -> Path:
        return self._place.with_name(f"{self._place.name}.{number:03d}{SUFFIX}")

    def _open_next(self) -> None:
        self._close()
        self._head = msgspec.structs.replace(self._head, file=self._head.file + 1)
        path = self._path(self._head.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._raw = open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
        self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=LEVEL)
        self._put([self._head])
        self._path(self._head.file - FILES).unlink(missing_ok=True)

    def _put(self, records: Sequence[Head | Fed]) -> None:
        """Write records through to the operating system, so that they survive this process."""
        assert self._file is not None, "records need a file"
        self._file.write(b"".join(map(packed, records)))
        self._file.flush()
        if self._raw.tell() >= self._file_bytes:
            self._open_next()

    def _guarded(self, write: Callable[..., None], *arguments: object) -> None:
        try:
            write(*arguments)
        except (OSError, TypeError, ValueError, OverflowError) as error:
            log.warning("this peer's history ends here, because it can't be written: %s", error)
            with suppress(OSError):
                self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
            self._raw.close()


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
        started=started, began=now, ahead=started - now, rules=run.rules, settings=run.config.to_wire(),
        local={key: getattr(local, key) for key in TOLD_OF_A_PEER},
    )  # fmt: skip
    try:
        root = local.history_path or state_folder() / "history"
    except RuntimeError:  # this user has no home folder, so no place for lasting files
        return history
    _prune(root, LIVES_KEPT * local.history_bytes)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started))
    history.begin(root / run.run_id / f"{name}-{replica.me[-6:]}-{stamp}", head, local.history_bytes)
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
