"""What brings other peers to a shard's present version: its last commit, and what has to be sent to them again."""

from __future__ import annotations

from .events import Effect, Send
from .messages import Commit, State
from .roster import Roster
from .rules import Rules
from .version import Version


class Outgoing:
    def __init__(self, rules: Rules, roster: Roster) -> None:
        self.rules, self.roster = rules, roster
        self.last: Commit | None = None  # the commit that made the present version, while a peer may lack it
        self.lacking: set[str] = set()  # the peers that may
        self.again: dict[str, Commit | State] = {}  # of the present version, to peers that it did not reach
        self.resent: dict[str, int] = {}  # by peer: how often something was sent again

    def appended(self, commit: Commit) -> None:
        """The commit has made the present version."""
        self.last, self.lacking = commit, set(self.roster.alive()) - {commit.aggregator}
        self._let_go_if_held()

    def adopted(self) -> None:
        """The present version was fetched; a peer that lacks it takes the whole state."""
        self.last, self.lacking = None, set()

    def renew(self, state: State) -> None:
        """The version is another. Where an old state was to be sent again, the new one is; an old commit is not."""
        self.again = {peer: state for peer, message in self.again.items() if isinstance(message, State)}
        self.resent = {}

    def news(self, state: State, peer: str, base: Version | None) -> Commit | State:
        """What brings a peer from ``base`` to here: the last commit, if that does and the peer can apply it, or the
        whole state."""
        summary = self.roster.summary(peer)
        unlike = summary is not None and summary.unlike
        return state if self.last is None or self.last.base != base or unlike else self.last

    def reached(self, peer: str) -> None:
        """A peer has the present version. When no live peer lacks it, its payload is given up: newcomers take the whole
        state."""
        self.lacking.discard(peer)
        self._let_go_if_held()

    def let_go(self) -> None:
        """Its memory is needed, and its author is there to send it. If the author may be gone, the commit stays: then
        those that lack it have to ask."""
        if self.last is not None and self.roster.sound(self.last.aggregator):
            self.last, self.lacking = None, set()

    def undelivered(self, to: str, message: Commit | State) -> None:
        """What makes the present version did not reach a peer, and all may be waiting for that peer."""
        tries = self.resent.get(to, 0)
        if tries < self.rules.resends:
            self.resent[to], self.again[to] = tries + 1, message

    def send_again(self) -> list[Effect]:
        """What did not reach a peer that lives."""
        again, self.again = self.again, {}
        return [Send(peer, message) for peer, message in again.items() if self.roster.live(peer)]

    def _let_go_if_held(self) -> None:
        if not self.lacking:
            self.last = None
