"""What belongs to one version of a shard and ends with it: the round that makes the next version."""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Apply, Average
from .leadership import Leadership
from .messages import Commit, Contribution
from .proposal import Proposal


@dataclass(slots=True)
class Round:
    """One round. Times in seconds.

    opened: when the version came, the first contribution came, or this peer took over, whichever was last. asks_at:
    when to ask again for what is missing; patience: the interval before that.

    working: tensor work under way. draft: the commit that an Average computes. proposed: that commit, computed, until
    every peer that must hold it does. interrupted: an Average to repeat once its damaged base is mended.

    damaged: since when the tensors do not match the version, so that nothing is averaged. trusted: they do not match,
    but no peer has better ones; the next commit makes a version from them. past_mending: the same after the run's end.
    """

    lead: Leadership
    opened: float = 0.0
    asks_at: float = 0.0
    patience: float = 0.0
    inbox: dict[str, Contribution] = field(default_factory=dict)
    working: Average | Apply | None = None
    draft: Commit | None = None
    proposed: Proposal | None = None
    interrupted: Average | None = None
    damaged: float | None = None
    trusted: bool = False
    past_mending: bool = False

    def open(self, now: float, patience: float) -> None:
        """The round begins, or begins again."""
        self.opened, self.patience, self.asks_at = now, patience, now + patience

    def ask_later(self, now: float, longest: float) -> None:
        """Double the interval until the next request for what is missing."""
        self.patience = min(2 * self.patience, longest)
        self.asks_at = now + self.patience

    def drop_draft(self) -> None:
        """Another peer writes the next commit."""
        self.proposed = self.interrupted = None
        if isinstance(self.working, Average):
            self.working = None
