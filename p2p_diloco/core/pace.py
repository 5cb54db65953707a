"""How long each peer trains in a round of pace="time", and when its inner steps are over.

Law: arithmetic on what peers say of themselves and on elapsed time; no clock is read, no peer is asked.

A round is planned so that all contributions arrive together. With v_p the inner steps a second of peer p, and x_p the
seconds that its link takes for the mean that it gets and the contribution that it sends, H steps of p are there

    H / v_p + x_p

after the commit that begins the round. The fastest peer is the one of which that is least, T; so peer w trains for

    T - x_w

and makes about (T - x_w) v_w steps: at least one, at most H. The number isn't fixed. After each step the peer simulates
the next one's completion (`is_over`), so whatever slows it down within a round is made up for within that round.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from .messages import Summary
from .shares import filled

LATE_MAX = 0.1
"""The share of a round by which a planned step may end late, so that the others wait for it: a round of exactly four
steps should not become one of three because the last one ends a little late."""

STEPS_MIN, STEPS_MAX = 3, 31
"""Of how many inner steps at least and at most the middle one counts."""


def speeds(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """Inner steps a second of the live peers that train and make progress, as far as they are known."""
    return {peer: s.speed for peer, s in summaries.items() if s.role == "worker" and not s.idle and s.speed > 0}


def trains_for(steps: int, nbytes: int, me: str, summaries: Mapping[str, Summary]) -> float:
    """Seconds from the merge of a round's base to the end of this peer's inner steps, T - x_w; inf while no speed is
    known. A peer whose bandwidth is not known counts as the median of those that are.

    steps: those of the fastest peer. nbytes: of a contribution and of a mean together. summaries: of all live peers.
    """
    known = speeds(summaries)
    if not known:
        return math.inf
    links = filled({peer: summary.bandwidth for peer, summary in summaries.items()})
    arrival = min(steps / speed + nbytes / links[peer] for peer, speed in known.items())
    return arrival - nbytes / links[me]


def is_over(trained_s: float, step_s: float, planned_s: float) -> bool:
    """Whether no further inner step is made: it would end more than half a step after the time that is planned, so that
    now is nearer to it, or so late that the others would wait for more than LATE_MAX of it.

    trained_s: since the merge of the round's base. step_s: what a step usually takes.
    """
    late = trained_s + step_s - planned_s
    return late > min(step_s / 2, LATE_MAX * planned_s)


@dataclass(slots=True)
class StepTimes:
    """What an inner step usually takes: the middle one of the last ones, as many as a round has.

    So a lone slow step (an evaluation, a compilation) or a lone quick one changes nothing, and a change that lasts is
    followed within about half a round.
    """

    usual: float = 0.0  # seconds; 0 until a step is known
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_MAX))

    def add(self, seconds: float, round_steps: int) -> None:
        """A step has been made, in rounds of so many."""
        self._last.append(seconds)
        count = min(max(round_steps, STEPS_MIN), STEPS_MAX)
        self.usual = statistics.median(list(self._last)[-count:])
