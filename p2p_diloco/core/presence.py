"""Peers that come, go, or tell something new of themselves; and what this peer tells.

Law: the roster stores what is known of a peer, this module acts on it. This peer probes all others at once if rounds
depend on a change in its own Summary.
"""

from __future__ import annotations

from . import digests, waits
from . import events as e
from . import messages as m
from .revision import Revision
from .roster import Roster
from .rounds import Rounds
from .version import model_version


class Presence:
    """This peer's Summary and probes, and the other peers' lives."""

    def __init__(self, roster: Roster, rounds: Rounds) -> None:
        self.roster, self.rounds = roster, rounds
        self.logs, self.own = rounds.logs, rounds.exchange

    def probe(self, peer: str, now: float) -> list[e.Effect]:
        self.roster.probe(peer, now)
        self.describe(now)
        return [e.Send(peer, m.Probe(self.roster.mine))]

    def tell_all(self, now: float) -> list[e.Effect]:
        """Probe all peers at once: rounds depend on a change in this peer's Summary."""
        within = [p for p in sorted(self.roster.peers) if self.roster.live(p) or self.roster.presumed(p)]
        return [effect for peer in within for effect in self.probe(peer, now)]

    def summarized(self, peer: str, summary: m.Summary, back: bool, now: float) -> list[e.Effect]:
        before = self.roster.summary(peer)
        restarted = self.roster.summarized(peer, summary)
        effects = self.learn(summary.revision)
        if restarted:
            effects += self.rounds.lost(peer, now)
        if back or restarted:
            effects.append(e.Note("joined", f"{peer} joined"))
        if before != summary:
            effects += self.advance(now)
        return effects

    def learn(self, revision: Revision) -> list[e.Effect]:
        if revision <= self.roster.mine.revision:
            return []
        self.roster.says(revision=revision)
        return [e.Note("revision", f"this peer has learnt of {revision}; each fragment adopts it with its next commit")]

    def left(self, peer: str, incarnation: int, now: float, *, died: bool) -> list[e.Effect]:
        self.roster.heard(peer)
        if not self.roster.departed(peer, incarnation):
            return []
        if died:
            return self.died(peer, "trainer", "lost its trainer, which ended without leaving", now)
        return [e.Note("left", f"{peer} left the run"), *self.rounds.lost(peer, now)]

    def failed(self, peer: str, now: float) -> list[e.Effect]:
        """Handle a refused dial: probe the peer or, if it was suspect already, count it as dead."""
        if not (self.roster.live(peer) or self.roster.presumed(peer)):
            return []
        if self.roster.failed(peer):
            return self.died(peer, "node", "can't be reached any more", now)
        return self.probe(peer, now)

    def died(self, peer: str, cause: str, reason: str, now: float) -> list[e.Effect]:
        summary, lost = self.roster.peers[peer].summary, self.rounds.lost(peer, now)
        if summary is None:
            return [e.Note("absent", f"{peer} never answered"), *lost]
        return [e.Note("died", f"{peer} {reason}"), e.Died(peer, summary.incarnation, cause), *lost]

    def advance(self, now: float) -> list[e.Effect]:
        return [effect for log in self.logs for effect in self.rounds.advance(log, now)]

    def describe(self, now: float) -> None:
        """Update this peer's own Summary."""
        versions = [log.held.version for log in self.logs] if all(log.state is not None for log in self.logs) else []
        heads = tuple((version.epoch, version.chain) for version in versions)
        waited = [(log.fragment, waits.awaits(log, now)) for log in self.logs]
        self.roster.says(
            model=model_version(versions), heads=heads, sent=self.own.sent(),
            awaits=tuple((f, peers) for f, peers in waited if peers), incarnation=self.own.incarnation,
            digests=tuple(map(digests.told, self.logs)) if versions else (),
        )  # fmt: skip
