"""Reads the histories that `node.history` writes, and plays them again: a new replica is told the recorded events, and
its effects are compared with those recorded.

Law: only reads; any bytes give a history or an error that names the file. A history may end at any byte, because its
peer may have been killed: all records before that are read. The core reads no clock and draws no numbers, so equal
events lead to equal effects. What a history does not record (payloads, seals, what follows from other fields) is not
compared.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import msgspec

from p2p_diloco.core.events import Depart, Effect
from p2p_diloco.core.replica import Replica
from p2p_diloco.errors import ConfigError, listed, reason
from p2p_diloco.history.entry import Entry, tell
from p2p_diloco.node.history import GZIP, SUFFIX, Clock, End, Fed, Head, Name, read_head, read_line

log = logging.getLogger(__name__)

CHUNK = 256
"""Bytes that are read at a time. Up to this many bytes before a damaged one are lost with it."""
LINE_BYTES_MAX = 2**24
"""The longest line."""
EXPANSION_MAX = 100
"""A real history is 3 to 30 times as long as its file; a made one can be a thousand times as long."""
ID, LETTERS = r"\b(?:12D3KooW|Qm)[1-9A-HJ-NP-Za-km-z]{44}\b", 6
"""How a peer's id looks, and how many of its last letters are shown."""


@dataclass(slots=True)
class Life:
    """The history of one life of a peer: from its start to its end, or as much of that as there is."""

    head: Head
    """The head of the oldest file that there is."""
    last: int = 0
    """The number of the newest file."""
    entries: list[Entry] = field(default_factory=list)
    """Their times are of the peer's wall clock, in seconds since 1970."""
    clocks: list[float] = field(default_factory=list)
    """For each entry, its time by the replica's clock, in seconds."""
    names: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    """Whether the peer has written the end of its history."""
    gap: str = ""
    """Why the history isn't whole: files are missing or damaged. Empty: it is."""

    @property
    def peer(self) -> str:
        """The peer's id."""
        return self.head.peer

    @property
    def left(self) -> bool:
        """Whether the peer ended on purpose."""
        return self.ended or Depart() in [entry.what for entry in self.entries[-50:]]

    @property
    def whole(self) -> bool:
        """Whether nothing is missing between the peer's start and the last entry."""
        return self.head.file == 1 and not self.gap


def read(paths: Sequence[Path], run_id: str | None = None) -> list[Life]:
    """Read histories of one run. `paths`: files, and folders that have such files in them or one level below. `run_id`:
    only runs of this name are read; None: any. Of a folder only the files of one run are taken: the run of the first
    file in `paths`, or if all are folders, the run with the newest history.

    Raises:
        ConfigError: there is no history; or a file in `paths` can't be read, or is of another run than the first one.
    """
    heads = list(_heads(paths))
    wanted = [(path, head) for path, head in heads if run_id in (None, head.run_id)]
    if not wanted:
        runs = ", ".join(sorted({head.run_id for _, head in heads})) or "none"
        wrong, mend = f"has no history of the run {run_id}" if run_id else "has no history", f"runs there: {runs}"
        raise ConfigError(wrong, key="paths", value=" ".join(map(str, paths)), mend=mend)
    named = [(path, head) for path, head in wanted if path in paths]
    first_path, first = named[0] if named else max(wanted, key=lambda it: it[1].started)
    for path, head in named:
        if _run(head) != _run(first):
            raise _another_run(path, head, first_path, first)
    lives: dict[tuple[str, float], Life] = {}
    for path, head in sorted(wanted, key=lambda it: (it[1].started, it[1].peer, it[1].file)):
        if _run(head) == _run(first):
            _add(lives.setdefault((head.peer, head.started), Life(head)), path)
    others = [path.name for path, head in wanted if head.run_id == first.run_id and _run(head) != _run(first)]
    if others:
        log.warning(
            "left out, because they are of other foundings of the run %s: %s", first.run_id, listed(others[::-1], 3)
        )
    return list(lives.values())


def _run(head: Head) -> tuple[str, str, float]:
    return head.run_id, head.founder, head.founded


def _another_run(path: Path, head: Head, first: Path, firsts: Head) -> ConfigError:
    runs = f"the run {head.run_id}", f"the run {firsts.run_id}"
    if head.run_id == firsts.run_id:
        runs = f"another founding of {runs[0]}", "one"
    mend = "give files of one run, or a folder and --run-id NAME"
    return ConfigError(f"is of {runs[0]}, but {first} is of {runs[1]}", key="paths", value=path, mend=mend)


def _heads(paths: Sequence[Path]) -> Iterator[tuple[Path, Head]]:
    """The files with their heads. Of a folder, files that can't be read are left out with a warning: a peer whose disk
    was full leaves an empty one."""
    for path in _files(paths):
        try:
            yield path, _head(path)
        except ConfigError as error:
            if path in paths:
                raise
            log.warning("left out: %s %s", path.name, error.wrong)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted([*path.glob(f"*{SUFFIX}"), *path.glob(f"*/*{SUFFIX}")])
        else:
            yield path


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, up to its end or to the first damage, which is raised as ValueError."""
    stream, rest = zlib.decompressobj(GZIP), b""
    read = unpacked = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            try:
                data = stream.decompress(chunk)
            except zlib.error as error:
                raise ValueError(f"{path.name} is damaged before its end: {error}") from None
            read, unpacked = read + len(chunk), unpacked + len(data)
            if unpacked > LINE_BYTES_MAX // 16 + EXPANSION_MAX * read:
                raise ValueError(f"the content of {path.name} is more than {EXPANSION_MAX} times as long as the file")
            *lines, rest = (rest + data).split(b"\n") if b"\n" in data else [rest + data]
            yield from lines
            if len(rest) > LINE_BYTES_MAX:
                raise ValueError(f"{path.name} has a line of more than {LINE_BYTES_MAX} bytes")


def _head(path: Path) -> Head:
    try:
        return read_head(next(_lines(path), b""))
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        mend = f"name a file or a folder of histories (*{SUFFIX})"
        raise ConfigError(f"is no history: {why}", key="paths", value=path, mend=mend) from None


def _add(life: Life, path: Path) -> None:
    """Add a file's entries to a life. The files of a life are added in order."""
    lines = _lines(path)
    head = read_head(next(lines))
    ahead = head.time - head.now
    if life.entries and head.file != life.last + 1:
        life.gap = life.gap or f"files before {path.name} are missing"
    life.last = head.file
    life.names.update(head.names)
    try:
        for line in lines:
            match read_line(line):
                case Fed(now, event, effects):
                    life.entries.append(Entry(now + ahead, life.peer, event, effects))
                    life.clocks.append(now)
                case Clock(now, wall):
                    ahead = wall - now
                case Name(_, peer, name):
                    life.names[peer] = name
                case End():
                    life.ended = True
    except (msgspec.MsgspecError, RecursionError) as error:
        life.gap = life.gap or f"{path.name} is damaged before its end: {error}"
    except ValueError as error:
        life.gap = life.gap or str(error)


def naming(lives: Iterable[Life]) -> Callable[[str], str]:
    """Make the function that puts the names of peers in place of their ids in a text. Two peers of one name get the
    last letters of their ids, and a peer without a name has only these."""
    lives = list(lives)
    told = {peer: name for life in lives for peer, name in life.names.items()}
    told |= {life.peer: life.head.name for life in lives}
    count = Counter(told.values())
    names = {peer: name if count[name] == 1 else f"{name}-{peer[-LETTERS:]}" for peer, name in told.items()}
    ids = re.compile("|".join([*map(re.escape, sorted(names, key=len, reverse=True)), ID]))
    return lambda text: ids.sub(lambda found: names.get(found[0], f"…{found[0][-LETTERS:]}"), text)


# -- playing again


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of playing a life again. `played`: the number of entries whose effects are the same. `at`: the index
    of the first entry whose effects differ; None: there is none, or the life can't be played. `why`: why it can't be
    played, or how the effects differ; empty if neither."""

    played: int
    at: int | None = None
    why: str = ""


def check(life: Life) -> Verdict:
    """Play a life again, up to the first difference."""
    head = life.head
    if head.file != 1:
        return Verdict(0, None, "its first files are gone, and a replica can't be played from the middle of its life")
    try:
        of = {"role": head.role, "eligible": head.eligible, "incarnation": head.incarnation, "grant": head.grant}
        replica = Replica(head.peer, head.rules, now=head.began, **of)  # type: ignore[arg-type]
    except Exception as error:  # rules that no run has fail in many ways
        return Verdict(0, None, f"it was written by version {head.version}, whose rules differ ({error})")
    for at, (entry, now) in enumerate(zip(life.entries, life.clocks, strict=True)):
        assert not isinstance(entry.what, str), "only simulated worlds have texts for events"
        try:
            replica.next_wakeup()  # as the node asks, before the first event and after each one
            effects = tuple(replica.handle(entry.what, now))
        except Exception as error:  # events that no replica meets break its invariants
            return Verdict(at, at, f"The event can't be played: {error!r}")
        if effects != entry.effects:
            return Verdict(at, at, _difference(entry.effects, effects))
    return Verdict(len(life.entries))


def _difference(recorded: tuple[Effect, ...], played: tuple[Effect, ...]) -> str:
    """Tell the first effect in which the recorded effects and the played ones differ."""
    differ = next(pair for pair in zip_longest(recorded, played) if pair[0] != pair[1])
    was, now = ("nothing" if one is None else tell(one) for one in differ)
    if was == now:  # they differ in a part that isn't told
        was, now = map(repr, differ)
    return f"recorded: {was}; played: {now}"
