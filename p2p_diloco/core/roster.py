"""The membership table: the live peers as this peer sees them, with the last Summary of each.

Law: a broken connection or a refused dial makes a peer suspect, and the next refused dial makes it dead. Silence makes
it dead, too (`probing`). Any message makes a dead peer live again, unless no probe reaches it.
"""

from __future__ import annotations

from dataclasses import replace
from operator import ge
from typing import Any, Literal

from .asked import Asked
from .messages import Summary
from .probing import Member, Probing
from .rules import Rules

Cost = Literal["leads", "works"]
"""By what a peer may cost the others a deadline: see `Roster.costs_a_deadline`."""


class Roster:
    """All peers that this peer knows, and its own Summary (``mine``)."""

    def __init__(self, me: str, rules: Rules, summary: Summary) -> None:
        self.me, self.rules = me, rules
        self.mine = summary
        # (epochs by fragment, samples) of this peer when all shards of each fragment were last at one epoch, on the
        # present lineage; ((), 0) if they never were: no peer counts fewer samples than that
        self.even: tuple[tuple[int, ...], int] = ((), 0)
        self.members: dict[str, Member] = {}
        # (what, grant) → the peers of the grant that have lately cost the others a deadline by this, and when
        self.costs: dict[tuple[Cost, str], dict[str, float]] = {}
        self.trimmed = set[str]()  # the peers of which it was logged that not all their samples count
        # grows when a peer comes, goes, or says something new of itself besides its speeds; and when this peer gets a
        # state or changes its role
        self.changes = 0
        self.probing = Probing(rules, self.members)
        self.asked = Asked(rules)
        self.says(epochs=summary.epochs)

    # -- questions

    def known(self, peer: str) -> bool:
        """Whether this peer has a record of the other one: a message came from it, the DHT lists it, or a commit names
        it."""
        return peer in self.members

    def live(self, peer: str) -> bool:
        """Whether the peer has sent a Summary and has neither died nor left. This peer itself is live."""
        return peer == self.me or (peer in self.members and self.members[peer].live)

    def sound(self, peer: str) -> bool:
        """Whether the peer is live and not suspect: since its last message no connection to it has broken and no dial
        was refused."""
        return self.live(peer) and (peer == self.me or not self.members[peer].suspect)

    def alive(self) -> list[str]:
        """Return all live peers except this one, sorted."""
        return sorted(peer for peer, member in self.members.items() if member.live)

    def workers(self) -> list[str]:
        """Return all live workers that hold a state of this peer's lineage and are not idle, this peer included."""
        here = {peer: member.summary for peer, member in self.members.items() if member.live} | {self.me: self.mine}
        return [peer for peer, s in here.items() if s is not None and _works(s) and not self.elsewhere(s)]

    def within_reach(self) -> list[str]:
        """Return all other peers that are live or presumed live, sorted."""
        return sorted(peer for peer, member in self.members.items() if member.live or member.presumed)

    def summary(self, peer: str) -> Summary | None:
        """Return the last Summary of a live peer; None for any other peer."""
        if peer == self.me:
            return self.mine
        member = self.members.get(peer)
        return member.summary if member is not None and member.live else None

    def summaries(self) -> dict[str, Summary]:
        """Return the Summaries of all live peers, this peer included, sorted by id."""
        known = {p: m.summary for p, m in self.members.items() if m.live and m.summary is not None}
        return dict(sorted({**known, self.me: self.mine}.items()))

    def came_at(self, fragment: int, epoch: int) -> set[str]:
        """Return the other peers that had reached this epoch of a fragment, or a later one, when they were first known
        to hold a state."""
        return {peer for peer, member in self.members.items() if member.came and member.came[fragment] >= epoch}

    def presumed(self, peer: str) -> bool:
        """Whether the peer is presumed live: a commit names it, it has not sent a Summary yet, and it was not found
        dead."""
        return peer in self.members and self.members[peer].presumed

    def met(self, peer: str) -> bool:
        """Whether a Summary of the peer has ever arrived."""
        return peer == self.me or (peer in self.members and self.members[peer].summary is not None)

    def away(self, peer: str) -> bool:
        """Whether the peer is known to be dead or to have left."""
        return peer in self.members and not self.members[peer].here

    def holds_state(self, peer: str) -> bool:
        """Whether the peer is live and holds a state."""
        summary = self.summary(peer)
        return summary is not None and bool(summary.epochs)

    def shared(self) -> bool:
        """Whether another peer, live or not yet forgotten, has held a state."""
        return any(member.came for member in self.members.values())

    def may_aggregate(self, peer: str) -> bool:
        """Whether the peer may aggregate: it is live and holds a state, or a commit names it and it has not sent a
        Summary yet."""
        return self.holds_state(peer) or self.presumed(peer)

    def can_hold(self, peer: str) -> bool:
        """Whether the peer can hold a commit before it is published. It can if it holds a state and its outer steps
        lead to the same digests as this peer's, or if it is presumed live. A live peer without a state can't: it must
        fetch the whole model first."""
        summary = self.summary(peer)
        return self.presumed(peer) if summary is None else bool(summary.epochs) and not summary.unlike

    def reachable(self, peer: str) -> bool:
        """Whether other peers can dial the peer, by its last Summary; True if the peer has not sent a Summary yet."""
        summary = self.summary(peer)
        return summary is None or summary.eligible

    def expelled(self, peer: str) -> bool:
        """Whether the peer has lied, so that it counts as dead for good."""
        return peer in self.members and self.members[peer].expelled

    def elsewhere(self, theirs: Summary) -> bool:
        """Whether a peer's Summary shows that the peer is on another lineage: its generation differs from this peer's,
        or it has reached the epochs of `even` in all fragments, and counts fewer samples than `even`.

        Along a lineage samples never fall, so the comparison also holds while this peer's shards are at different
        epochs. False if either peer holds no state.
        """
        if not theirs.epochs or not self.mine.epochs:
            return False
        if theirs.model.generation != self.mine.model.generation:
            return True
        epochs, samples = self.even
        return theirs.model.samples < samples and all(map(ge, theirs.epochs, epochs))

    # -- what happens

    def says(self, **changes: Any) -> None:
        """Change fields of this peer's own Summary."""
        before, self.mine = self.mine, replace(self.mine, **changes)
        epochs, model = self.mine.epochs, self.mine.model
        even = model.epochs == sum(epoch * len(self.rules.fragments[f]) for f, epoch in enumerate(epochs))
        if even and "epochs" in changes:  # else they may belong to a lineage that this peer leaves
            self.even = epochs, model.samples
        self.changes += (before.role, bool(before.epochs)) != (self.mine.role, bool(self.mine.epochs))

    def leaves_lineage(self) -> None:
        """Record that this peer joins another lineage: what it held before tells nothing of other peers' lineages."""
        self.even = ((), 0)

    def passes_over(self, peer: str, now: float) -> None:
        """Record that a round went on without a live peer: for ``forgotten_after`` no plan that this peer writes lets
        that peer aggregate."""
        if peer in self.members:
            self.members[peer].passed_until = now + self.rules.forgotten_after
            self.costs_a_deadline("leads", peer, now)

    def passed(self, peer: str) -> bool:
        """Whether a round has lately gone on without this live peer, or others of its grant put it behind."""
        return peer in self.members and (self.members[peer].passed_until > float("-inf") or self.behind("leads", peer))

    def granted(self, peer: str, grant: str, now: float) -> None:
        """Record by which grant the peer is in the run."""
        member = self.members.setdefault(peer, Member())
        if member.grant != grant:
            member.grant, member.since = grant, now

    def costs_a_deadline(self, what: Cost, peer: str, now: float) -> None:
        """Record that a round has waited for this peer in vain until a deadline: for its commit (``leads``) or for its
        contributions (``works``)."""
        if grant := self.members.get(peer, Member()).grant:
            self.costs.setdefault((what, grant), {})[peer] = now

    def behind(self, what: Cost, peer: str) -> bool:
        """Whether the peer waits behind the others because of what other peers of its grant have lately cost. After the
        first of them, those that came later are behind; after the second, all of the grant. So one invitation costs two
        deadlines at most in ``behind_for``, however many peers it makes; and where many machines share one, a
        single faulty machine puts none of those behind that are there already."""
        member = self.members.get(peer, Member())
        others = [when for other, when in self.costs.get((what, member.grant), {}).items() if other != peer]
        return len(others) > 1 or any(member.since > when for when in others)

    def discovered(self, peer: str) -> bool:
        """Record that the DHT lists this peer. Returns True if the peer was unknown, so that it should be probed."""
        if peer == self.me or peer in self.members:
            return False
        self.members[peer] = Member()
        self.changes += 1
        return True

    def name(self, peer: str) -> None:
        """Record that a commit names ``peer`` for the next round."""
        if peer == self.me:
            return
        member = self.members.setdefault(peer, Member())
        self.changes += not member.named
        member.named = True

    def heard(self, peer: str) -> bool:
        """Record that a message came from the peer. Returns True if the peer has sent no Summary yet or counted as
        dead.

        A late message of a peer that has left does not bring it back; a Summary of another incarnation does.
        """
        member = self.members.setdefault(peer, Member())
        member.unanswered = None
        if member.expelled or (member.dead and self.probing.is_deaf(member)):
            return False
        back = member.summary is None or member.dead
        self.changes += member.dead
        member.suspect, member.dead = False, False
        return back and member.left is None

    def expel(self, peer: str) -> bool:
        """Count the peer as dead for good. Returns False if it was expelled before."""
        member = self.members.setdefault(peer, Member())
        before, member.expelled, member.dead = member.expelled, True, True
        self.changes += 1
        return not before

    def summarized(self, peer: str, summary: Summary) -> bool:
        """Record a peer's Summary. Returns True if it shows that the peer has restarted and so has lost what was sent
        to its earlier incarnation.

        A Summary of the same incarnation with a lower model version is outdated and ignored.
        """
        member = self.members[peer]
        before = member.summary
        if before is not None and before.incarnation == summary.incarnation and summary.model < before.model:
            return False
        known = member.left if member.summary is None else member.summary.incarnation
        restarted = known not in (None, summary.incarnation)
        self.changes += restarted or before is None or _all_but_speeds(before) != _all_but_speeds(summary)
        member.came = summary.epochs if restarted or not member.came else member.came
        member.summary, member.left = summary, None if restarted else member.left
        return restarted

    def failed(self, peer: str) -> bool:
        """Record that a dial was refused or a stream broke. Returns True if this makes the peer dead."""
        member = self.members.setdefault(peer, Member())
        if member.suspect and not member.dead:
            member.dead = True
            self.changes += 1
            return True
        member.suspect = True
        return False

    def suspected(self, peer: str) -> None:
        """Record that a connection to the peer broke, which makes the peer suspect."""
        self.members.setdefault(peer, Member()).suspect = True

    def departed(self, peer: str, incarnation: int) -> bool:
        """Record that this incarnation of the peer has left. If the peer's known Summary is of another incarnation,
        record nothing and return False: either the peer has restarted since, or the Summary of this incarnation has not
        arrived."""
        member = self.members.setdefault(peer, Member())
        if member.summary is not None and member.summary.incarnation != incarnation:
            return False
        member.left = incarnation
        self.changes += 1
        return True

    def expire(self, now: float) -> list[str]:
        """Handle the end of a heartbeat interval, as `Probing.expire` does."""
        known, gone = len(self.members), self.probing.expire(now)
        since = now - self.rules.behind_for
        lately = {key: {peer: when for peer, when in of.items() if when > since} for key, of in self.costs.items()}
        self.costs = {key: of for key, of in lately.items() if of}
        self.changes += bool(gone) or len(self.members) != known
        return gone


def _all_but_speeds(summary: Summary) -> tuple[object, ...]:
    """What `Roster.changes` depends on in a Summary: all but the speeds of the peer's link and of its trainer."""
    s = summary
    return s.incarnation, s.role, s.eligible, s.model, s.epochs, s.idle, s.unlike, s.revision, s.paused


def _works(summary: Summary) -> bool:
    """Whether a peer with this Summary is a worker that holds a state and is not idle."""
    return summary.role == "worker" and bool(summary.epochs) and not summary.idle
