"""What other peers need to reach a shard's present version: its last commit, and messages that must be sent again."""

from __future__ import annotations

from .events import Effect, Send
from .messages import Commit, State
from .roster import Roster
from .rules import Rules
from .version import Version


class Outgoing:
    """Stores one shard's last commit as long as a peer may lack it, and the messages that must be sent again."""

    def __init__(self, rules: Rules, roster: Roster) -> None:
        self.rules, self.roster = rules, roster
        self.last: Commit | None = None  # the commit that made the present version; None once no peer lacks it
        # the newest commits, for peers that are behind; only in asynchronous mode, where it is usual to be behind
        self.recent: list[Commit] = []
        self.lacking: set[str] = set()  # the peers that may lack the present version
        self.again: dict[str, Commit | State] = {}  # by peer: undelivered messages of the present version
        self.resent: dict[str, int] = {}  # by peer: how often a message was sent again
        self.asked: dict[str, int] = {}  # by peer: how often it asked although no commit to it is under way

    def appended(self, commit: Commit) -> None:
        """Record the commit that made the present version."""
        self.last, self.lacking = commit, set(self.roster.alive()) - {commit.aggregator}
        self._let_go_if_held()

    def adopted(self) -> None:
        """Record that this replica adopted the present version as a state, without a commit. So a peer that lacks this
        version gets the whole state."""
        self.last, self.lacking, self.recent = None, set(), []

    def renew(self, state: State) -> None:
        """Handle a new version of the shard: replace undelivered states with the new state, and drop undelivered
        commits."""
        self.again = {peer: state for peer, message in self.again.items() if isinstance(message, State)}
        self.resent, self.asked = {}, {}

    def news(self, state: State, peer: str, base: Version | None) -> list[Effect]:
        """Return the messages that bring a peer from ``base`` to the present version: the commits made since ``base``
        if they are stored here, and the peer can apply them, else the whole state."""
        stored = self.recent if self.last is None else self.recent or [self.last]
        since = next((stored[i:] for i, commit in enumerate(stored) if commit.base == base), None)
        summary = self.roster.summary(peer)
        unlike = summary is not None and summary.unlike
        if since is None or unlike or len(since) > self.rules.answered_with:
            return [Send(peer, state)]
        return [Send(peer, commit) for commit in since]

    def answer(self, state: State, peer: str, base: Version | None) -> list[Effect]:
        """Return the answer to a peer that asks for what is newer: the last commit if that suffices, else the state. A
        peer that can't apply commits asks again for each. One that refuses the last commit asks again: the commit's
        author may have had the right to write it only while other peers were away, and this replica may hold it alone.
        So the peer gets the state after ``resends`` questions with no commit to it under way."""
        if peer not in self.lacking and self.roster.live(peer):
            self.asked[peer] = self.asked.get(peer, 0) + 1
        news, refused = self.news(state, peer, base), self.asked.get(peer, 0) > self.rules.resends
        return [Send(peer, state)] if refused or len(news) > 1 else news

    def reached(self, peer: str) -> None:
        """Record that the peer holds the present version. Once no live peer lacks this version, drop its commit; peers
        that join later get the whole state."""
        self.lacking.discard(peer)
        self._let_go_if_held()

    def let_go(self) -> None:
        """Drop the last commit to free its memory. Keep it if its author may be gone, because then perhaps no other
        peer can send it."""
        if self.last is not None and self.roster.sound(self.last.aggregator):
            self.last, self.lacking = None, set()

    def undelivered(self, to: str, message: Commit | State) -> None:
        """Called when a message with the present version could not be delivered. Arrange that it is sent again, because
        the round may wait for that peer; do so ``resends`` times at most for each peer."""
        tries = self.resent.get(to, 0)
        if tries < self.rules.resends:
            self.resent[to], self.again[to] = tries + 1, message

    def send_again(self) -> list[Effect]:
        """Return a Send for each undelivered message whose receiver is live."""
        again, self.again = self.again, {}
        return [Send(peer, message) for peer, message in again.items() if self.roster.live(peer)]

    def _let_go_if_held(self) -> None:
        """Drop the last commit if no peer lacks it."""
        if not self.lacking:
            self.last = None
