"""Liveness of peers: which peers are probed, and when they count as dead. Time is an argument, never read.

Law: besides the peers that this peer waits for, a fixed number of peers is probed per interval, however many peers the
run has. A peer counts as dead once it has been silent for ``dead_after`` after a probe. A peer whose messages arrive,
but which no probe has reached for ``deaf_after`` intervals, counts as dead until a probe reaches it: a link that works
only in one direction counts as cut.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .messages import Summary
from .rules import Rules

PROBED_EACH_INTERVAL = 3
"""Peers probed per interval, besides the peers that this peer waits for."""


@dataclass(slots=True)
class Member:
    """What is known of one other peer."""

    summary: Summary | None = None
    came: tuple[int, ...] = ()  # the lowest epoch per fragment in its first Summary with a state
    probed: float = float("-inf")  # when it was last probed
    unanswered: float | None = None  # when the first probe after the peer's last message was sent
    asked: bool = False  # a probe was sent since the last interval, and none is known to have arrived
    unreached: int = 0  # intervals in a row in which a probe was sent and nothing is known to have arrived
    suspect: bool = False  # a dial was refused or a connection broke; no message has come since
    dead: bool = False
    expelled: bool = False  # the peer has lied: it stays dead, and is neither probed nor forgotten
    left: int | None = None  # the incarnation that left on purpose
    named: bool = False  # a commit names the peer, so it is presumed to live and to hold a state until found otherwise
    passed_until: float = float("-inf")  # when the peer may aggregate again, after a round went on without it
    grant: str = ""  # by which it is in a private run; empty in an open run
    since: float = float("-inf")  # when it showed its grant
    missed: bool = False  # whether it was logged that the peer has missed several rounds in a row
    gone_since: float | None = None  # when it was first found dead or departed

    @property
    def here(self) -> bool:
        """Whether the peer has neither died nor left."""
        return not self.dead and self.left is None

    @property
    def live(self) -> bool:
        """Whether the peer has sent a Summary and has neither died nor left."""
        return self.summary is not None and self.here

    @property
    def presumed(self) -> bool:
        """Whether the peer is presumed live: a commit names it, it has not sent a Summary yet, and it was not found
        dead."""
        return self.named and self.summary is None and self.here


class Probing:
    """Decides which peers are probed. Counts a peer as dead if it does not answer, or if no probe reaches it."""

    def __init__(self, rules: Rules, members: dict[str, Member]) -> None:
        self.rules, self.members = rules, members

    def probe(self, peer: str, now: float) -> None:
        """Record that a probe is sent to the peer now."""
        member = self.members.setdefault(peer, Member())
        member.probed = now
        if member.unanswered is None:
            member.unanswered = now
        member.asked = True

    def to_probe(self, watched: Collection[str], now: float) -> list[str]:
        """Return the peers to probe now: the ``watched`` peers, then those whose last probe is longest ago, and from
        time to time a dead peer, so that the end of a partition is noticed."""
        others = [peer for peer, member in self.members.items() if peer not in watched and member.left is None]
        others = [peer for peer in others if not self.members[peer].expelled]
        others.sort(key=lambda peer: (self.members[peer].probed, peer))
        quiet = [peer for peer in others if not self.members[peer].dead]
        dead = [p for p in others if self.members[p].dead and now - self.members[p].probed >= self.rules.dead_after]
        return sorted(watched) + quiet[:PROBED_EACH_INTERVAL] + dead[:1]

    def expire(self, now: float) -> list[str]:
        """Handle the end of a heartbeat interval. Return the peers that have just been found dead, because they were
        silent or because no probe reaches them. Remove peers that have been gone for ``forgotten_after``."""
        gone = []
        for peer, member in list(self.members.items()):
            if now >= member.passed_until:
                member.passed_until = float("-inf")
            if member.here:
                member.gone_since = None
            elif member.gone_since is None:
                member.gone_since = now
            elif now - member.gone_since >= self.rules.forgotten_after and not member.expelled:
                del self.members[peer]
        for peer, member in sorted(self.members.items()):
            silent = member.unanswered is not None and now - member.unanswered >= self.rules.dead_after
            member.unreached += member.asked and member.here
            member.asked = False
            if (silent or self.is_deaf(member)) and member.here:
                member.dead = True
                gone.append(peer)
        return gone

    def why_dead(self, peer: str) -> str:
        """Return the reason why `expire` found the peer dead, as a text for the log."""
        member = self.members[peer]
        if self.is_deaf(member):
            return f"sends messages, but no probe has reached it in {member.unreached} intervals"
        return f"was silent for {self.rules.dead_after:g} s"

    def forgive(self, now: float) -> None:
        """Let the wait for each unanswered probe begin again. Called when this process was suspended, because the other
        peers' silence then proves nothing."""
        for member in self.members.values():
            if member.unanswered is not None:
                member.unanswered = now

    def reached(self, peer: str) -> None:
        """Record that a message has reached the peer, so the link to it works."""
        if peer in self.members:
            self.members[peer].asked, self.members[peer].unreached = False, 0

    def is_deaf(self, member: Member) -> bool:
        """Whether the peer counts as deaf: for ``deaf_after`` intervals in a row, no probe is known to have reached
        it."""
        return member.unreached >= self.rules.deaf_after
