"""Handles peers that come, go, become private or reachable, or send their Summary, and tells the logs and `catchup`.

Law: the roster stores what is known of a peer. This peer probes all other peers at once if rounds depend on a change in
its own Summary.
"""

from __future__ import annotations

from . import passing
from .catchup import CatchUp
from .events import Died, Effect, Note, Send
from .logs import Logs
from .messages import Leave, Probe, ProbeAck, Summary
from .revision import Revision
from .roster import Roster


class Presence:
    """Sends this peer's probes, and handles membership messages, silence and refused dials."""

    def __init__(self, logs: Logs, roster: Roster, catchup: CatchUp) -> None:
        self.logs, self.roster, self.catchup = logs, roster, catchup

    # -- this peer tells

    def probe(self, peer: str, now: float) -> list[Effect]:
        """Send the peer a probe with this peer's Summary."""
        self.roster.probing.probe(peer, now)
        return [Send(peer, Probe(self.roster.mine))]

    def tell_all(self, now: float) -> list[Effect]:
        """Probe all live peers, and all peers that a plan names but that have not sent a Summary yet. Called when this
        peer's own Summary has changed in a way that affects rounds."""
        return [effect for peer in self.roster.within_reach() for effect in self.probe(peer, now)]

    def turns(self, reachable: bool, now: float) -> list[Effect]:
        """Handle the news that other peers can dial this peer (``reachable``), or that they no longer can. Tell all
        peers."""
        if reachable == self.roster.mine.eligible:
            return []
        self.roster.says(eligible=reachable)
        text = "other peers can dial this peer" if reachable else "other peers can't dial this peer: it is private"
        return [Note("reachable", text), *self.tell_all(now), *self._advance(now)]

    def leave(self, died: bool) -> list[Effect]:
        """Tell all live peers that this peer leaves: on purpose, or because its trainer ``died``."""
        return [Send(peer, Leave(self.roster.mine.incarnation, died)) for peer in self.roster.alive()]

    def learn(self, *heard: Revision) -> list[Effect]:
        """Handle revisions that this peer has heard of, or that its shards have reached. The highest revision becomes
        the one that this peer knows, and that its next commits and probes name."""
        mine = self.roster.mine
        highest = max(mine.revision, *heard)
        if highest == mine.revision:
            return []
        self.roster.says(revision=highest)
        if self.logs.revision == highest:
            return []
        return [Note("revision", f"this peer has learnt of {highest}; each shard adopts it with its next commit")]

    # -- others tell

    def received(self, sender: str, message: Probe | ProbeAck | Leave, now: float) -> list[Effect]:
        """Handle a probe, its answer, or a peer's departure."""
        if isinstance(message, ProbeAck):
            self.roster.probing.reached(sender)
        back = self.roster.heard(sender)
        match message:
            case Probe(summary):
                return [Send(sender, ProbeAck(self.roster.mine)), *self._summarized(sender, summary, back, now)]
            case ProbeAck(summary):
                return self._summarized(sender, summary, back, now)
            case Leave(incarnation, died):
                if not self.roster.departed(sender, incarnation):
                    return []
                if died:
                    return self._died(sender, "trainer", "lost its trainer, which ended without leaving", now)
                return [Note("left", f"{sender} left the run"), *self._lost(sender, now)]

    def _summarized(self, peer: str, summary: Summary, back: bool, now: float) -> list[Effect]:
        """Handle the Summary that a peer sent. ``back``: whether the peer had sent no Summary before or counted as
        dead."""
        before = self.roster.summary(peer)
        restarted = self.roster.summarized(peer, summary)
        back = back or (before is None and self.roster.live(peer))
        effects = self.learn(summary.revision)
        if restarted:
            effects += self.catchup.gone(peer, now)
            for log in self.logs:
                log.forgotten_by(peer)
        for shard in range(len(self.logs)) if summary.epochs else ():
            log = self.logs.look_at(shard)
            version = log.version if peer in log.outgoing.lacking else None
            if version is not None and summary.epochs[log.fragment] >= version.epoch:
                self.logs[shard].outgoing.reached(peer)
        if back:
            effects.append(Note("joined", f"{peer} joined"))
        turned = before is None or (before.idle, before.eligible) != (summary.idle, summary.eligible)
        if back or restarted or before is None or turned or not before.epochs:
            effects += self._advance(now)
        return effects + self.catchup.seen(peer, summary.model, now)

    def _advance(self, now: float) -> list[Effect]:
        """Called after a peer's Summary has changed: let each shard's log do what is due now."""
        return [effect for log in self.logs for effect in log.advance(now)]

    # -- silence and refused dials

    def failed(self, peer: str, now: float) -> list[Effect]:
        """Handle a refused dial or a broken stream: probe the peer or, if it was suspect already, count it as dead."""
        if not (self.roster.live(peer) or self.roster.presumed(peer)):
            return []
        if self.roster.failed(peer):
            return self._died(peer, "node", "can't be reached any more", now)
        return self.probe(peer, now)

    def expel(self, peer: str, reason: str, now: float) -> list[Effect]:
        """Handle the proof that a peer has lied: it counts as dead for good."""
        if not self.roster.expel(peer):
            return []
        return [Note("expelled", f"{peer} is expelled: {reason}"), *self._lost(peer, now)]

    def tick(self, now: float) -> list[Effect]:
        """Handle the end of a heartbeat interval: find peers that died, and probe some peers."""
        effects: list[Effect] = []
        for peer in self.roster.expire(now):
            effects += self._died(peer, "silent", self.roster.probing.why_dead(peer), now)
        for peer in self.roster.probing.to_probe(self._watched(), now):
            effects += self.probe(peer, now)
        return effects

    def _died(self, peer: str, cause: str, reason: str, now: float) -> list[Effect]:
        """Handle a peer's death. ``reason``: the rest of a sentence that begins with the peer."""
        summary = self.roster.members[peer].summary
        if summary is None:  # it may have left on purpose before this peer came
            return [Note("absent", f"{peer} never answered"), *self._lost(peer, now)]
        return [Note("died", f"{peer} {reason}"), Died(peer, summary.incarnation, cause), *self._lost(peer, now)]

    def _lost(self, peer: str, now: float) -> list[Effect]:
        """Handle a peer that died or left: tell `catchup` and the log of each shard."""
        effects = self.catchup.gone(peer, now)
        for log in self.logs:
            passing.forgive_all_but(peer, log)
            effects += log.lost(peer, now)
        return effects

    def _watched(self) -> set[str]:
        """Return the peers that this replica waits for."""
        watched: set[str] = set()
        for log in self.logs:
            watched |= log.watched()
        return {*watched, self.catchup.donor or ""} - {self.roster.me, ""}
