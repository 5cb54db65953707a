"""What happens to a trainer's local progress when a newer state is merged: one small state machine per shard.

A shard's replicated state lists each peer's last counted contribution. Progress is carried into the next
pseudo-gradient exactly if no contribution on that list contains it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .events import Carry
from .version import ContributionId, Version


@dataclass(slots=True)
class Carried:
    """A trainer's progress in one shard: which version the trainer merged last, and which contributions carry its
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

    def merge(self, version: Version, counted: ContributionId | None, *, given_up: bool) -> Carry:
        """Record that the trainer merges ``version``, and return what happens to its local progress. ``counted``: this
        peer's last contribution that ``version`` counts, or None. ``given_up``: uncounted progress is dropped."""
        self.base = version
        if self.last is None or self.oldest is None:
            return Carry.KEEP
        mine = counted is not None and counted.incarnation in (self.oldest.incarnation, self.last.incarnation)
        whole = mine and counted is not None and counted >= self.last
        part = mine and counted is not None and self.oldest <= counted < self.last
        match self.included, whole:
            case False, True:
                self.included = True
                return Carry.SUBTRACT
            case True, True:
                return Carry.KEEP
            case True, False if part:
                self._forget()  # inseparable from counted progress; steps made since the last contribution are kept
                return Carry.KEEP
            case True, False:
                self.included = False
                return Carry.RESTORE
            case _:
                if part or given_up:
                    self._forget()
                    return Carry.DROP
                return Carry.KEEP

    def _forget(self) -> None:
        """Forget the contributions sent so far: their progress is no longer carried."""
        self.last = self.oldest = None
        self.included, self.sends = False, 0
