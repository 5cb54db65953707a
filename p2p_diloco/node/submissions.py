"""Counts, in asynchronous mode, the outcomes of this peer's submissions, and adjusts the number of its inner steps
between two submissions.

Law: counts and computes; sends and receives nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from p2p_diloco.config import RunConfig
from p2p_diloco.core.dylu import Pace
from p2p_diloco.node.status import Submissions

STALENESS_FROM = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""The lower bounds of a staleness histogram's bins, in epochs; the last bin has no upper bound."""

ENDED = "the run has ended"
TOO_OLD = "the submission was further behind than max_staleness"
MISUSED = "the submission was made from data that another peer had used or leased"
LEFT = "this peer has left the lineage that the submission was made on"
"""Why a submission was not counted."""


class SubmissionLog:
    """Counts the outcomes of one peer's submissions since its start."""

    def __init__(self, config: RunConfig) -> None:
        self._pace = Pace(config.sync_every) if config.dylu else None
        self._base = config.sync_every
        self.counted = 0
        """The number of submissions that were counted in every shard."""
        self.refused = 0
        """The number of submissions that were not counted in some shard: too stale, or made on a lineage that lost.
        Submissions after the run's end are neither in this number nor in `counted`."""
        self.staleness = 0
        """The greatest staleness among the shards of the last counted submission, in epochs."""
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

    def ended(self, behind: Sequence[int | None], why: Sequence[str] = ()) -> str:
        """Count the outcome of a submission; returns the outcome as one sentence. `behind` holds the staleness of each
        shard, or None for a shard that was not counted. `why` holds the reasons why shards were not counted."""
        known = [epochs for epochs in behind if epochs is not None]
        if len(known) < len(behind):
            self.refused += list(why) != [ENDED]
            shards = f"{len(behind) - len(known)} of its {len(behind)} shards"
            return f"a submission was not counted in {shards}: {', '.join(why)}"
        self.staleness = max(known, default=0)
        self.counted += 1
        self.histogram[bisect_right(STALENESS_FROM, self.staleness) - 1] += 1
        spread = f"{min(known, default=0)} to {self.staleness}" if min(known, default=0) < self.staleness else None
        return f"submission {self.counted} was counted, {spread or self.staleness} epochs behind"

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
