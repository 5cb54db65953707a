"""A computed commit that is not valid yet: which peers must hold it, which of them do, and when to send it to each.

Law: this module does not know how a commit is made, nor what happens once every peer holds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .messages import Commit, Plan
from .version import Version


@dataclass(slots=True)
class Proposal:
    """A computed commit that is not published until certain peers hold it."""

    commit: Commit
    holding: set[str] = field(default_factory=set)  # the peers that confirmed that they hold it
    offered: dict[str, float] = field(default_factory=dict)  # peer → when to send the commit again

    @property
    def version(self) -> Version:
        return self.commit.version

    def missing(self, plan: Plan, me: str) -> set[str]:
        """Return the peers in the plan's succession that have not confirmed that they hold the proposal."""
        return {*plan.succession} - {me, *self.holding}

    def due(self, peers: Iterable[str], now: float, again_after: float) -> list[str]:
        """Return the peers among ``peers`` to which the proposal must be sent now, and record it as sent to them.
        ``again_after``: how long to wait before it is sent to the same peer again."""
        due = [p for p in peers if now >= self.offered.get(p, now)]
        self.offered |= dict.fromkeys(due, now + again_after)
        return due

    def forgotten_by(self, peer: str) -> None:
        """Handle a peer's restart: the peer no longer holds the proposal."""
        self.holding.discard(peer)
        self.offered.pop(peer, None)
