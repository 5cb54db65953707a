"""The data of one round: everything that belongs to one version of a shard, and is replaced with that version."""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Apply, Average
from .leadership import Leadership
from .messages import Commit, Contribution
from .proposal import Proposal


@dataclass(slots=True)
class Round:
    """The round that makes a shard's next version. All times are in seconds.

    lead: which peer may write the commit. samples: those that the present version counts. lasted: how long the round
    has lasted, counted once per heartbeat. opened: when the version came, the first contribution came, or this peer
    took over, whichever was last. asks_at: when to ask again for missing messages. patience: the length of the interval
    that ends at ``asks_at``. inbox: contributions, by peer. awaited: peers that the round can't go on without, each
    with the time waited for it so far, including earlier rounds whose commits counted nothing.

    working: the tensor work under way. told_by: the sender of the commit that is being applied. draft: the commit that
    this peer's Average computes. proposed: the computed commit, until each peer that must hold it does. interrupted: an
    Average to repeat once its damaged base is repaired. refuted: digests that commits named, but did not lead to here.

    damaged: since when the tensors do not match the version; nothing is averaged meanwhile. trusted: the tensors do not
    match, but no peer has better ones, so the next commit makes a version that matches them. past_mending: no peer has
    better tensors, and the run has ended.
    """

    lead: Leadership
    samples: int = -1
    lasted: float = 0.0
    opened: float = 0.0
    asks_at: float = 0.0
    patience: float = 0.0
    inbox: dict[str, Contribution] = field(default_factory=dict)
    awaited: dict[str, float] = field(default_factory=dict)
    working: Average | Apply | None = None
    told_by: str = ""
    draft: Commit | None = None
    proposed: Proposal | None = None
    interrupted: Average | None = None
    refuted: set[str] = field(default_factory=set)
    damaged: float | None = None
    trusted: bool = False
    past_mending: bool = False

    def open(self, now: float, patience: float) -> None:
        """Let the round begin now: set its times. ``patience``: seconds until missing messages are first asked for."""
        self.opened, self.patience, self.asks_at = now, patience, now + patience

    def ask_later(self, now: float, longest: float) -> None:
        """Double the interval until the next request for missing messages, up to ``longest``."""
        self.patience = min(2 * self.patience, longest)
        self.asks_at = now + self.patience

    def drop_draft(self) -> None:
        """Drop this peer's own draft and proposal, because another peer writes the next commit."""
        self.proposed = self.interrupted = None
        if isinstance(self.working, Average):
            self.working = None
