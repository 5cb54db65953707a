"""What becomes of a trainer's progress in one fragment when it merges a newer state: which contributions contain it,
and what the state says of them.

Law: pure. A state's roll lists each peer's last counted contribution. There are two outcomes: what was sent last is
counted, or it isn't and is in the next contribution, too. Where neither can be told, progress is dropped, and the
reason is said. Steps, samples and values are the trainer's own (`peer/progress.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .version import ContributionId, Version

LEFT = "its lineage has lost"
SINCE = "its lineage has lost, though what was sent before is counted"
PART = "only a part of what was sent is counted, and the rest can't be told from it"
OLD = "it was sent or refused too often without being counted"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a state that is merged says of what was sent last. ``counted``: the state counts it, and the base did not.
    ``dropped``: why all progress that the state doesn't count is dropped; empty: it stays."""

    counted: bool = False
    dropped: str = ""


@dataclass(slots=True)
class Carried:
    """The progress of one fragment.

    base: the version that the trainer merged last. last: the newest contribution that was sent and not given up.
    oldest: the oldest contribution whose progress is still carried; oldest_base: its base. included: whether the base
    counts ``last``. sends: how many contributions have carried the progress since ``oldest``; asynchronous: how many of
    these were refused.
    """

    base: Version | None = None
    last: ContributionId | None = None
    oldest: ContributionId | None = None
    oldest_base: Version | None = None
    included: bool = False
    sends: int = 0

    def send(self, id: ContributionId) -> None:
        """Record that a new contribution is sent. It contains all progress that is carried."""
        if self.last is None or self.included:
            self.oldest, self.oldest_base, self.sends = id, self.base, 0
        self.last, self.included = id, False

    def merge(self, version: Version, counted: ContributionId | None, *, kin: bool, most: int) -> Outcome:
        """Record that the trainer merges ``version``, and return what becomes of its progress. ``counted``: this peer's
        last contribution that ``version`` counts, or None. ``kin``: whether ``version`` descends from the base.
        ``most``: uncounted progress is dropped if ``sends`` is more."""
        self.base = version
        if self.last is None or self.oldest is None:
            return Outcome(dropped="" if kin else LEFT)
        mine = counted is not None and counted.incarnation in (self.oldest.incarnation, self.last.incarnation)
        part = mine and counted is not None and self.oldest <= counted < self.last
        if mine and counted is not None and counted >= self.last:
            first, self.included = not self.included, True
            return Outcome(first) if kin else Outcome(True, SINCE)
        left = self.included or not kin
        if not (left or part or self.sends > most):
            return Outcome()
        self.last = self.oldest = None
        self.included, self.sends = False, 0
        return Outcome(dropped=LEFT if left else PART if part else OLD)
