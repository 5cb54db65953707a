"""Reads the histories that `node.history` writes, and plays them again: a new replica is told the recorded events, and
its effects are compared with those recorded. An entry is an event and its effects, and both as text.

Law: only reads; any bytes give a history or a reason why they give none. A history may end at any byte, because its
peer may have been killed: all records before that are read. The core reads no clock and draws no numbers, so equal
events lead to equal effects. What a history does not record (payloads, seals, what follows from other fields) is not
compared.

Histories of real peers and of simulated ones are lists of entries, so both are told by the same code. The text has the
names in `core.events` and `core.messages`, as Python writes them, but shorter: a version is `3/b6e5f6`, its epoch and
the first letters of its chain; a contribution is `#0042.3`, the third of an incarnation whose last four digits are
0042. Fields that are empty, or hashes and other details, are left out.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from itertools import zip_longest
from pathlib import Path

from p2p_diloco.core.events import Effect, Event
from p2p_diloco.core.messages import Choice, Summary
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.state import State
from p2p_diloco.core.version import Version
from p2p_diloco.errors import ConfigError, printable, reason
from p2p_diloco.node.history import SUFFIX, Fed, Head, read_line

UNNAMED = {"to", "sender", "peer", "message", "summary", "commit", "kind", "text"}
"""Fields that are told without their names."""
LEFT_OUT = {
    "hash", "hashes", "root", "key", "seal", "payload", "payloads", "digest", "digests", "slices", "means", "mean",
    "owners", "owner", "links", "link", "reachable", "grant", "uses", "samples", "oldest", "incarnation", "buffered",
    "peers", "attempt", "outcome", "turn",
}  # fmt: skip
"""Fields that are not told."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An event with its effects. `what`: the event, or a text for what is no event of a replica, such as a death.
    `time`: in seconds since a moment that all entries of a list share."""

    time: float
    peer: str
    what: Event | str
    effects: tuple[Effect, ...] = ()

    def lines(self) -> Iterator[str]:
        """The entry as text: one line for the event, and one for each effect."""
        yield f"{self.time:9.3f} {self.peer} {tell(self.what)}"
        for effect in self.effects:
            yield f"{self.time:9.3f} {self.peer}     {tell(effect)}"


def tell(value: object) -> str:
    """An event, an effect, a message or a part of one as text."""
    match value:
        case Version(epoch=epoch, chain=chain) | State(version=Version(epoch=epoch, chain=chain)):
            return f"{epoch}/{chain[:6]}"
        case Choice(entries=entries):
            return "[" + ", ".join(f"{peer} {ready.id}" for peer, ready in entries) + "]"
        case Summary(epochs=epochs, idle=idle):
            return f"epochs={tell(epochs)}" + ", idle" * idle
        case tuple():
            return "[" + ", ".join(map(tell, value)) + "]"
        case float():
            return f"{value:.4g}"
        case Enum():
            return str(value.value)
    if not is_dataclass(value) or type(value).__str__ is not object.__str__:
        return str(value)
    told = [(field.name, getattr(value, field.name)) for field in fields(value) if field.name not in LEFT_OUT]
    shown = [(name, it) for name, it in told if it is not False and it not in (None, "", ())]
    return f"{type(value).__name__}({', '.join((name + '=') * (name not in UNNAMED) + tell(it) for name, it in shown)})"


log = logging.getLogger(__name__)

LINE_BYTES_MAX = 2**24
"""The longest line."""
CHUNK, GZIP = 1024, 31
"""Bytes that are read at a time; zlib's name for the form of gzip."""
EXPANSION_MAX = 100
"""A real history is 3 to 30 times as long as its file; a made one can be a thousand times as long."""
ID, LETTERS = r"\b(?:12D3KooW|Qm)[1-9A-HJ-NP-Za-km-z]{44}\b", 6
"""How a peer's id looks, and how many of its last letters are shown."""
UNREADABLE = (OSError, EOFError, zlib.error, ValueError, RecursionError)


@dataclass(slots=True)
class Life:
    """The history of one life of a peer: from its start to its end, or as much of that as there is."""

    head: Head
    """The newest head."""
    first: int
    """The number of the oldest file that there is."""
    entries: list[Entry] = field(default_factory=list)
    """Their times are of the peer's wall clock, in seconds since 1970."""
    clocks: list[float] = field(default_factory=list)
    """For each entry, its time by the replica's clock, in seconds."""
    gap: str = ""
    """Why the history isn't whole: files are missing or damaged. Empty: it is."""

    @property
    def peer(self) -> str:
        """The peer's id."""
        return self.head.peer


def read(paths: Sequence[Path], run_id: str | None = None) -> list[Life]:
    """Read histories of one run. `paths`: files, and folders that have such files in them or one level below. `run_id`:
    the run; None: the newest one there. Files of another run or of another founding of this one are left out.

    Raises:
        ConfigError: there is no history, or a file in `paths` is none.
    """
    heads = dict(_heads(paths))
    wanted = [head for head in heads.values() if run_id in (None, head.run_id)]
    if not wanted:
        runs = ", ".join(sorted({head.run_id for head in heads.values()})) or "none"
        wrong = f"has no history of the run {run_id}" if run_id else "has no history"
        raise ConfigError(wrong, key="paths", value=" ".join(map(str, paths)), mend=f"runs there: {runs}")
    run = max(wanted, key=lambda head: head.started)
    lives: dict[tuple[str, float], Life] = {}
    for path, head in sorted(heads.items(), key=lambda it: (it[1].started, it[1].peer, it[1].file)):
        if (head.run_id, head.founder, head.founded) == (run.run_id, run.founder, run.founded):
            _add(lives.setdefault((head.peer, head.started), Life(head, head.file)), path)
        elif head.run_id == run.run_id or path in paths:
            log.warning("left out: %s is of another run or founding than %s", path.name, run.run_id)
    return list(lives.values())


def _heads(paths: Sequence[Path]) -> Iterator[tuple[Path, Head]]:
    """The files with their first heads. Of a folder, files that can't be read are left out with a warning: a peer whose
    disk was full leaves an empty one."""
    for path in paths:
        for file in [*path.glob(f"*{SUFFIX}"), *path.glob(f"*/*{SUFFIX}")] if path.is_dir() else [path]:
            try:
                head = next(_records(file), None)
                if not isinstance(head, Head):
                    raise ValueError("it does not begin as a history does")
                yield file, head
            except UNREADABLE as error:
                wrong = f"is no history: {reason(error) if isinstance(error, OSError) else error}"
                if file in paths:
                    mend = f"name a file or a folder of histories (*{SUFFIX})"
                    raise ConfigError(wrong, key="paths", value=file, mend=mend) from None
                log.warning("left out: %s %s", file.name, wrong)


def _records(path: Path) -> Iterator[Head | Fed]:
    """The records of a file, up to its end or to the first damage, which is raised as one of UNREADABLE."""
    most = LINE_BYTES_MAX // 16 + EXPANSION_MAX * path.stat().st_size
    stream, rest, read = zlib.decompressobj(GZIP), b"", 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):  # in short pieces: of one with damage nothing is read
            content = stream.decompress(chunk)
            read += len(content)
            if read > most:
                raise ValueError(f"its content is more than {EXPANSION_MAX} times as long as the file")
            *lines, rest = (rest + content).split(b"\n") if b"\n" in content else [rest + content]
            yield from map(read_line, lines)
            if len(rest) > LINE_BYTES_MAX:
                raise ValueError(f"it has a line of more than {LINE_BYTES_MAX} bytes")
    if read and not stream.eof:  # one without content is no history
        raise EOFError


def _add(life: Life, path: Path) -> None:
    """Add a file's records to a life. The files of a life are added in order."""
    file = life.head.file
    try:
        for record in _records(path):
            if isinstance(record, Head):
                life.head = record
            else:
                now, event, effects = record
                life.entries.append(Entry(now + life.head.ahead, life.peer, event, effects))
                life.clocks.append(now)
    except EOFError:  # the peer was killed, or still runs
        pass
    except UNREADABLE as error:
        life.gap = life.gap or f"{path.name} is damaged before its end: {error}"
    if life.head.file > file + 1:
        life.gap = life.gap or f"files before {path.name} are missing"


def naming(lives: Iterable[Life]) -> Callable[[str], str]:
    """Make the function that puts the names of peers in place of their ids in a text. Two peers of one name get the
    last letters of their ids, and a peer without a name has only these."""
    heads = [life.head for life in lives]
    told = {peer: name for head in heads for peer, name in head.names.items()}
    told |= {head.peer: head.name for head in heads}
    count = Counter(told.values())
    names = {peer: name if count[name] == 1 else f"{name}-{peer[-LETTERS:]}" for peer, name in told.items()}
    ids = re.compile("|".join([*map(re.escape, sorted(names, key=len, reverse=True)), ID]))
    return lambda text: printable(ids.sub(lambda found: names.get(found[0], f"…{found[0][-LETTERS:]}"), text))


def check(life: Life) -> tuple[int, str]:
    """Play a life again, up to the first difference. Returns how many events led to the same effects, and why no
    further ones did; empty if all did."""
    head = life.head
    if life.first != 1:
        return 0, "its first files are gone, and a replica can't be played from the middle of its life"
    try:
        of = {"role": head.role, "eligible": head.eligible, "incarnation": head.incarnation, "grant": head.grant}
        replica = Replica(head.peer, head.rules, now=head.began, **of)  # type: ignore[arg-type]
    except Exception as error:  # rules that no run has fail in many ways
        return 0, f"it was written by version {head.version}, whose rules differ ({error})"
    for at, (entry, now) in enumerate(zip(life.entries, life.clocks, strict=True)):
        assert not isinstance(entry.what, str), "only simulated worlds have texts for events"
        try:
            replica.next_wakeup()  # as the node asks, before the first event and after each one
            effects = tuple(replica.handle(entry.what, now))
        except Exception as error:  # events that no replica meets break its invariants
            return at, f"the next one can't be played: {error!r}"
        for was, is_now in zip_longest(entry.effects, effects):
            if was != is_now:
                told = [tell(one) for one in (was, is_now)]
                told = told if told[0] != told[1] else [repr(was), repr(is_now)]  # a part differs that isn't told
                return at, f"the next one has another effect than recorded: {told[0]}; played: {told[1]}"
    return len(life.entries), ""
