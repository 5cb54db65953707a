"""Simulated tensors: sets of inner steps as bit masks, so that every single step can be accounted for.

A unit's θ (`face` says what a unit is) is the set of inner steps that it contains. A pseudo-gradient is the set of
steps that a peer adds. Averaging is the union of disjoint sets, so a step that arrives twice is detected.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b

from p2p_diloco.core.revision import Revision


class Violation(AssertionError):
    """An invariant was broken. Its letter is that of docs/testing.md."""


def require(holds: bool, law: str, what: str) -> None:
    """Raise Violation with the invariant's letter ``law`` and the text ``what``, unless the condition holds."""
    if not holds:
        raise Violation(f"({law}) {what}")


@dataclass(frozen=True, slots=True)
class Tensors:
    """One unit's outer state: its inner steps, and a hash chain over all commits in place of the momentum."""

    steps: int = 0
    chain: bytes = b""

    def digest(self, meta: bytes) -> str:
        """Return the digest of these tensors and ``meta``."""
        return blake2b(self.chain + meta, digest_size=8).hexdigest()

    def step(self, mean: tuple[tuple[str, int], ...]) -> Tensors:
        """Return the tensors after the outer step with ``mean``. A mean is a sequence of (peer, inner steps of this
        peer)."""
        steps, chain = self.steps, blake2b(self.chain, digest_size=8)
        for peer, added in mean:
            require(not steps & added, "c", f"{peer}'s steps {bin(steps & added)} are counted twice")
            steps |= added
            chain.update(f"{peer}:{added:x};".encode())
        return Tensors(steps, chain.digest())

    def rated(self, revision: Revision) -> Tensors:
        """Return the same tensors with the rates of ``revision`` added to the hash chain, so that an outer step with
        other rates leads to another digest."""
        if revision.rates is None:
            return self
        return replace(self, chain=blake2b(self.chain + repr(revision.rates).encode(), digest_size=8).digest())


class Fate(Enum):
    """What a merge does with a trainer's local progress in one unit."""

    KEEP = "keep"  # all stays
    COUNTED = "counted"  # what was sent is in the new version
    DROPPED = "dropped"  # nothing stays


@dataclass(slots=True, eq=False)
class Trainer:
    """One incarnation of a trainer: its local parameters, and which of its inner steps were sent, counted or
    dropped."""

    units: int
    base: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    delta: list[int] = field(default_factory=list)  # the last contribution, per unit
    taken: int = 0  # all inner steps of this incarnation
    dropped: list[int] = field(default_factory=list)  # dropped by rule, per unit
    since_sending: int = 0
    since: dict[int, int] = field(default_factory=dict)  # steps since each fragment's last contribution
    loaded: bool = False

    def __post_init__(self) -> None:
        zeros = [0] * self.units
        self.base, self.local, self.delta, self.dropped = zeros[:], zeros[:], zeros[:], zeros[:]

    def step(self, bit: int) -> None:
        """Make one inner step. ``bit`` is the bit that stands for this step in all bit masks."""
        self.taken |= bit
        self.local = [steps | bit for steps in self.local]
        self.since_sending += 1

    def merge(self, unit: int, new: int, fate: Fate) -> None:
        """Merge a newer global value of a unit. ``fate`` says what happens to the local progress."""
        base, progress, delta = self.base[unit], self.pending(unit), self.delta[unit]
        lost = base & self.taken & ~new  # this trainer's steps that the old lineage counted and the new one does not
        match fate:
            case Fate.COUNTED:
                require(delta & ~progress == 0, "f", "the subtracted contribution is not in the local progress")
                progress &= ~delta
            case Fate.DROPPED:
                lost |= progress & ~new
                progress = 0
        require(not progress & new, "c", f"unit {unit}: carried progress is counted already ({fate})")
        self.dropped[unit] |= lost & ~progress
        self.dropped[unit] &= ~new
        self.base[unit], self.local[unit] = new, new | progress

    def afresh(self) -> None:
        """Drop all local progress: replace the local values by the global ones that were merged last."""
        for unit in range(self.units):
            self.dropped[unit] |= self.pending(unit)
            self.local[unit], self.delta[unit] = self.base[unit], 0

    def pending(self, unit: int) -> int:
        """Return the unit's local progress: the steps that its base does not contain."""
        return self.local[unit] & ~self.base[unit]
