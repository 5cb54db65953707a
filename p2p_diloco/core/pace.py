"""How many inner steps a peer makes in a round: by time, or by dynamic local updates (`Pace`).

Law: arithmetic on what peers tell about themselves and on elapsed time; no clock is read and no peer is asked.

With pace="time" a round is planned so that all contributions arrive together. Let v_p be the inner steps a second of
peer p, and x_p the seconds that its link takes to receive the mean and send the contribution. A contribution of H steps
of peer p arrives
    H / v_p + x_p
after the commit that begins the round. T is the lowest of these times, that of the fastest peer. So peer w trains for
    T - x_w
and makes about (T - x_w) v_w steps: at least one, at most H. The number is not fixed: before each step the peer
predicts when that step would end (`is_over`), so it makes up for a slow step within the same round.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .messages import Summary
from .plan import filled
from .schedule import dylu_steps

SPEED_TIMES = 16
"""A speed counts at most this many times the median of three or more: so no member leaves the others one step a round
by a speed that it makes up. What it sends can't tell an invented speed from a true one, because it may send at once. A
true one may well be ten times the others', of one large GPU among small ones, and must not wait for them."""

LATE_MAX = 0.1
"""A round's last step may end late by this share of the round, while other peers wait. Otherwise a round planned for
exactly four steps would shrink to three if the fourth would end slightly late."""

STEPS_MIN, STEPS_MAX = 3, 31
"""The usual time of a step is the median of the last steps. It is taken over as many steps as a round has, but over at
least STEPS_MIN (once that many are known) and at most STEPS_MAX."""


READINGS = 9
"""The formula uses the median of the last readings, this many at most: up to four outliers change nothing, and a
lasting change has its effect after five readings."""
STAYS_WITHIN = 0.1
"""The number of steps stays the same while the formula's result differs from it by no more than this share."""


def speeds(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """Return the speed, in inner steps a second, of each live worker that is not idle, as far as it counts
    (`SPEED_TIMES`). Peers of unknown speed are left out."""
    told = {peer: s.speed for peer, s in summaries.items() if s.role == "worker" and not s.idle and s.speed > 0}
    most = SPEED_TIMES * statistics.median_low(told.values()) if len(told) >= 3 else math.inf
    return {peer: min(speed, most) for peer, speed in told.items()}


def trains_for(steps: int, nbytes: int, me: str, summaries: Mapping[str, Summary]) -> float:
    """Return how many seconds this peer trains in a round, from the merge of the round's base to the end of its inner
    steps: T - x_w (see the module). The result is inf while no peer's speed is known.

    steps: the number that the fastest peer makes. nbytes: the size of a contribution and a mean together. summaries: of
    all live peers. An unknown bandwidth counts as the median of the known ones.
    """
    known = speeds(summaries)
    if not known:
        return math.inf
    links = filled({peer: summary.bandwidth for peer, summary in summaries.items()})
    arrival = min(steps / speed + nbytes / links[peer] for peer, speed in known.items())
    return arrival - nbytes / links[me]


def is_over(trained_s: float, step_s: float, planned_s: float) -> bool:
    """Whether this peer should make no further inner step in this round, because that step would end too late: after
    the planned time by more than half a step, or by more than LATE_MAX times the planned time.

    trained_s: the time since the merge of the round's base. step_s: the usual time of a step. planned_s: the result of
    `trains_for`.
    """
    late = trained_s + step_s - planned_s
    return late > min(step_s / 2, LATE_MAX * planned_s)


@dataclass(slots=True)
class StepTimes:
    """The usual time of an inner step: the median of the last n steps, where n is the number of steps in a round
    (within `STEPS_MIN` and `STEPS_MAX`).

    So one slow step (an evaluation, a compilation) or one quick step changes nothing, and a lasting change has its
    effect within about half a round.
    """

    usual: float = 0.0  # seconds; 0 until a step is known
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_MAX))

    def add(self, seconds: float, round_steps: int) -> None:
        """Record that an inner step took this many seconds. ``round_steps``: the number of steps that a round has
        now."""
        self._last.append(seconds)
        count = min(max(round_steps, STEPS_MIN), STEPS_MAX)
        self.usual = statistics.median(list(self._last)[-count:])


@dataclass(slots=True)
class Pace:
    """One peer's number of inner steps between two submissions by dynamic local updates: `schedule.dylu_steps` is the
    formula, smoothed here so that noise changes nothing. ``base`` is H: the number that the fastest peer makes, and
    that any peer of unknown speed makes."""

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
