"""Whether this replica has fallen behind, so that it has to ask: commits that are on their way need no question.

Law: it judges what peers say of themselves and gaps that messages show; `catchup` asks.
"""

from __future__ import annotations

from .logs import Logs
from .messages import Fetch
from .roster import Roster
from .rules import Rules
from .version import ModelVersion, Version


class Lag:
    def __init__(self, rules: Rules, logs: Logs, roster: Roster) -> None:
        self.rules, self.logs, self.roster = rules, logs, roster
        self.ahead: tuple[ModelVersion, float, str] | None = None  # the first greater model seen, when, at which peer
        self.moving = float("-inf")  # when bytes of a payload came or went last: commits may be among or behind them
        self.kept_up: dict[str, float] = {}  # asynchronous: when a peer was last asked
        self.missed: dict[int, tuple[Version | None, float]] = {}  # shard → its version when a gap showed, and when

    # -- what is seen

    def gap(self, shard: int, now: float) -> None:
        """Another peer works on a base that this replica doesn't hold: it has missed a commit, or will get it soon."""
        at = self.logs[shard].version
        if shard not in self.missed or self.missed[shard][0] != at:
            self.missed[shard] = (at, now)

    def moved(self) -> None:
        """This replica's versions have changed."""
        if self.ahead is not None and self.logs.model() >= self.ahead[0]:
            self.ahead = None

    def gone(self, peer: str) -> None:
        """The peer died or can't be reached."""
        if self.ahead is not None and self.ahead[2] == peer:
            self.ahead = None

    # -- what follows

    def is_far(self, theirs: ModelVersion) -> bool:
        """Whether a peer's model is more than one epoch of all shards ahead: no commit that comes now leads there."""
        mine = self.logs.model()
        return theirs.generation == mine.generation and theirs.epochs - mine.epochs > len(self.logs)

    def lasts(self, peer: str, theirs: ModelVersion, now: float) -> bool:
        """Whether this replica stays behind the peer, whose model is greater, unless it asks.

        On a slow link the commits of one round come one after another for a while; what is asked for meanwhile comes
        behind them, for the second time.
        """
        if self.ahead is None:
            self.ahead = (theirs, now, peer)
        stuck = [since for shard, (at, since) in self.missed.items() if self.logs[shard].version == at]
        quiet = self.ahead[1]
        if not self.is_far(theirs):
            quiet = max(quiet, min(self.moving, quiet + self.rules.fetch_again))
        return now - min([quiet, *stuck]) >= self.rules.settle

    def keep_up(self, peer: str, now: float) -> Fetch | None:
        """Asynchronous: to be behind is usual. Ask only for the shards that this peer is named to hold; now and then
        even for none, so that a fork shows."""
        states = (log.state for log in self.logs)
        mine = tuple(s.shard for s in states if s is not None and self.roster.me in s.plan.succession)
        every = self.rules.settle if mine else self.rules.dead_after
        if now - self.kept_up.get(peer, float("-inf")) < every:
            return None
        self.kept_up[peer] = now
        return Fetch(self.logs.versions(), shards=mine)
