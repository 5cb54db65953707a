"""How many inner steps a peer makes between two submissions: dynamic local updates, smoothed.

Law: arithmetic on the speeds of the membership table. Every peer computes its own number at each of its exchanges and
asks no other peer. `schedule.dylu_steps` is the formula; this module smooths its result, so that noise changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .schedule import dylu_steps

READINGS = 9
"""The formula uses the median of the last readings, this many at most: up to four outliers change nothing, and a
lasting change has its effect after five readings."""

STAYS_WITHIN = 0.1
"""The number of steps stays the same while the formula's result differs from it by no more than this share."""


@dataclass(slots=True)
class Pace:
    """One peer's number of inner steps between two submissions. ``base`` is H: the number that the fastest peer makes,
    and that any peer of unknown speed makes."""

    base: int
    steps: int = field(init=False)
    _readings: list[tuple[float, float]] = field(init=False, default_factory=list)  # (own speed, the fastest)

    def __post_init__(self) -> None:
        self.steps = self.base

    def rebase(self, base: int) -> None:
        """Go over to another H, the new ``base``. Until the next reading, this peer's own number of steps is scaled by
        new H / old H."""
        self.base, self.steps = base, max(1, self.steps * base // self.base)

    def adjust(self, speed: float, others: Iterable[float]) -> int:
        """Record a reading of this peer's speed and the other peers' speeds. Return the number of inner steps that this
        peer makes from now on.

        Speeds are in inner steps per second; ≤ 0: unknown. Readings are ordered by own speed / fastest speed, and the
        formula is applied to the median one (of two middle ones, to the lower). If this peer's speed is unknown, the
        readings are dropped and the base is returned.
        """
        if speed <= 0:
            self._readings, self.steps = [], self.base
            return self.steps
        self._readings = [*self._readings, (speed, max([speed, *others]))][-READINGS:]
        by_share = sorted(self._readings, key=lambda reading: reading[0] / reading[1])
        wanted = dylu_steps(*by_share[(len(by_share) - 1) // 2], self.base)
        if len(self._readings) == 1 or abs(wanted - self.steps) > STAYS_WITHIN * self.steps:
            self.steps = wanted
        return self.steps
