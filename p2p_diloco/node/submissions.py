"""What became of this peer's submissions, and how many inner steps it makes until the next: asynchronous mode.

Law: counts and arithmetic on what others told; nothing is sent or received here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from p2p_diloco.config import RunConfig
from p2p_diloco.core.dylu import Pace
from p2p_diloco.core.submitting import ENDED
from p2p_diloco.node.status import Submissions

STALENESS_FROM = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Where the bins of a staleness histogram begin, in epochs; the last one has no end."""


class SubmissionLog:
    """One peer's, since it started."""

    def __init__(self, config: RunConfig) -> None:
        self._pace = Pace(config.sync_every) if config.dylu else None
        self._base = config.sync_every
        self.counted = 0
        """Those of which every shard was counted."""
        self.refused = 0
        """Those of which some shard was not: too stale, or of a lineage that was left. What came after the run's end is
        neither.
        """
        self.staleness = 0
        """Of the last one that was counted, its shards' greatest; in epochs."""
        self.histogram = [0] * len(STALENESS_FROM)
        """How many were counted with a staleness in each bin of `STALENESS_FROM`."""

    @property
    def steps(self) -> int:
        """H of this peer: inner steps between two of its exchanges of the whole model."""
        return self._base if self._pace is None else self._pace.steps

    @property
    def told(self) -> Submissions:
        """For the peer's status: the histogram without the empty bins at its end."""
        filled = [index for index, count in enumerate(self.histogram) if count]
        bins = self.histogram[: filled[-1] + 1] if filled else []
        return Submissions(self.counted, self.refused, tuple(bins))

    def ended(self, behind: Sequence[int | None], why: Sequence[str] = ()) -> str:
        """A submission was answered for: the staleness of each of its shards, or None where it was not counted, and why
        it wasn't. One sentence on it.
        """
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
        """At an exchange: this peer's number of steps by its own speed and others', in inner steps a second. One
        sentence, if it has changed.
        """
        if self._pace is None:
            return ""
        before, now = self._pace.steps, self._pace.adjust(speed, others.values())
        if before == now:
            return ""
        fastest = max([speed, *others.values()])
        return f"{now} inner steps to an exchange instead of {before}: {speed:.3g} a second, the fastest {fastest:.3g}"
