"""Judges whether this replica is behind other peers and must fetch states, or whether the missing commits are on their
way.

Law: this module judges by other peers' Summaries, by messages on versions that this replica does not hold, and by
refused commits; `catchup` and `rounds` send the requests.
"""

from __future__ import annotations

from .events import Effect, Send
from .logs import Logs
from .messages import Fetch, Outdated
from .roster import Roster
from .rules import Rules
from .version import ModelVersion, Version


class Lag:
    """The signs that this replica is behind other peers, and since when each sign lasts."""

    def __init__(self, rules: Rules, logs: Logs, roster: Roster) -> None:
        self.rules, self.logs, self.roster = rules, logs, roster
        # the first higher model version that was seen, when it was seen, and the peer that reported it
        self.ahead: tuple[ModelVersion, float, str] | None = None
        # when payload bytes last came or went: they may belong to commits, or commits may wait behind them
        self.moving = float("-inf")
        self.kept_up: dict[str, float] = {}  # asynchronous: when each peer was last asked
        self.asked_holder: dict[int, float] = {}  # shard → when the holder of its term was last asked
        # shard → its version when a missing commit was noticed, and the time
        self.missed: dict[int, tuple[Version | None, float]] = {}

    # -- what is seen

    def gap(self, shard: int, now: float) -> None:
        """Record that another peer has sent a message on a version of this shard that this replica does not hold: a
        commit was missed or is on its way."""
        at = self.logs[shard].version
        if shard not in self.missed or self.missed[shard][0] != at:
            self.missed[shard] = (at, now)

    def moved(self) -> None:
        """Handle a change of this replica's versions. If the model version here has reached the higher one that another
        peer reported, forget that report."""
        if self.ahead is not None and self.logs.model() >= self.ahead[0]:
            self.ahead = None

    def gone(self, peer: str) -> None:
        """Handle a peer that died or can't be reached. If this peer reported the higher model version that is
        remembered here, forget that version."""
        if self.ahead is not None and self.ahead[2] == peer:
            self.ahead = None

    # -- what follows

    def is_far(self, theirs: ModelVersion) -> bool:
        """Whether a peer's model is ahead of this replica's by more than one epoch per shard, on average. The commits
        that are on their way would then not be enough."""
        mine = self.logs.model()
        return theirs.generation == mine.generation and theirs.epochs - mine.epochs > len(self.logs)

    def lasts(self, peer: str, theirs: ModelVersion, now: float) -> bool:
        """Whether this replica has been behind the peer's model version for so long that it should fetch from the peer.

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
        """In asynchronous mode, return a request for what is newer at the peer, or None if this replica asked the peer
        a short time ago.

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

    def asks_holder(self, shard: int, effects: list[Effect], now: float) -> list[Effect]:
        """If these effects refuse a commit, return a question to the peer that the refusal names. That peer may have
        gone on from this very commit, and claim nothing any more. Ask at most once per ``settle``, because the answer
        may be a commit that is refused, too."""
        holders = [e.message.holder for e in effects if isinstance(e, Send) and isinstance(e.message, Outdated)]
        if not holders or now - self.asked_holder.get(shard, float("-inf")) < self.rules.settle:
            return []
        self.asked_holder[shard] = now
        return [Send(holders[0], Fetch(self.logs.versions(), shards=(shard,)))]
