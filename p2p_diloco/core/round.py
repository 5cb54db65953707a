"""What belongs to one version of a shard and dies with it: the round that makes the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Apply, Average
from .leadership import Leadership
from .messages import Commit, Contribution
from .proposal import Proposal


@dataclass(slots=True)
class Round:
    """Times in seconds.

    opened: when the version came, the first contribution came, or this peer took over, whichever was last.
    asks_at: when what is missing is asked for next; ``patience``: how long after the last time.
    working: tensor work under way; ``draft``: the commit that an Average is to become; ``proposed``: that commit,
    computed, until all that must hold it do. interrupted: an Average whose proposal waits for its base to be mended.
    damaged: since when the tensors are not the version's, so that nothing is averaged. trusted: they are not, and no
    peer has better ones: the next commit makes them true. past_mending: they are not, and no commit comes any more.
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
        """The round begins, or begins anew."""
        self.opened, self.patience, self.asks_at = now, patience, now + patience

    def ask_later(self, now: float, longest: float) -> None:
        """What is missing was asked for: the next time comes after twice as long."""
        self.patience = min(2 * self.patience, longest)
        self.asks_at = now + self.patience

    def drop_draft(self) -> None:
        """Another peer writes the next commit."""
        self.proposed = self.interrupted = None
        if isinstance(self.working, Average):
            self.working = None
