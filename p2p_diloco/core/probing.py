"""Whether peers live: which of them are asked, and what their silence means. Time is an argument, never read.

Law: the number of probes in an interval does not grow with the swarm, beside those of peers that this one waits for.
Silence for ``dead_after`` is a verdict. So is a link that carries nothing one way: a peer that is heard while no probe
arrives there is dead until one does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .messages import Summary
from .rules import Rules

PROBED_EACH_INTERVAL = 3
"""Peers probed per interval beside those waited for."""


@dataclass(slots=True)
class Member:
    summary: Summary | None = None
    probed: float = float("-inf")
    unanswered: float | None = None  # when the oldest probe left after which nothing was heard
    asked: bool = False  # a probe has left since the last interval, or since something is known to have arrived
    unreached: int = 0  # intervals in a row in which a probe left, and nothing arrived
    suspect: bool = False
    dead: bool = False
    left: int | None = None  # the incarnation that said goodbye
    named: bool = False  # a commit names it, so it holds state and is alive unless it turns out otherwise
    gone_since: float | None = None  # when it was first found dead or departed

    @property
    def here(self) -> bool:
        return not self.dead and self.left is None

    @property
    def live(self) -> bool:
        return self.summary is not None and self.here

    @property
    def presumed(self) -> bool:
        return self.named and self.summary is None and self.here


class Probing:
    def __init__(self, rules: Rules, members: dict[str, Member]) -> None:
        self.rules, self.members = rules, members

    def probe(self, peer: str, now: float) -> None:
        """Note that a probe leaves."""
        member = self.members.setdefault(peer, Member())
        member.probed = now
        if member.unanswered is None:
            member.unanswered = now
        member.asked = True

    def to_probe(self, watched: Collection[str], now: float) -> list[str]:
        """Those waited for, then the ones not probed for longest; the dead now and then, so that a cut can heal."""
        others = [peer for peer, member in self.members.items() if peer not in watched and member.left is None]
        others.sort(key=lambda peer: (self.members[peer].probed, peer))
        quiet = [peer for peer in others if not self.members[peer].dead]
        dead = [p for p in others if self.members[p].dead and now - self.members[p].probed >= self.rules.dead_after]
        return sorted(watched) + quiet[:PROBED_EACH_INTERVAL] + dead[:1]

    def expire(self, now: float) -> list[str]:
        """An interval has passed: the peers that have just become dead by silence, or because nothing arrives at them.
        Those gone for long are forgotten."""
        gone = []
        for peer, member in list(self.members.items()):
            if member.here:
                member.gone_since = None
            elif member.gone_since is None:
                member.gone_since = now
            elif now - member.gone_since >= self.rules.forgotten_after:
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
        """Why `expire` has found the peer dead."""
        member = self.members[peer]
        if self.is_deaf(member):
            return f"is heard, but no probe has arrived there in {member.unreached} intervals"
        return "never answered" if member.summary is None else f"is silent for {self.rules.dead_after:g} s"

    def forgive(self, now: float) -> None:
        """This process stood still, so silence so far says nothing."""
        for member in self.members.values():
            if member.unanswered is not None:
                member.unanswered = now

    def reached(self, peer: str) -> None:
        """Something has arrived at the peer, so the link to it works."""
        if peer in self.members:
            self.members[peer].asked, self.members[peer].unreached = False, 0

    def is_deaf(self, member: Member) -> bool:
        """Whether nothing arrives at the peer."""
        return member.unreached >= self.rules.deaf_after
