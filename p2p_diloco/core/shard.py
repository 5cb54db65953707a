"""One shard's log of commits, as one replica holds it: its state, the round after it, and how the next state is made.

Law: one state machine for both modes. A commit is drafted, computed, offered to the peers that must hold it (in
synchronous mode none), and appended. Each method handles one event and returns its effects; other peers are read only
through the roster. A mode's subclass decides which contributions count, when the round closes, which peers must hold a
commit, and which peers the next plan names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from . import contest, lending
from .admission import bounded, not_entitled, objection
from .attendance import Attendance
from .credit import credited, trimmed
from .events import Accept, Apply, Average, Averaged, Complaint, Effect, Note, Send
from .incoming import Incoming
from .leadership import Leadership
from .messages import Commit, Contribution, Held, Outdated, Plan, Promise, State, TakeOver
from .outgoing import Outgoing
from .proposal import Proposal
from .revision import FOUNDED, Revision
from .roster import Roster
from .round import Round
from .rules import Rules
from .sending import Sending
from .state import append, fetched, final, meta_of, relation
from .version import Version, descends

Contributions = tuple[tuple[str, Contribution], ...]


class ShardLog(ABC):
    """One shard's log: the part that both modes share."""

    def __init__(self, shard: int, rules: Rules, roster: Roster, attendance: Attendance, own: Sending) -> None:
        self.shard, self.fragment, self.me = shard, attendance.fragment, roster.me
        self.rules, self.roster, self.attendance = rules, roster, attendance
        self.state: State | None = None  # without its payload
        self.counts_me = False  # whether the commit that made the present version counts this peer
        self.frozen, self.averages = False, 0  # whether this lineage is about to be replaced; Averages begun so far
        self.round = Round(Leadership(roster, None))
        self.incoming, self.outgoing, self.own = Incoming(rules, roster), Outgoing(rules, roster), own

    # -- questions

    @property
    def version(self) -> Version | None:
        return None if self.state is None else self.state.version

    @property
    def lead(self) -> Leadership:
        return self.round.lead

    @property
    def final(self) -> bool:
        """Whether the run ends for this shard at its present version."""
        return final(self.state, self.rules)

    @property
    def revision_next(self) -> Revision:
        """The revision of the commit that this peer would write next: never below that of the present state."""
        return max(self.roster.mine.revision, FOUNDED if self.state is None else self.state.revision)

    @property
    def collected(self) -> int:
        """The number of other peers' payloads stored here, for the round or for versions that are not reached yet."""
        return len(self.round.inbox) - (self.me in self.round.inbox) + len(self.incoming)

    def relation(self, theirs: Version) -> str:
        """Return how a version relates to the present one, as `state.relation` does."""
        return relation(self.state, theirs)

    def unpromised(self) -> list[str]:
        """Return the live peers whose promise is missing, as `Leadership.unpromised` does."""
        return self.lead.unpromised()

    @property
    def aggregating(self) -> bool:
        """Whether this peer holds the term and has all promises that it needs."""
        return self.lead.holder == self.me and not self.unpromised()

    def donors(self) -> list[str]:
        """Return the other live peers that hold a state. They may have undamaged tensors of this shard."""
        return [p for p in self.roster.alive() if self.roster.holds_state(p)]

    def _able(self) -> bool:
        """Whether this peer may make a commit now."""
        busy = self.frozen or self.round.working is not None or self.round.damaged is not None
        return self.state is not None and not busy and self.aggregating and (self.round.trusted or not self.final)

    # -- questions that a mode answers

    @property
    @abstractmethod
    def needed(self) -> int:
        """How many contributors an outer step needs at least; in asynchronous mode, how many live workers."""

    @abstractmethod
    def waited_for(self) -> list[str]:
        """Return the peers that the next commit waits for."""

    @abstractmethod
    def watched(self) -> set[str]:
        """Return the peers that this shard waits for, so that they are probed often."""

    @abstractmethod
    def closes_at(self) -> float | None:
        """Return when the round will close if no more messages arrive; None if it will not close without them."""

    @abstractmethod
    def next_plan(self, contributors: set[str], now: float) -> Plan:
        """Return the plan that the next commit contains. ``contributors``: the peers that this commit counts."""

    # -- this peer's own contribution

    def contribute(self, mine: Contribution, now: float) -> list[Effect]:
        """Begin to send a new contribution of this peer."""
        self.own.begin(mine)
        return self.deliver(now)

    def deliver(self, now: float) -> list[Effect]:
        """Send this peer's own contribution to the aggregator, or collect it if this peer aggregates. Nothing is sent
        if the contribution has arrived there, is on its way, or can no longer be counted."""
        mine = self.own.mine
        if mine is None or not self.own.sendable(self.version):
            return []
        _, holder = self.lead.target()
        if holder == self.me:
            self.own.handed = self.me
            return self.collect(self.me, mine, now)
        return self.own.send_to(holder) if self.roster.live(holder) or self.roster.presumed(holder) else []

    def wanted(self, sender: str, base: Version, now: float) -> list[Effect]:
        """Handle a request for this peer's contribution: send it again if the aggregator asks. The plan's first
        aggregator may ask too, because a peer that claimed the term from it may have forgotten that claim."""
        if base == self.version and sender in (self.lead.target()[1], *self.lead.plan.succession[:1]):
            self.own.wanted()
        return self.deliver(now)

    def withdraw(self) -> None:
        """Drop this peer's own contribution, because the trainer is about to overwrite the memory that holds it."""
        self.own.mine = None
        self.round.inbox.pop(self.me, None)

    # -- contributions

    @abstractmethod
    def collect(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        """Handle a contribution that was made on the present version."""

    @abstractmethod
    def overtaken(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        """Handle a contribution that was made on an earlier version."""

    # -- writing the next commit

    @abstractmethod
    def close(self, now: float) -> list[Effect]:
        """Start to compute the next commit if the round may close. If the tensors are damaged and no peer has better
        ones, this commit has no contributions: it only makes a version that matches the damaged tensors."""

    def work(self, contributions: Contributions, now: float) -> list[Effect]:
        """Start to compute the next commit from these contributions."""
        state, round = self.state, self.round
        assert state is not None
        round.draft = draft = self._draft(state.version, contributions, now)
        held = None if round.trusted else meta_of(state)
        after = meta_of(append(state, draft, self.rules))
        self.averages += 1
        of = self.shard, state.version, contributions, after, held, state.buffered, draft.revision, self.averages
        round.working = work = Average(*of, len(draft.plan.group))
        counts = credited([contribution.samples for _, contribution in contributions])
        return [*trimmed(contributions, counts, self.roster), work]

    def _draft(self, base: Version, contributions: Contributions, now: float) -> Commit:
        """Return the next commit, without its digest and payload."""
        assert self.state is not None
        samples = base.samples + sum(credited([c.samples for _, c in contributions]))
        version = Version(base.generation, samples, base.epoch + 1, "")
        listed = tuple(lending.counted(peer, c) for peer, c in contributions)
        counts = {peer for peer, _ in contributions}
        plan = bounded(self.next_plan(counts, now), counts, self.me, self.state)
        held, gone = (self.lead.term, self.me, listed, plan), lending.gone(self.state, self.roster)
        return Commit(self.shard, base, version, *held, revision=self.revision_next, gone=gone)

    def averaged(self, done: Averaged, now: float) -> list[Effect]:
        """Handle the result of an outer step that this peer has computed as aggregator. Offer the commit, unless a
        newer version or a higher claim has arrived meanwhile. Ignore the result of an earlier draft."""
        round = self.round
        if not isinstance(round.working, Average) or round.working.number != done.number or round.proposed is not None:
            return []
        if not self.aggregating or done.base != self.version or self.frozen:
            round.working = None
            return self.close(now)
        assert round.draft is not None
        version = replace(round.draft.version, digest=done.digest)
        round.proposed = Proposal(replace(round.draft, version=version, payload=done.payload, seal=done.seal))
        return self.offer(now)

    def offer(self, now: float) -> list[Effect]:
        """Send the proposed commit to the peers that must hold it. Publish it once all of these peers hold it."""
        proposed = self.round.proposed
        if proposed is None or self.frozen:
            return []
        if not (must_hold := self.must_hold(proposed)):
            return self.publish(proposed, now)
        return [Send(p, proposed.commit) for p in proposed.due(must_hold, now, self.rules.dead_after)]

    def must_hold(self, proposed: Proposal) -> list[str]:
        """Return the peers that must still hold the proposal before it is published; in synchronous mode none."""
        return []

    @abstractmethod
    def publish(self, proposed: Proposal, now: float) -> list[Effect]:
        """Append the proposed commit and send it to other peers."""

    # -- others' commits and states

    def committed(self, sender: str, commit: Commit) -> list[Effect]:
        """Handle another peer's commit on the present version: apply it, unless its author may not write it, or a live
        peer has claimed a higher term."""
        if self.round.working is not None or self.frozen or self.state is None:
            return []
        if why := objection(commit, self.state, self.lead, self.rules):
            return [Complaint(sender, f"a commit of shard {self.shard} is ignored: {why}")]
        older = self.lead.rank(commit.term, commit.aggregator) < self.lead.rank(self.lead.term, self.lead.holder)
        if sender == commit.aggregator and older and self.lead.is_claimed_by_another(sender, self.fragment):
            return [Send(sender, self.lead.refusal())]
        if self.round.damaged is not None:
            self.incoming.keep(sender, commit)
            return []
        self.round.told_by = sender
        self.round.working = Apply(commit, meta_of(append(self.state, commit, self.rules)), self.state.buffered)
        return [self.round.working]

    def expects_states_of(self, peer: str) -> bool:
        """Whether the peer may send states unasked: a candidate may if this replica can't apply commits."""
        return self.roster.mine.unlike and peer in self.lead.candidates()

    def missed(self, sender: str, commit: Commit, have: tuple[Version | None, ...], now: float) -> list[Effect]:
        """Handle a commit on a version that is not reached here. ``have``: this replica's versions of all shards."""
        return []

    def insists(self, sender: str, commit: Commit) -> bool:
        """Return whether the sender repeats a commit of another lineage that this peer has already answered with
        commits of its own lineage. In synchronous mode this is always False, because such a commit gets no answer."""
        return False

    def repeated(self, sender: str, commit: Commit) -> list[Effect]:
        """Handle a commit that was made on an earlier version or on another lineage."""
        return []

    def held(self, sender: str, version: Version, now: float) -> list[Effect]:
        """Handle a peer's confirmation that it holds the proposal."""
        proposed = self.round.proposed
        if proposed is None or proposed.version != version:
            return []
        proposed.holding.add(sender)
        return self.offer(now)

    def applied(self, base: Version, digest: str, now: float) -> tuple[Commit | None, list[Effect]]:
        """Append another peer's commit if the outer step that this peer computed for it gives the digest that the
        commit names. Return (None, effects). If the digests differ, the commit is not appended: return (commit, [])."""
        work = self.round.working
        if not isinstance(work, Apply) or work.commit.base != base:
            return None, []
        self.round.working = None
        if base != self.version or self.frozen:
            return None, []
        if work.commit.version.digest != digest:
            return work.commit, []
        self.append(work.commit, now)
        return None, [Accept(((self.shard, digest),)), *self.begin(now)]

    def adopt(self, state: State, now: float) -> list[Effect]:
        """Replace the shard's present state with ``state``, whose tensors are already in place."""
        if self.version is not None and not descends(state.version, state.history, self.version):
            self.attendance.clear()
        self.state, self.counts_me = fetched(state, self.rules), False
        self.outgoing.adopted()
        return self.begin(now)

    def append(self, commit: Commit, now: float) -> None:
        """Append the commit: the state after it becomes the present state."""
        assert self.state is not None
        self.counts_me = any(c.peer == self.me for c in commit.contributions)
        self.state = append(self.state, commit, self.rules)
        self.outgoing.appended(commit)

    @abstractmethod
    def begin(self, now: float) -> list[Effect]:
        """Begin the round on a new version with the messages that arrived early."""

    def renew(self, now: float) -> None:
        """Begin a new, empty round on the present version."""
        assert self.state is not None
        self.outgoing.renew(self.state)
        before, samples = self.round, self.state.version.samples
        waited = before.awaited if before.samples == samples else {}  # a commit without contributions ends no wait
        self.round = Round(Leadership(self.roster, self.state), samples, awaited=waited)
        self.round.open(now, self.rules.settle)
        for peer in lending.named(self.lead.candidates(), self.state):
            self.roster.name(peer)

    def take_kept(self) -> list[Effect]:
        """Apply a stored commit on the present version, if there is one whose author may have written it."""
        kept = [] if self.version is None else self.incoming.take_commits(self.version)
        fit = [(c.term, c.aggregator, sender, c) for sender, c in kept if self.lead.entitles(c.aggregator, c.term)]
        if not fit:
            return []
        *_, sender, commit = max(fit, key=lambda found: found[:3])
        effects = self.committed(commit.aggregator, commit)
        if isinstance(self.round.working, Apply) and self.round.working.commit is commit:
            self.round.told_by = sender
        return effects

    # -- lost messages, and time

    @abstractmethod
    def undelivered(self, to: str, message: Commit | State | Held) -> None:
        """Handle a message of this shard that could not be delivered."""

    @abstractmethod
    def insist(self, now: float) -> list[Effect]:
        """Called after each heartbeat interval: repeat, at growing intervals, what may have been lost."""

    def tick(self, now: float) -> list[Effect]:
        """Called after each heartbeat interval: do what is due, and send again what may have been lost."""
        return [*self.advance(now), *self.ask(), *self.insist(now), *self.outgoing.send_again()]

    # -- failover

    def lost(self, peer: str, now: float) -> list[Effect]:
        """Handle a peer that died or left: no round waits for it, and if it aggregated, its successor takes over."""
        self.own.lost(peer)
        self.incoming.lost(peer)
        return self.advance(now)

    def forgotten_by(self, peer: str) -> None:
        """Handle a peer's restart: the peer has lost what it received, promised or held."""
        self.attendance.forget(peer)
        self.own.forgotten_by(peer)
        self.lead.forgotten_by(peer)
        if self.round.proposed is not None:
            self.round.proposed.forgotten_by(peer)

    def advance(self, now: float) -> list[Effect]:
        """Do what is due now: take over from an aggregator that is gone, send this peer's contribution, close the
        round, offer the commit."""
        if self.version is None or self.final or self.frozen:
            return self.offer(now)
        term, holder = self.lead.target()
        effects: list[Effect] = []
        if holder == self.me and self.lead.holder != self.me:
            text = f"this peer aggregates from epoch {self.version.epoch + 1}; {self.lead.holder} is gone"
            self.lead.claim(term)
            self.round.open(now, self.rules.settle)
            effects = [Note("takeover", f"shard {self.shard}: {text}"), *self.ask()]
        return [*effects, *self.deliver(now), *self.close(now), *self.offer(now)]

    def ask(self) -> list[Effect]:
        """Ask for promises if this peer has claimed the term."""
        return [] if self.frozen else self.lead.ask()

    def asked_by(self, sender: str, request: TakeOver, now: float) -> list[Effect]:
        """Handle another peer's claim to write the commit after this version. Promise it, unless a known claim wins
        against it. Do not answer while a commit is being applied: the other peer asks again, and gets the commit."""
        if request.base == self.version:
            if isinstance(self.round.working, Apply):
                return []
            if not self.lead.entitles(sender, request.term):
                return [not_entitled(self.shard, sender, sender, request.term), Send(sender, self.lead.refusal())]
            if not contest.wins(self.lead, request.term, sender):
                return [Send(sender, self.lead.refusal())]
            if sender != self.lead.holder:  # the holder itself gains nothing by a higher term
                self.concede(request.term, sender)
            self.lead.claimed_at, self.lead.disowned = now, None
        return [Send(sender, Promise(self.shard, request.base, request.term)), *self.deliver(now)]

    def promised(self, sender: str, promise: Promise, now: float) -> list[Effect]:
        """Handle a promise for this peer's claim."""
        return self.close(now) if self.lead.promised(sender, promise) else []

    def outdated(self, sender: str, refusal: Outdated, now: float) -> list[Effect]:
        """Handle a refusal that names another holder of the term. Accept that holder if `contest` says so."""
        if contest.outbids(self.lead, refusal):
            return self.ask()
        if (claim := contest.overruling(self.lead, sender, refusal, now - self.rules.settle)) is not None:
            self.concede(*claim)
            return self.deliver(now)
        if refusal.base == self.version and not self.lead.entitles(refusal.holder, refusal.term):
            return [not_entitled(self.shard, sender, refusal.holder, refusal.term)]
        return [Send(sender, self.lead.refusal())] if contest.unaware(self.lead, sender, refusal) else []

    def concede(self, term: int, holder: str) -> None:
        """Accept that ``holder`` holds the term. If it was passed over, it may get one more chance."""
        if contest.gives_chance(self.lead, holder):
            self.round.awaited.pop(holder, None)
        self.lead.concede(term, holder)
