"""Whether this replica is behind and has to fetch, or whether the missing commits are on their way.

Law: this module judges by other peers' Summaries and by messages on versions that this replica does not hold; `catchup`
sends the requests.
"""

from __future__ import annotations

from .logs import Logs
from .messages import Fetch
from .roster import Roster
from .rules import Rules
from .version import ModelVersion, Version


class Lag:
    """The signs that this replica is behind, and since when each one lasts."""

    def __init__(self, rules: Rules, logs: Logs, roster: Roster) -> None:
        self.rules, self.logs, self.roster = rules, logs, roster
        # the first greater model seen, when it was seen, and the peer that holds it
        self.ahead: tuple[ModelVersion, float, str] | None = None
        # when payload bytes last came or went: they may belong to commits, or commits may wait behind them
        self.moving = float("-inf")
        self.kept_up: dict[str, float] = {}  # asynchronous: when each peer was last asked
        # shard → its version when a missing commit was noticed, and the time
        self.missed: dict[int, tuple[Version | None, float]] = {}

    # -- what is seen

    def gap(self, shard: int, now: float) -> None:
        """Record that another peer works on a base that this replica does not hold: a commit was missed or is on its
        way."""
        at = self.logs[shard].version
        if shard not in self.missed or self.missed[shard][0] != at:
            self.missed[shard] = (at, now)

    def moved(self) -> None:
        """Handle a change of this replica's versions: forget the greater model that was seen if this replica's model is
        now as great."""
        if self.ahead is not None and self.logs.model() >= self.ahead[0]:
            self.ahead = None

    def gone(self, peer: str) -> None:
        """Handle a peer that died or can't be reached: forget the greater model that was seen if this peer holds it."""
        if self.ahead is not None and self.ahead[2] == peer:
            self.ahead = None

    # -- what follows

    def is_far(self, theirs: ModelVersion) -> bool:
        """Whether a peer's model is ahead by more than one epoch for each shard, on average, so that the commits on
        their way would not suffice."""
        mine = self.logs.model()
        return theirs.generation == mine.generation and theirs.epochs - mine.epochs > len(self.logs)

    def lasts(self, peer: str, theirs: ModelVersion, now: float) -> bool:
        """Whether this replica has been behind for so long that it should fetch from this peer, whose model is greater.

        On a slow link the commits of one round arrive over some time. A state requested meanwhile would arrive after
        the commits and bring nothing new.
        """
        if self.ahead is None:
            self.ahead = (theirs, now, peer)
        stuck = [since for shard, (at, since) in self.missed.items() if self.logs[shard].version == at]
        quiet = self.ahead[1]
        if not self.is_far(theirs):
            quiet = max(quiet, min(self.moving, quiet + self.rules.fetch_again))
        return now - min([quiet, *stuck]) >= self.rules.settle

    def keep_up(self, peer: str, now: float) -> Fetch | None:
        """Asynchronous: return a request for what is newer at the peer, or None if the peer was asked lately.

        The request is only for shards that this peer may have to aggregate, because in other shards it is usual to be
        behind. If there are no such shards, the peer is only asked for its versions, once per ``dead_after``, so that a
        fork is noticed.
        """
        states = (log.state for log in self.logs)
        mine = tuple(s.shard for s in states if s is not None and self.roster.me in s.plan.succession)
        every = self.rules.settle if mine else self.rules.dead_after
        if now - self.kept_up.get(peer, float("-inf")) < every:
            return None
        self.kept_up[peer] = now
        return Fetch(self.logs.versions(), shards=mine)
