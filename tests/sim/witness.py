"""Invariants of the asynchronous mode, checked in every asynchronous run on the effects that replicas return.

Law: this module sees what replicas compute and what they accept, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from p2p_diloco.core.events import Apply, Average, Carry, Fill, Loaded
from p2p_diloco.core.lending import is_empty, submissions
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.shard import ShardLog
from p2p_diloco.core.state import grown_from
from p2p_diloco.core.version import Version

from .model import require

if TYPE_CHECKING:
    from .process import Process


class Witness:
    """Checks that asynchronous mode counts no outdated submission (i), tracks the Delayed Nesterov buffer (j), and
    keeps one lineage (k). ``one_line``: whether only one lineage may exist."""

    def __init__(self, rules: Rules, one_line: bool) -> None:
        self.rules = rules
        # true if no peer is cut off, and at most as many die at a time as there are successors
        self.one_line = one_line
        self.begun: list[list[Version | None]] = []  # by inner step and shard: the version that the step was made on
        self.bases: dict[tuple[int, int], Version] = {}  # (id of a trainer, shard) → the version last merged
        self.filled: dict[tuple[int, str], int] = {}  # (shard, digest) → submissions in the Delayed Nesterov buffer
        self.epochs: dict[tuple[int, int], Version] = {}  # (shard, epoch) → its only version
        self.authors: dict[tuple[int, str], str] = {}  # (shard, digest) → the peer whose outer step led to it
        self.holders: dict[tuple[int, str], list[Process]] = {}  # (shard, digest) → the processes that accepted it
        self.successors: dict[tuple[int, str], set[str]] = {}  # (shard, digest) → those that had to hold it, if live
        self.alone: set[tuple[int, str]] = set()  # (shard, digest) of versions made when no successor was there
        self.counts: dict[tuple[int, str], int] = {}  # (shard, digest) → the inner steps that its commit counts
        self.gone: Counter[int] = Counter()  # by shard: the inner steps that died with an unconfirmed version

    def stepped(self, process: Process) -> None:
        """Record that a trainer has made an inner step, and on which versions."""
        self.begun.append([carried.base for carried in process.replica.own.carried])

    def merges(self, process: Process, loaded: Loaded) -> None:
        """Record that a trainer merges a newer state. Steps that it made during its exchange now count as made on the
        new version. After a change of lineage, all its uncounted steps do, because the new lineage lacks the versions
        that they were made on."""
        shard, trainer = loaded.shard, process.trainer
        before = self.bases.get((id(trainer), shard))
        left = before is not None and not grown_from(process.replica.logs[shard].state, before)
        self.bases[id(trainer), shard] = loaded.version
        for step in bits(trainer.pending(shard)) if left or loaded.carry is Carry.SUBTRACT else ():
            self.begun[step][shard] = loaded.version

    def averages(self, log: ShardLog, work: Average, digest: str) -> None:
        """Check the submissions that an outer step counts: their bases (invariant i) and their number (invariant j).
        ``digest``: the digest to which the step leads."""
        if not self.rules.asynchronous:
            return
        self.one_line = self.one_line and work.held is not None  # a commit of damaged tensors may make a fork
        most = self.rules.max_staleness
        for peer, c in work.contributions:
            ours = log.relation(c.base) in ("equal", "ancestor")
            require(ours, "i", f"a submission of {peer} on another lineage ({c.base}) is counted")
            behind = work.base.epoch - c.base.epoch
            require(
                most is None or behind <= most,
                "i",
                f"a submission of {peer} is counted though it is {behind} epochs behind",
            )
            for step in bits(c.payload):
                began = self.begun[step][log.shard]
                history = {} if log.state is None else log.state.history
                here = began is not None and history.get(began.epoch) == began.digest
                fresh = here and began is not None and c.base.epoch > began.epoch
                require(not fresh, "i", f"{peer} says that its work began at {c.base}, but it began at {began}")
        counted = sum(not is_empty(c) for _, c in work.contributions)
        self._steps(log.shard, work.base, counted, work.buffered, digest)
        self.authors[log.shard, digest] = log.me
        assert log.state is not None
        assert log.round.draft is not None
        successors = {*log.state.plan.succession, *log.round.draft.plan.succession} - {log.me}
        self.successors[log.shard, digest] = successors
        self.counts[log.shard, digest] = sum(c.payload for _, c in work.contributions if not is_empty(c))

    def applies(self, work: Apply) -> None:
        """Called when a peer applies another peer's commit. Check the number of buffered submissions that the peer
        names (invariant j)."""
        commit = work.commit
        counted = submissions(commit)
        self._steps(commit.shard, commit.base, counted, work.buffered, commit.version.digest)

    def fills(self, work: Fill) -> None:
        """Called when a peer loads a fetched state. Check the number of buffered submissions that the state names
        (invariant j)."""
        state = work.state
        told = self.filled.get((state.shard, state.version.digest), 0)
        require(
            state.buffered == told,
            "j",
            f"a state names {state.buffered} submissions in the buffer, but there are {told}",
        )

    def accepts(self, process: Process, shard: int, version: Version, alive: Collection[Process], now: float) -> None:
        """Called when a peer makes this version its present state. Check that the shard has only one version at each
        epoch (invariant k)."""
        if not self.rules.asynchronous:
            return
        key = shard, version.digest
        awake = {p.name for p in alive if p.frozen_until <= now}
        if process.name == self.authors.get(key) and not awake & self.successors[key]:
            self.alone.add(key)
        known = self.epochs.setdefault((shard, version.epoch), version)
        self.holders.setdefault((shard, version.digest), []).append(process)
        if known != version and self._died_unconfirmed(shard, known, alive):
            self.gone[shard] |= self.counts.get((shard, known.digest), 0)
            self.one_line = False  # its holders may come back with it
            self.epochs[shard, version.epoch] = known = version
        require(
            not self.one_line or known == version,
            "k",
            f"shard {shard}: two versions of one epoch, {known} and {version}",
        )

    def _died_unconfirmed(self, shard: int, version: Version, alive: Collection[Process]) -> bool:
        """Whether every peer that held a version is dead and the version was never confirmed: its author died before
        all successors held it, or made it when no successor was live and awake. Then no live peer knows of the version,
        no live trainer was told that it counts, and the next commit makes another version of its epoch."""
        key = shard, version.digest
        confirmed = key not in self.alone and self.authors.get(key) in {holder.name for holder in self.holders[key]}
        return not confirmed and not any(holder in alive for holder in self.holders[key])

    def ended(self, steps: Counter[str], happened: Counter[str]) -> None:
        """Check at the end that there was no fork, and that inner steps were dropped only if a submission was refused
        as too stale (invariant k)."""
        if self.one_line:
            require(not happened["note fork"], "k", "the lineage has forked")
            lost = steps["dropped"] and not happened["note stale"] and not happened["conflict"]
            require(
                not lost, "k", f"{steps['dropped']} inner steps were dropped, though nothing was refused as too stale"
            )

    def _steps(self, shard: int, base: Version, counted: int, told: int, digest: str) -> None:
        """Check how many submissions the buffer held before a commit, and that the commit added no more than fit
        (invariant j). ``told``: the number before the commit, as the replica names it."""
        size = self.rules.dn_buffer_size
        before = self.filled.get((shard, base.digest), 0)
        require(
            told == before,
            "j",
            f"shard {shard}: a commit names {told} submissions in the buffer, but there are {before}",
        )
        after = before + counted if size > 1 else 0
        require(after <= max(size, 0), "j", f"shard {shard}: a window exceeds the buffer by {after - size}")
        self.filled[shard, digest] = after % size if size > 1 else 0


def bits(steps: int) -> Iterator[int]:
    """Yield the number of each bit that is set."""
    while steps:
        lowest = steps & -steps
        yield lowest.bit_length() - 1
        steps ^= lowest
