"""Divides time among named parts, and sums the seconds of each. Every moment belongs to exactly one part.

Law: independent of what the parts are; reads only the given clock. If several parts are active, the time counts for the
one that is first in the ledger's order; if none is active, for the last part of that order.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Release
from p2p_diloco.core.exchange import ENDED
from p2p_diloco.core.pace import Pace
from p2p_diloco.node.status import SHARES, LastRound, Submissions

INNER, PAUSED, MERGE, PSEUDO_GRADIENT = "inner", "paused", "merge", "pseudo_gradient"
CODEC, GROUP, TRANSFER, OUTER_STEP = "codec", "group", "transfer", "outer_step"

OF_EXCHANGE = (OUTER_STEP, CODEC, TRANSFER, GROUP)
"""The parts into which the node divides an exchange's time, in the ledger's order. All time that belongs to no other
part counts as waiting for the other peers."""
OF_TRAINING = (PSEUDO_GRADIENT, *OF_EXCHANGE, MERGE, PAUSED, INNER)
"""The parts of a trainer's time."""

Seconds = dict[str, float]
"""Seconds by part."""


class Ledger:
    """Sums seconds by part, in two columns. Time before the moment `stands_since()` goes to the column `hidden`,
    because training went on then. Later time goes to the column `stood`, because training stood still.

    `clock` and `stands_since` use the same clock, which another process may use too.
    """

    def __init__(
        self,
        order: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        stands_since: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        self._order, self._clock, self._stands_since = tuple(order), clock, stands_since
        self._under_way = dict.fromkeys(self._order, 0)
        self.begin()

    def begin(self) -> None:
        """Set all sums to zero. Parts that are active stay active."""
        self._at = self._clock()
        self._stood, self._hidden = (dict.fromkeys(self._order, 0.0) for _ in range(2))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block for this part. Several parts may be active at once, and one part several
        times at once."""
        self._settle()
        self._under_way[name] += 1
        try:
            yield
        finally:
            self._settle()
            self._under_way[name] -= 1

    def split(self, name: str, before: float, seconds: Mapping[str, float]) -> None:
        """In the column `stood`, move seconds from the part `name` to other parts; `seconds` holds how many go to each.
        At most as many are moved as `name` has gained since its sum was `before`."""
        for other, share in seconds.items():
            if other != name:
                moved = min(share, self._stood[name] - before)
                self._stood[name] -= moved
                self._stood[other] += moved

    @property
    def stood(self) -> Seconds:
        """The seconds for which training stood still, by part, up to now."""
        self._settle()
        return dict(self._stood)

    @property
    def hidden(self) -> Seconds:
        """The seconds for which training went on, by part, up to now."""
        self._settle()
        return dict(self._hidden)

    def _settle(self) -> None:
        """Add the time since the last call to the sum of the first active part; if none is active, of the last part."""
        began, self._at = self._at, self._clock()
        part = next((name for name in self._order if self._under_way[name]), self._order[-1])
        stood = min(max(0.0, self._at - self._stands_since()), self._at - began)
        self._stood[part] += stood
        self._hidden[part] += self._at - began - stood


def last_round(stood: Mapping[str, float], hidden_s: float, ended: float) -> LastRound:
    """Make the `LastRound` of a round, without pauses, rounded to 0.1 ms. `stood`: the round's seconds by part.
    `hidden_s`: the seconds of its exchange during which training went on. `ended`: its end, in seconds since 1970."""
    spent = {**stood, "encode": stood[PSEUDO_GRADIENT] + stood[CODEC], "hidden": hidden_s}
    return LastRound(*(round(number, 4) for number in (*(spent[name] for name in SHARES), ended)))


def told(last: LastRound) -> str:
    """Return the shares of a round's time as text."""
    *spent, hidden = (f"{name.replace('_', ' ')} {share:.1%}" for name, share in last.shares.items())
    return f"{', '.join(spent)}; of its exchange {hidden}"


# -- asynchronous mode

STALENESS_FROM = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""The lower bounds of a staleness histogram's bins, in epochs; the last bin has no upper bound."""


class SubmissionLog:
    """Counts the outcomes of one peer's submissions since its start."""

    def __init__(self, config: RunConfig) -> None:
        self._pace = Pace(config.sync_every) if config.dylu else None
        self._base = config.sync_every
        self.counted = 0
        """The number of submissions that were counted."""
        self.refused = 0
        """The number of submissions that were not counted: too stale, or made on a lineage that lost.
        Submissions after the run's end are neither in this number nor in `counted`."""
        self.staleness = 0
        """The staleness of the last counted submission, in epochs."""
        self.histogram = [0] * len(STALENESS_FROM)
        """The number of counted submissions with a staleness in each bin of `STALENESS_FROM`."""

    @property
    def steps(self) -> int:
        """This peer's H: inner steps between two of its exchanges of the whole model."""
        return self._base if self._pace is None else self._pace.steps

    def begins_with(self, sync_every: int) -> None:
        """Adopt a new H of the run, `sync_every`."""
        self._base = sync_every
        if self._pace is not None:
            self._pace.rebase(sync_every)

    @property
    def told(self) -> Submissions:
        """The counts for the peer's status. Empty bins at the end of the histogram are left out."""
        filled = [index for index, count in enumerate(self.histogram) if count]
        bins = self.histogram[: filled[-1] + 1] if filled else []
        return Submissions(self.counted, self.refused, tuple(bins))

    def ends(self, release: Release) -> str:
        """Count a submission that is over; returns what became of it as one sentence."""
        if release.refused:
            self.refused += release.refused != ENDED
            return f"a submission was not counted: {release.refused}"
        self.staleness = release.staleness
        self.counted += 1
        self.histogram[bisect_right(STALENESS_FROM, release.staleness) - 1] += 1
        return f"submission {self.counted} was counted, {release.staleness} epochs behind"

    def adjust(self, speed: float, others: Mapping[str, float]) -> str:
        """Adjust this peer's number of inner steps to its own `speed` and the speeds of the `others`, all in inner
        steps a second. Called at each exchange. Returns a sentence if the number has changed, else an empty text."""
        if self._pace is None:
            return ""
        before, now = self._pace.steps, self._pace.adjust(speed, others.values())
        if before == now:
            return ""
        fastest = max([speed, *others.values()])
        return f"{now} inner steps to an exchange instead of {before}: {speed:.3g} a second, the fastest {fastest:.3g}"
