"""A computed commit that does not count yet: which peers must hold it, which do, and when it is sent to each.

Law: it knows neither how a commit is made nor what follows once every peer holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .messages import Commit, Plan
from .version import Version


@dataclass(slots=True)
class Proposal:
    commit: Commit
    holding: set[str] = field(default_factory=set)  # the peers that confirmed it
    offered: dict[str, float] = field(default_factory=dict)  # peer → when to send it again

    @property
    def version(self) -> Version:
        return self.commit.version

    def missing(self, present: Plan, me: str) -> set[str]:
        """The peers that must hold it and do not yet: those that its plan or the present plan names."""
        return {*present.succession, *self.commit.plan.succession} - {me, *self.holding}

    def due(self, peers: Iterable[str], now: float, again_after: float) -> list[str]:
        """The peers among these that it must be sent to now; recorded as sent."""
        due = [p for p in peers if now >= self.offered.get(p, now)]
        self.offered |= dict.fromkeys(due, now + again_after)
        return due

    def forgotten_by(self, peer: str) -> None:
        """The peer restarted and holds it no more."""
        self.holding.discard(peer)
        self.offered.pop(peer, None)
