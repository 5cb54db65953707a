"""Revisions: a run's outer learning rate and momentum, changed while the run goes on.

Law: plain ordered data. Each commit names the revision of its outer step; along a lineage the revision never falls. A
peer tells other peers the highest revision that it knows, and writes no commit at a lower one. The founder's signature
is checked before a revision reaches the core.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite


@dataclass(frozen=True, slots=True, order=True)
class Revision:
    """The number of a revision and its rates. Revision 0 stands for the rates of the run's settings; its other fields
    are ignored.

    If two revisions have the same number, the one with greater rates wins, so that all peers agree. proof: the
    founder's signature, ignored in comparisons.
    """

    number: int = 0
    outer_lr: float = 0.0
    outer_momentum: float = 0.0
    proof: str = field(compare=False, repr=False, default="")

    @property
    def rates(self) -> tuple[float, float] | None:
        """The rates (outer_lr, outer_momentum) of this revision; None for revision 0, which uses the run's settings."""
        return (self.outer_lr, self.outer_momentum) if self.number else None

    @property
    def sound(self) -> bool:
        """Whether the number and the rates are valid."""
        return self.number >= 0 and self.outer_lr >= 0 and isfinite(self.outer_lr) and 0 <= self.outer_momentum < 1

    def __str__(self) -> str:
        if not self.number:
            return "revision 0 (as founded)"
        return f"revision {self.number} (outer_lr={self.outer_lr:g}, outer_momentum={self.outer_momentum:g})"


FOUNDED = Revision()
"""The revision with which a run begins: it uses the rates of the run's settings."""
