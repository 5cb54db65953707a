"""A computed commit before it counts: which peers must hold it first, which do, and when it is sent to each.

Law: it knows nothing of how a commit is made, nor of what follows once all hold it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .messages import Commit, Plan
from .version import Version


@dataclass(slots=True)
class Proposal:
    commit: Commit
    holding: set[str] = field(default_factory=set)  # the peers that say so
    offered: dict[str, float] = field(default_factory=dict)  # the peers it went to, and when it goes again

    @property
    def version(self) -> Version:
        return self.commit.version

    def missing(self, present: Plan, me: str) -> set[str]:
        """The peers that must hold it and don't yet: those that its plan names, or the present one."""
        return {*present.succession, *self.commit.plan.succession} - {me, *self.holding}

    def due(self, peers: Iterable[str], now: float, again_after: float) -> list[str]:
        """To which of these it is to be sent now; noted as sent."""
        due = [p for p in peers if now >= self.offered.get(p, now)]
        self.offered |= dict.fromkeys(due, now + again_after)
        return due

    def forgotten_by(self, peer: str) -> None:
        """The peer restarted."""
        self.holding.discard(peer)
        self.offered.pop(peer, None)
