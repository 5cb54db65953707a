"""Revisions: the outer learning rate and momentum of a run, changed while it goes on.

Law: plain ordered data. A shard's log is at one revision. Each commit names the revision of its outer step; along a
lineage it never falls. A peer tells others the highest revision it knows and writes no commit with a lesser one. The
founder's signature is checked before a revision reaches the core.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite


@dataclass(frozen=True, slots=True, order=True)
class Revision:
    """The number of a revision and its rates. Number 0: as the run was founded, whatever the other fields hold. Of two
    with one number the greater values win, so that all peers agree. proof: the founder's signature, not compared."""

    number: int = 0
    outer_lr: float = 0.0
    outer_momentum: float = 0.0
    proof: str = field(compare=False, repr=False, default="")

    @property
    def rates(self) -> tuple[float, float] | None:
        """(outer_lr, outer_momentum) of an outer step; None: those of the run's settings."""
        return (self.outer_lr, self.outer_momentum) if self.number else None

    @property
    def sound(self) -> bool:
        """Whether an outer step can be taken with these rates."""
        return self.number >= 0 and self.outer_lr >= 0 and isfinite(self.outer_lr) and 0 <= self.outer_momentum < 1

    def __str__(self) -> str:
        if not self.number:
            return "revision 0 (as founded)"
        return f"revision {self.number} (outer_lr={self.outer_lr:g}, outer_momentum={self.outer_momentum:g})"


FOUNDED = Revision()
"""The revision that a run begins with: the rates of its settings."""
