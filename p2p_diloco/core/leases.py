"""Which positions of a data set are used, leased, freed or not given to any peer yet: a table in the first fragment's
state.

Law: pure functions. A table changes only by `after`, with each commit of the first fragment. All replicas compute the
same change from the commit. In every table the positions below ``next`` are the disjoint union of the used, the leased
and the freed ones. So two counted contributions never have a position in common.

A data set of N samples is an endless line of positions 0, 1, 2, ...: position x is in epoch x // N of the data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from .spans import Span, Spans, joined, length, minus, sound, taken, union, within

WEIGHT_MIN = 2.0**-40
"""The weight of an empty contribution: its author has trained nothing since its last one. A commit that counts only
empty contributions changes no tensor."""

TABLES_MAX, ENTRIES_MAX, SPANS_MAX = 4, 1024, 256
"""TABLES_MAX: the most data sets of a run. ENTRIES_MAX: once a table has this many leases and freed ranges, no new
positions are leased, and no contribution may add to their number. SPANS_MAX: the most spans of a `Use`; a peer holds at
most half as many, so that what it holds and what was freed from it fit into one `Use`."""
LENGTH_MAX, EPOCHS_MAX, WANTS_MAX, POSITION_MAX = 2**40, 2**20, 2**32, 2**61
"""The highest values: samples of a data set, its epochs, the positions that a peer wants, and a position."""
SPARE = 2
"""For this many commits a freed range is granted only if nothing else is left. So a peer that was found dead by mistake
has this long to return without a loss."""
UNUSUAL = 32
"""A peer may hold at most this many times the median of what the other peers want or hold. More would let a peer that
lies about its wants hold most of the data."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """What the peers of a run must agree on. ``length``: the number of samples. ``epochs``: how often each sample is
    used; 0: without end. ``fingerprint``: a text that is equal for equal samples."""

    name: str
    length: int
    epochs: int = 0
    fingerprint: str = ""

    @property
    def end(self) -> int | None:
        """The first position that belongs to no epoch; None if there is no end."""
        return self.epochs * self.length or None


@dataclass(frozen=True, slots=True)
class Lease:
    """A range that one life of a peer may use, or could use until it was freed. ``life``: the random bits of its
    incarnation. ``since``: the epoch of the first fragment at which the range was granted, last renewed, or freed."""

    peer: str
    life: int
    start: int
    stop: int
    since: int

    @property
    def span(self) -> Span:
        """The range."""
        return self.start, self.stop


@dataclass(frozen=True, slots=True)
class Table:
    """The positions of one data set. ``next``: the first that no peer has had yet. ``leases``: those that a peer may
    use. ``freed``: those that a peer has had and not used, with their last holder. All others below ``next`` are
    used."""

    data: DataSet
    next: int = 0
    leases: tuple[Lease, ...] = ()
    freed: tuple[Lease, ...] = ()


@dataclass(frozen=True, slots=True)
class Use:
    """A part of a contribution to the first fragment: the positions whose samples the pseudo-gradient contains, and how
    many positions its author wants to hold."""

    data: DataSet
    used: Spans
    wants: int


Tables = tuple[Table, ...]
"""At most one table for each name, sorted by name."""
Claim = tuple[str, int, tuple[Use, ...]]
"""(peer, life, uses) of a counted contribution; ``peer`` is its author."""


# -- questions


def of(tables: Tables, name: str) -> Table | None:
    """Return the table of the data set with this name; None if there is none."""
    return next((table for table in tables if table.data.name == name), None)


def held(table: Table | None, peer: str, life: int) -> Spans:
    """Return the positions that are leased to this life of a peer."""
    return _of(() if table is None else table.leases, peer, life)


def claimable(table: Table | None, peer: str, life: int) -> Spans:
    """Return the positions that a commit may count as used by this life of a peer: those leased to it, and those freed
    from it and not leased since."""
    return union(held(table, peer, life), _of(() if table is None else table.freed, peer, life))


def used(table: Table) -> Spans:
    """Return the positions that are used."""
    return minus(((0, table.next),) if table.next else (), _all((*table.leases, *table.freed)))


def leased(table: Table) -> int:
    """Return how many positions are leased."""
    return length(lease.span for lease in table.leases)


def freed(table: Table) -> int:
    """Return how many positions were freed and not leased since."""
    return length(lease.span for lease in table.freed)


def lowest(table: Table) -> int:
    """Return the lowest position that is not used."""
    return min((lease.start for lease in (*table.leases, *table.freed)), default=table.next)


def ungranted(table: Table) -> int | None:
    """Return how many positions have not been given to any peer yet; None if there is no end."""
    return None if table.data.end is None else table.data.end - table.next


def complete(table: Table | None) -> bool:
    """Whether all positions of all epochs are used."""
    return table is not None and not ungranted(table) and table.data.end is not None and lowest(table) == table.next


def holders(tables: Tables) -> set[str]:
    """Return the peers with a lease."""
    return {lease.peer for table in tables for lease in table.leases}


def short(tables: Tables) -> bool:
    """Whether a data set has no positions left to grant, though some are still leased."""
    return any(ungranted(table) == 0 and not table.freed and table.leases for table in tables)


def objection(tables: Tables, peer: str, life: int, uses: Sequence[Use]) -> str:
    """Return why no commit may count a contribution with these uses on these tables; empty if one may."""
    if len({use.data.name for use in uses}) < len(uses):
        return "it names a data set twice"
    for use in uses:
        data, table = use.data, of(tables, use.data.name)
        if not data.length or not sound(use.used):
            return f"its numbers of the data set {data.name!r} are out of range"
        if use.used and (table is None or table.data != data):
            return f"the run has no data set {data.name!r} of this length, with these epochs and this fingerprint"
        mine = claimable(table, peer, life)
        if not within(use.used, mine):
            return f"positions of the data set {data.name!r} are not leased to it"
        parts = len(minus(mine, use.used)) - len(mine)  # an honest peer uses the lowest positions first, and adds none
        if table is not None and parts > 0 and len(table.leases) + len(table.freed) + parts > ENTRIES_MAX:
            return f"the table of the data set {data.name!r} would have too many parts"
    return ""


def fault(tables: Tables) -> str:
    """Return why these can't be a state's tables; empty if they can."""
    names = [table.data.name for table in tables]
    if names != sorted(set(names)):
        return "its data sets are not sorted"
    for table in tables:
        entries, data = (*table.leases, *table.freed), table.data
        numbers = data.length and (data.end is None or table.next <= data.end)
        ranges = all(e.start < e.stop <= table.next for e in entries)
        if not numbers or not ranges or length(e.span for e in entries) != length(_all(entries)):
            return f"the table of the data set {data.name!r} is not sound"
    return ""


# -- what a commit changes


def after(tables: Tables, claims: Sequence[Claim], gone: Collection[str], epoch: int, recall: int) -> Tables:
    """Return the tables after a commit. ``claims``: one for each contribution that the commit counts; `objection` must
    be empty for each. ``gone``: the peers whose leases the commit's author frees. ``epoch``: that of the new version.
    ``recall``: after more than this many commits, the lease of a peer that has used none of it is freed."""
    return tuple(_after(table, claims, gone, epoch, recall) for table in _opened(tables, claims))


def _opened(tables: Tables, claims: Sequence[Claim]) -> Tables:
    """Return the tables with those of new data sets. If two contributions describe a data set differently, the first
    description counts."""
    found = {table.data.name: table for table in tables}
    for _, _, uses in claims:
        for use in uses:
            if len(found) < TABLES_MAX:
                found.setdefault(use.data.name, Table(use.data))
    return tuple(found[name] for name in sorted(found))


def _after(table: Table, claims: Sequence[Claim], gone: Collection[str], epoch: int, recall: int) -> Table:
    asks = [(peer, life, use) for peer, life, uses in claims for use in uses if use.data == table.data]
    table = _marked(table, asks, epoch)
    table = _released(table, {peer: life for peer, life, _ in claims}, gone, epoch, recall)
    table = _granted(table, [ask for ask in asks if ask[0] not in gone], epoch)
    return replace(table, leases=_tidy(table.leases), freed=_tidy(table.freed))


def _marked(table: Table, asks: Sequence[tuple[str, int, Use]], epoch: int) -> Table:
    """Mark positions as used by removing them from the leases and freed ranges. If a peer used some, its other leases
    are renewed."""
    leases, freed = table.leases, table.freed
    for peer, life, use in asks:
        if not use.used:
            continue
        leases = _without(leases, use.used, (peer, life))
        freed = _without(freed, use.used, (peer, life))
        leases = tuple(replace(e, since=epoch) if (e.peer, e.life) == (peer, life) else e for e in leases)
    return replace(table, leases=leases, freed=freed)


def _released(table: Table, lives: dict[str, int], gone: Collection[str], epoch: int, recall: int) -> Table:
    """Free the leases of peers that are gone, of earlier lives of the contributors, and of peers that used none of
    theirs for ``recall`` commits."""

    def stays(lease: Lease) -> bool:
        returned = lives.get(lease.peer, lease.life) != lease.life
        return not (returned or epoch - lease.since > recall or lease.peer in gone)

    left = tuple(replace(lease, since=epoch) for lease in table.leases if not stays(lease))
    return replace(table, leases=tuple(filter(stays, table.leases)), freed=(*table.freed, *left))


def _granted(table: Table, asks: Sequence[tuple[str, int, Use]], epoch: int) -> Table:
    """Grant positions to the contributors: those that have been free for `SPARE` commits and new ones, the lowest
    first; if there are none of these, any freed ones. If too few are left for all, each contributor gets at most an
    equal part."""
    needs = []
    for peer, life, use in asks:
        lacks = min(use.wants, _most(table, asks, peer)) - length(held(table, peer, life))
        if lacks > 0:
            needs.append((peer, life, lacks))
    old = _all(e for e in table.freed if epoch - e.since >= SPARE)
    fresh = ungranted(table)
    fresh = POSITION_MAX - table.next if fresh is None else fresh
    if len(table.leases) + len(table.freed) >= ENTRIES_MAX:
        fresh = 0
    pool = union(old, ((table.next, table.next + fresh),) if fresh > 0 else ()) or _all(table.freed)
    if needs and sum(lacks for *_, lacks in needs) > (left := length(pool)):
        part = -(-left // len(needs))
        needs = [(peer, life, min(lacks, part)) for peer, life, lacks in needs]
    granted: list[Lease] = []
    for peer, life, lacks in needs:
        spans = taken(pool, lacks)[0][: max(0, SPANS_MAX // 2 - len(held(table, peer, life)))]
        pool = minus(pool, spans)
        granted += [Lease(peer, life, start, stop, epoch) for start, stop in spans]
    given = _all(granted)
    reach = max([table.next, *(lease.stop for lease in granted)])
    return replace(table, next=reach, leases=(*table.leases, *granted), freed=_without(table.freed, given))


def _most(table: Table, asks: Sequence[tuple[str, int, Use]], peer: str) -> int:
    """Return how many positions a peer may hold, judged by what the other peers want or hold."""
    holding: dict[str, int] = {}
    for lease in table.leases:
        holding[lease.peer] = holding.get(lease.peer, 0) + lease.stop - lease.start
    usual = holding | {other: max(use.wants, holding.get(other, 0)) for other, _, use in asks}
    others = [count for other, count in usual.items() if other != peer and count]
    return UNUSUAL * int(median(others)) if others else WANTS_MAX


def _of(entries: Iterable[Lease], peer: str, life: int) -> Spans:
    return joined(e.span for e in entries if (e.peer, e.life) == (peer, life))


def _all(entries: Iterable[Lease]) -> Spans:
    return joined(e.span for e in entries)


def _without(entries: Iterable[Lease], spans: Spans, holder: tuple[str, int] | None = None) -> tuple[Lease, ...]:
    """Return the entries (of one holder, if given) without these positions."""
    left: list[Lease] = []
    for e in entries:
        if holder is not None and (e.peer, e.life) != holder:
            left.append(e)
            continue
        left += [replace(e, start=start, stop=stop) for start, stop in minus((e.span,), spans)]
    return tuple(left)


def _tidy(entries: Iterable[Lease]) -> tuple[Lease, ...]:
    """Return the entries sorted by position. Adjacent entries that differ in nothing but their ranges are joined."""
    found: list[Lease] = []
    for e in sorted(entries, key=lambda e: e.start):
        if found and replace(found[-1], start=e.start, stop=e.stop) == e and found[-1].stop == e.start:
            found[-1] = replace(found[-1], stop=e.stop)
        else:
            found.append(e)
    return tuple(found)


# -- at a trainer


@dataclass(slots=True)
class DataUse:
    """One trainer's positions of one data set. ``pending``: exactly those whose samples are in its local progress of
    the first fragment and not in the version that it merged last, so a merge does with them what it does with the
    progress. ``sent``: those in its last contribution. ``wants``: how many positions it wants to hold. What it may
    train on next is computed, so a position that leaves the progress without being counted is in the stock again at
    once."""

    data: DataSet
    me: str
    life: int
    wants: int = 0
    pending: Spans = ()
    sent: Spans = ()

    def stepped(self, spans: Spans) -> None:
        """Record positions whose samples the trainer has trained on."""
        self.pending = union(self.pending, spans)

    def send(self) -> Use:
        """Return the `Use` for a contribution to the first fragment, and record that it is sent now."""
        self.sent = self.pending
        return Use(self.data, self.pending, self.wants)

    def count(self) -> None:
        """Record that the last contribution is counted in the version that is merged."""
        self.pending = minus(self.pending, self.sent)

    def keep_sent(self) -> None:
        """Record that only the last contribution's progress stays, because other progress is not known."""
        self.pending = self.sent

    def drop(self) -> None:
        """Record that all progress of the first fragment is dropped."""
        self.pending = self.sent = ()

    def conflicts(self, tables: Tables) -> bool:
        """Whether no commit on these tables may count the pending positions, because one of them is used, or leased to
        another peer now. All local progress must then be dropped."""
        return not within(self.pending, claimable(self.table(tables), self.me, self.life))

    def stock(self, tables: Tables) -> Spans:
        """Return the positions that the trainer may train on next."""
        return minus(held(self.table(tables), self.me, self.life), self.pending)

    def table(self, tables: Tables) -> Table | None:
        """Return the table of this data set; None if there is none of this name, or the one of this name is of a
        different data set."""
        table = of(tables, self.data.name)
        return table if table is not None and table.data == self.data else None
