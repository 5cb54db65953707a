"""Invariants of the asynchronous mode, checked in every asynchronous run on the outer steps that replicas take.

Law: this module sees what replicas compute and what they accept, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import Version

from .model import Fate, Trainer, require

if TYPE_CHECKING:
    from .face import Merged, Step
    from .process import Process

Of = tuple[int, Version]
"""A version of a unit."""


class Witness:
    """Checks that asynchronous mode counts no outdated submission (i), tracks the Delayed Nesterov buffer (j), and
    keeps one lineage (k). ``one_line``: whether only one lineage may exist."""

    def __init__(self, rules: Rules, one_line: bool) -> None:
        self.rules = rules
        # true if no peer is cut off, and at most as many die at a time as there are successors
        self.one_line = one_line
        self.begun: list[dict[int, Version]] = []  # by inner step and unit: the version that the step was made on
        self.bases: dict[Trainer, dict[int, Version]] = {}  # by unit: the version last merged
        self.filled: dict[Of, int] = {}  # submissions in the Delayed Nesterov buffer
        self.epochs: dict[tuple[int, int], Version] = {}  # (unit, epoch) → its only version
        self.authors: dict[Of, str] = {}  # the peer whose outer step led to it
        self.holders: dict[Of, list[Process]] = {}  # the processes that accepted it
        self.successors: dict[Of, set[str]] = {}  # those that had to hold it, if live
        self.alone: set[Of] = set()  # versions made when no successor was there
        self.counts: dict[Of, int] = {}  # the inner steps that its commit counts
        self.gone: Counter[int] = Counter()  # by unit: the inner steps that died with an unconfirmed version

    def stepped(self, process: Process) -> None:
        """Record that a trainer has made an inner step, and on which versions."""
        self.begun.append({**self.bases.get(process.trainer, {})})

    def merges(self, process: Process, one: Merged) -> None:
        """Record that a trainer merges a newer state. Steps that it made during its exchange now count as made on the
        new version."""
        unit, trainer = one.unit, process.trainer
        self.bases.setdefault(trainer, {})[unit] = one.version
        for step in bits(trainer.pending(unit)) if one.fate is Fate.COUNTED else ():
            self.begun[step][unit] = one.version

    def drafted(self, process: Process, step: Step) -> None:
        """Check the submissions that an outer step counts: their bases (invariant i) and their number (invariant j)."""
        if not self.rules.asynchronous:
            return
        most, replica, unit = self.rules.max_staleness, process.replica, step.unit
        for peer, base, steps, _ in step.counted:
            ours = replica.relation(unit, base) in ("equal", "ancestor")
            require(ours, "i", f"a submission of {peer} on another lineage ({base}) is counted")
            behind = step.base.epoch - base.epoch
            late = f"a submission of {peer} is counted though it is {behind} epochs behind"
            require(most is None or behind <= most, "i", late)
            for number in bits(steps):
                began = self.begun[number].get(unit)
                fresh = began is not None and replica.remembers(unit, began) and base.epoch > began.epoch
                require(not fresh, "i", f"{peer} says that its work began at {base}, but it began at {began}")
        submitted = [steps for _, _, steps, empty in step.counted if not empty]
        self.buffers(unit, step.base, step.version, len(submitted), step.buffered)
        key = unit, step.version
        self.authors[key], self.counts[key] = process.name, sum(submitted)
        self.successors[key] = {*replica.of(unit).plan.succession, *step.line} - {process.name}

    def fills(self, unit: int, version: Version, buffered: int) -> None:
        """Called when a peer loads a fetched state. Check the number of buffered submissions that the state names
        (invariant j)."""
        told = self.filled.get((unit, version), 0)
        text = f"a state names {buffered} submissions in the buffer, but there are {told}"
        require(buffered == told, "j", text)

    def accepts(self, process: Process, unit: int, version: Version, alive: Collection[Process], now: float) -> None:
        """Called when a peer makes this version its present state. Check that the unit has only one version at each
        epoch (invariant k)."""
        if not self.rules.asynchronous:
            return
        key = unit, version
        awake = {p.name for p in alive if p.frozen_until <= now}
        if process.name == self.authors.get(key) and not awake & self.successors[key]:
            self.alone.add(key)
        known = self.epochs.setdefault((unit, version.epoch), version)
        self.holders.setdefault(key, []).append(process)
        if known != version and self._died_unconfirmed(unit, known, alive):
            self.gone[unit] |= self.counts.get((unit, known), 0)
            self.one_line = False  # its holders may come back with it
            self.epochs[unit, version.epoch] = known = version
        forked = f"unit {unit}: two versions of one epoch, {known} and {version}"
        require(not self.one_line or known == version, "k", forked)

    def _died_unconfirmed(self, unit: int, version: Version, alive: Collection[Process]) -> bool:
        """Whether every peer that held a version is dead and the version was never confirmed: its author died before
        all successors held it, or made it when no successor was live and awake. Then no live peer knows of the version,
        no live trainer was told that it counts, and the next commit makes another version of its epoch."""
        key = unit, version
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

    def buffers(self, unit: int, base: Version, version: Version, counted: int, told: int) -> None:
        """Called when a peer drafts or applies the commit from ``base`` to ``version``, which counts this many
        submissions. Check how many the buffer held before it, and that the commit added no more than fit (invariant j).
        ``told``: the number before the commit, as the replica names it."""
        size = self.rules.dn_buffer_size
        before = self.filled.get((unit, base), 0)
        text = f"unit {unit}: a commit names {told} submissions in the buffer, but there are {before}"
        require(told == before, "j", text)
        after = before + counted if size > 1 else 0
        require(after <= max(size, 0), "j", f"unit {unit}: a window exceeds the buffer by {after - size}")
        self.filled[unit, version] = after % size if size > 1 else 0


def bits(steps: int) -> Iterator[int]:
    """Yield the number of each bit that is set."""
    while steps:
        lowest = steps & -steps
        yield lowest.bit_length() - 1
        steps ^= lowest
