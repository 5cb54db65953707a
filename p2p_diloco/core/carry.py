"""What happens to a trainer's local progress when a newer state is merged: one small state machine per fragment.

A fragment's replicated state lists each peer's last counted contribution. Progress that none of these contains is
carried into the next pseudo-gradient, unless it is dropped (`Carry` says when).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .version import ContributionId, Version


class Carry(Enum):
    """What happens to a fragment's local progress (local − base) when the trainer merges a newer global value.

    Let Δ be the last contribution sent for the fragment (pseudo-gradient: base at that time − local at sending). The
    last four are drops: local ← new.
    """

    KEEP = "keep"  # local ← new + (local − base)
    SUBTRACT = "subtract"  # local ← new + (local − base) + Δ: the contribution is counted in new
    LEFT = "left"  # base is of a lineage that has lost, and new doesn't count the contribution
    SINCE = "since"  # base is of a lineage that has lost; the contribution is counted in new, what was made since isn't
    PART = "part"  # only an older contribution is counted: the rest can't be separated from its progress
    OLD = "old"  # the progress was sent too often, or refused too often, without being counted


@dataclass(slots=True)
class Carried:
    """A trainer's progress in one fragment: which version the trainer merged last, and which contributions carry its
    uncounted progress.

    base: the version that the local parameters were last merged with. last: the newest contribution that was sent and
    not given up. oldest: the oldest contribution whose progress is still carried. included: whether the base counts
    ``last``. oldest_base: the base of ``oldest``. sends: how many contributions have carried the progress since
    ``oldest``; asynchronous: how many of these were refused.
    """

    base: Version | None = None
    last: ContributionId | None = None
    oldest: ContributionId | None = None
    oldest_base: Version | None = None
    included: bool = False
    sends: int = 0

    def send(self, id: ContributionId) -> ContributionId:
        """Record that a new contribution is sent. Return the id of the oldest contribution whose uncounted progress the
        new one carries."""
        if self.last is None or self.included or self.oldest is None:
            self.oldest, self.oldest_base, self.sends = id, self.base, 0
        self.last, self.included = id, False
        return self.oldest

    def merge(self, version: Version, counted: ContributionId | None, *, kin: bool, given_up: bool) -> Carry:
        """Record that the trainer merges ``version``, and return what happens to its local progress. ``counted``: this
        peer's last contribution that ``version`` counts, or None. ``kin``: whether ``version`` descends from the base.
        ``given_up``: uncounted progress is dropped."""
        self.base = version
        if self.last is None or self.oldest is None:
            return Carry.KEEP if kin else Carry.LEFT
        mine = counted is not None and counted.incarnation in (self.oldest.incarnation, self.last.incarnation)
        part = mine and counted is not None and self.oldest <= counted < self.last
        if mine and counted is not None and counted >= self.last:
            first, self.included = not self.included, True
            return Carry.SINCE if not kin else Carry.SUBTRACT if first else Carry.KEEP
        left = self.included or not kin
        if not (left or part or given_up):
            return Carry.KEEP
        self.last = self.oldest = None
        self.included, self.sends = False, 0
        return Carry.LEFT if left else Carry.PART if part else Carry.OLD
