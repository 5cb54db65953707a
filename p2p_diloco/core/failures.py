"""Donors that have delivered nothing, or wrong states: other donors get their turn first.

Law: no donor is barred for good by a failure, because it may be the only donor. Time is an argument, never read.
"""

from __future__ import annotations

from .rules import Rules

DOUBLINGS_MAX = 8
"""The time for which a donor that fails is not asked again doubles at most this many times."""


class Failures:
    """How often each donor has failed since it last delivered what was asked of it."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._of: dict[str, tuple[int, float]] = {}  # by donor: how often, and until when it is not asked again

    def add(self, donor: str, now: float) -> None:
        """Record that a donor has delivered nothing, or a wrong state."""
        times = self.times(donor)
        wait = min(self._rules.settle * 2 ** min(times, DOUBLINGS_MAX), self._rules.fetch_again)
        self._of[donor] = times + 1, now + wait

    def times(self, donor: str) -> int:
        """How often this donor has failed. Donors that have failed less often are asked first."""
        return self._of.get(donor, (0, 0.0))[0]

    def lately(self, donor: str, now: float) -> bool:
        """Whether this donor has failed so recently that others are asked first."""
        return now < self._of.get(donor, (0, now))[1]

    def forget(self, donor: str) -> None:
        """Forget the failures of a donor that has delivered what was asked, has restarted, or is gone."""
        self._of.pop(donor, None)
