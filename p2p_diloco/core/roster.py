"""The other peers as this peer sees them: the last Summary of each, and whether it lives. Time is an argument.

Law: besides the peers that this peer waits for, a fixed number is probed per interval. A peer is dead once it was
silent for ``dead_after`` after a probe, once a second dial was refused, or once no probe has reached it for
``deaf_after`` intervals. Any message makes it live again, unless no probe reaches it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from .messages import Summary
from .rules import Rules
from .version import Version

PROBED_EACH_INTERVAL = 3
"""Peers probed per interval, besides those that this peer waits for."""
DOUBLINGS_MAX = 4
"""The time for which a peer's word is doubted, or others are asked before it, doubles at most so often."""


@dataclass(slots=True)
class Peer:
    """What is known of another peer."""

    summary: Summary | None = None
    came: tuple[int, ...] = ()  # its epochs when it was first known to hold a state
    probed: float = float("-inf")
    unanswered: float | None = None  # when the first probe after its last message was sent
    asked: bool = False  # probed since the last interval, and nothing is known to have arrived
    unreached: int = 0  # such intervals in a row
    suspect: bool = False  # a dial was refused or a connection broke since its last message
    dead: bool = False
    expelled: bool = False
    left: int | None = None  # the incarnation that left on purpose
    named: bool = False  # a plan names it: presumed live until found otherwise
    gone_since: float | None = None
    grant: str = ""  # by which it is in a private run
    since: float = float("-inf")  # when it showed its grant
    doubt: tuple[int, float] = (0, float("-inf"))  # how often fetching what it told was in vain; doubted until
    failed: tuple[int, float] = (0, float("-inf"))  # how often it didn't deliver; others come first until
    elsewhere: bool = False  # it told another lineage, or a newer state that is not believed, when it was last asked
    noted: set[str] = field(default_factory=set)  # the kinds of faults that were logged

    @property
    def here(self) -> bool:
        return not self.dead and self.left is None

    @property
    def live(self) -> bool:
        return self.summary is not None and self.here


class Roster:
    """All peers that this peer knows, and its own Summary (``mine``)."""

    def __init__(self, me: str, rules: Rules, mine: Summary) -> None:
        self.me, self.rules, self.mine = me, rules, mine
        self.peers: dict[str, Peer] = {}
        self.outvoted: set[tuple[int, int]] = set()  # the first (fragment, epoch) that most others have otherwise
        self.costs: dict[str, dict[str, float]] = {}  # by grant: whose rounds were waited for in vain, and when

    # -- questions

    def live(self, peer: str) -> bool:
        """Whether the peer has sent a Summary and has neither died nor left. This peer itself is live."""
        return peer == self.me or (peer in self.peers and self.peers[peer].live)

    def alive(self) -> list[str]:
        """Return all live peers except this one, sorted."""
        return sorted(peer for peer, record in self.peers.items() if record.live)

    def presumed(self, peer: str) -> bool:
        """Whether a plan names the peer, it has not sent a Summary yet, and it was not found dead."""
        record = self.peers.get(peer)
        return record is not None and record.named and record.summary is None and record.here

    def away(self, peer: str) -> bool:
        """Whether the peer is known to be dead or to have left."""
        return peer in self.peers and not self.peers[peer].here

    def summary(self, peer: str) -> Summary | None:
        """Return the last Summary of a live peer; None for any other peer."""
        if peer == self.me:
            return self.mine
        record = self.peers.get(peer)
        return record.summary if record is not None and record.live else None

    def summaries(self) -> dict[str, Summary]:
        """Return the Summaries of all live peers, this peer included, sorted by id."""
        known = {p: r.summary for p, r in self.peers.items() if r.live and r.summary is not None}
        return dict(sorted({**known, self.me: self.mine}.items()))

    def holds_state(self, peer: str) -> bool:
        """Whether the peer is live and holds a state."""
        summary = self.summary(peer)
        return summary is not None and bool(summary.heads)

    def tells(self, peer: str, fragment: int, version: Version) -> bool:
        """Whether the peer's Summary says that it holds this version."""
        summary = self.summary(peer)
        heads = () if summary is None else summary.heads
        return bool(heads) and heads[fragment] == (version.epoch, version.chain)

    def is_elsewhere(self, peer: str) -> bool:
        """Whether the peer told another lineage, or a newer state that is not believed, when it was last asked."""
        return peer in self.peers and self.peers[peer].elsewhere

    def holders(self) -> list[str]:
        """Return the other live peers that hold a state, sorted."""
        return [peer for peer in self.alive() if self.holds_state(peer)]

    def shared(self) -> bool:
        """Whether another peer, live or not yet forgotten, has held a state."""
        return any(record.came for record in self.peers.values())

    def is_costly(self, peer: str) -> bool:
        """Whether rounds don't wait long for the peer because of what others of its grant have lately cost. After the
        first of them, those that came later are costly; after the second, all of the grant. So one invitation costs few
        waits, however many peers it makes; and where many machines share one, a single faulty machine makes none of
        those costly that are there already."""
        record = self.peers.get(peer, Peer())
        others = [when for other, when in self.costs.get(record.grant, {}).items() if other != peer]
        return len(others) > 1 or any(record.since > when for when in others)

    def expelled(self, peer: str) -> bool:
        return peer in self.peers and self.peers[peer].expelled

    # -- what happens

    def says(self, **changes: Any) -> None:
        """Change fields of this peer's own Summary."""
        if (changed := replace(self.mine, **changes)) != self.mine:
            self.mine = replace(changed, number=self.mine.number + 1)

    def granted(self, peer: str, grant: str, now: float) -> None:
        """Record by which grant the peer is in the run."""
        record = self.peers.setdefault(peer, Peer())
        if record.grant != grant:
            record.grant, record.since = grant, now

    def is_new(self, kind: str, peer: str) -> bool:
        """Record that a fault of this kind is logged for the peer. Return whether it was not logged before."""
        noted = self.peers.setdefault(peer, Peer()).noted
        before = kind in noted
        noted.add(kind)
        return not before

    def costs_a_deadline(self, peer: str, now: float) -> None:
        """Record that rounds have waited for the peer in vain, until their deadlines."""
        self.costs.setdefault(self.peers.get(peer, Peer()).grant or peer, {})[peer] = now

    def doubt(self, peer: str, now: float) -> None:
        """Record that fetching what the peer told was in vain: its word is doubted for a while, for twice as long each
        further time. Not for good: its link may have been cut."""
        record = self.peers.setdefault(peer, Peer())
        times, until = record.doubt
        if now >= until:
            self.costs_a_deadline(peer, now)
            record.doubt = times + 1, now + self.rules.fetch_again * (2 << min(times, DOUBLINGS_MAX))

    def doubted(self, peer: str, now: float) -> bool:
        """Whether the peer's word is doubted."""
        return peer in self.peers and now < self.peers[peer].doubt[1]

    def fails(self, peer: str, now: float) -> None:
        """Record that a peer has delivered nothing of what was asked, or a wrong state: others get their turn first.
        Nothing bars it for good: it may be the only one."""
        record = self.peers.setdefault(peer, Peer())
        times, _ = record.failed
        wait = min(self.rules.settle * 2 ** min(times, DOUBLINGS_MAX), self.rules.fetch_again)
        record.failed = times + 1, now + wait

    def delivers(self, peer: str) -> None:
        """Record that a peer has delivered what was asked of it."""
        if peer in self.peers:
            self.peers[peer].failed = Peer().failed

    def has_cost(self, peer: str) -> bool:
        """Whether rounds have lately waited for the peer in vain."""
        return peer in self.costs.get(self.peers.get(peer, Peer()).grant or peer, {})

    def name(self, peer: str) -> None:
        """Record that a plan names the peer."""
        if peer != self.me:
            self.peers.setdefault(peer, Peer()).named = True

    def discovered(self, peer: str) -> bool:
        """Record that the DHT lists this peer. Return whether it was unknown."""
        if peer == self.me or peer in self.peers:
            return False
        self.peers[peer] = Peer()
        return True

    def heard(self, peer: str) -> bool:
        """Record that a message came from the peer. Return whether it has sent no Summary yet or counted as dead. A
        late message of a peer that has left does not bring it back."""
        record = self.peers.setdefault(peer, Peer())
        record.unanswered = None
        if record.expelled or (record.dead and self._deaf(record)):
            return False
        back = record.summary is None or record.dead
        record.suspect, record.dead = False, False
        return back and record.left is None

    def summarized(self, peer: str, summary: Summary) -> bool:
        """Record a peer's Summary, unless a newer one has overtaken it. Return whether it shows that the peer has
        restarted. Its incarnation may be lower than before: clocks are wrong."""
        record, last = self.peers[peer], self.peers[peer].summary
        if last is not None and last.incarnation == summary.incarnation and last.number > summary.number:
            return False
        known = record.left if last is None else last.incarnation
        restarted = known not in (None, summary.incarnation)
        record.came = summary.epochs if restarted or not record.came else record.came
        record.summary, record.left = summary, None if restarted else record.left
        return restarted

    def departed(self, peer: str, incarnation: int) -> bool:
        """Record that this incarnation of the peer has left; False if another one is known."""
        record = self.peers.setdefault(peer, Peer())
        if record.summary is not None and record.summary.incarnation != incarnation:
            return False
        record.left = incarnation
        return True

    def failed(self, peer: str) -> bool:
        """Record that a dial was refused. Return whether this makes the peer dead: the second refusal does."""
        record = self.peers.setdefault(peer, Peer())
        if record.suspect and not record.dead:
            record.dead = True
            return True
        record.suspect = True
        return False

    def expel(self, peer: str) -> bool:
        """Count the peer as dead for good; False if it was expelled before."""
        record = self.peers.setdefault(peer, Peer())
        before, record.expelled, record.dead = record.expelled, True, True
        return not before

    # -- probing

    def probe(self, peer: str, now: float) -> None:
        """Record that a probe is sent to the peer now."""
        record = self.peers.setdefault(peer, Peer())
        record.probed, record.asked = now, True
        record.unanswered = now if record.unanswered is None else record.unanswered

    def reached(self, peer: str) -> None:
        """Record that a message has reached the peer."""
        if peer in self.peers:
            self.peers[peer].asked, self.peers[peer].unreached = False, 0

    def to_probe(self, watched: Collection[str], now: float) -> list[str]:
        """Return the peers to probe now: those that are waited for, those not probed for longest, and now and then a
        dead one, so that the end of a cut is noticed."""
        others = [p for p, r in self.peers.items() if p not in watched and r.left is None and not r.expelled]
        others.sort(key=lambda peer: (self.peers[peer].probed, peer))
        quiet = [peer for peer in others if not self.peers[peer].dead]
        dead = [p for p in others if self.peers[p].dead and now - self.peers[p].probed >= self.rules.dead_after]
        return sorted(watched) + quiet[:PROBED_EACH_INTERVAL] + dead[:1]

    def expire(self, now: float) -> list[str]:
        """Handle the end of an interval: return the peers just found dead, and forget those gone for long."""
        for peer, record in list(self.peers.items()):
            if record.here:
                record.gone_since = None
            elif record.gone_since is None:
                record.gone_since = now
            elif now - record.gone_since >= self.rules.forgotten_after and not record.expelled:
                del self.peers[peer]
        since, gone = now - self.rules.costs_for, []
        self.costs = {grant: {p: t for p, t in of.items() if t > since} for grant, of in self.costs.items()}
        self.costs = {grant: of for grant, of in self.costs.items() if of}
        for peer, record in sorted(self.peers.items()):
            silent = record.unanswered is not None and now - record.unanswered >= self.rules.dead_after
            record.unreached += record.asked and record.here
            record.asked = False
            if (silent or self._deaf(record)) and record.here:
                record.dead = True
                gone.append(peer)
        return gone

    def forgive(self, now: float) -> None:
        """Let each wait for an answer begin again: this process was suspended, so silence proves nothing."""
        for record in self.peers.values():
            if record.unanswered is not None:
                record.unanswered = now

    def _deaf(self, record: Peer) -> bool:
        return record.unreached >= self.rules.deaf_after
