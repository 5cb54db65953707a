"""How many inner steps a peer makes between two submissions: dynamic local updates, smoothed.

Law: arithmetic on the speeds of the membership table. Every peer computes its own number, at each of its exchanges, and
asks no other. The formula is `schedule.dylu_steps`; here is what keeps its result from following every noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .schedule import dylu_steps

READINGS = 9
"""Readings of which the middle one counts: four wrong ones change nothing; what lasts is followed after five."""

STAYS_WITHIN = 0.1
"""The number stays while the formula's differs from it by no more than this share: then it is noise, or of no use."""


@dataclass(slots=True)
class Pace:
    """One peer's number of inner steps. ``base``: H, what a peer of unknown speed makes, and the fastest one."""

    base: int
    steps: int = field(init=False)
    _readings: list[tuple[float, float]] = field(init=False, default_factory=list)  # (own speed, the fastest)

    def __post_init__(self) -> None:
        self.steps = self.base

    def adjust(self, speed: float, others: Iterable[float]) -> int:
        """The number from now on, after a reading of the table. speeds in inner steps per second; ≤ 0: unknown.

        The readings are ordered by own speed / fastest, and the formula is applied to the middle one (of an even number
        the lower of the two). Of an unknown speed of its own nothing is learnt: the base, and no readings.
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
