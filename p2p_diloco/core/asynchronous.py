"""One shard's log in asynchronous mode: each submission becomes a commit as soon as it arrives; no round waits for
peers.

Law: a proposal becomes a commit only when every live peer in the successions of the present plan and of its own plan
holds it. Submitters are answered with commits, never with proposals, so if one peer then dies, what a submitter was
told stays true. The aggregator changes only by a commit of its own or by a takeover.
"""

from __future__ import annotations

from . import damage
from .admission import countable, misused, objection, unfit
from .attendance import Attendance
from .contest import wins
from .events import Accept, Apply, Average, Complaint, Effect, Note, Send
from .messages import Commit, Contribution, Fetch, Held, Outdated, Plan, Stale, State, TakeOver
from .proposal import Proposal
from .roster import Roster
from .rules import Rules
from .shard import Contributions, ShardLog
from .state import grown_from
from .submitting import Submitting, settled
from .succession import elected, hands_over, may_stay, succession, worth_a_commit
from .version import Version


class AsynchronousLog(ShardLog):
    """One shard's log in asynchronous mode."""

    own: Submitting

    def __init__(self, shard: int, rules: Rules, roster: Roster, attendance: Attendance) -> None:
        super().__init__(shard, rules, roster, attendance, Submitting(roster.me, rules))
        self.arrived: dict[str, float] = {}  # when each contribution in the inbox arrived
        # submitters that are counted but not yet answered, each with the base of its submission
        self.owed: dict[str, Version] = {}
        # peer → its last commit of another lineage that this peer answered with commits of its own lineage
        self.told: dict[str, Version] = {}
        self.unheard: dict[str, Held] = {}  # Held messages that were sent but not delivered
        self.claims: dict[Version, tuple[int, str]] = {}  # claims on versions that this replica has not reached
        self.unproven = False  # a state was fetched: ask for promises before this peer's first commit after it
        self.assigned: float | None = None  # since when the plan has named this peer as aggregator

    # -- questions

    @property
    def needed(self) -> int:
        """The number of live workers that an outer step requires: ``start_peers`` for the first step, ``min_peers`` for
        later ones."""
        first = self.state is None or not self.state.counted
        return self.rules.needed(self.revision_next, first=first)

    def unpromised(self) -> list[str]:
        """Return the peers whose promise this peer's claim still needs: live peers that hold a state, and peers that
        the plan names but that have not sent a Summary yet. If this peer has fetched its state, the state may be old,
        and its plan may name none of the peers that have gone on. Then also wait for all other peers that a commit
        names and that have sent no Summary, but only for ``dead_after``: a hostile member could name new ones without
        end."""
        promised = self.lead.promised_by
        if promised is None:
            return []
        wide = self.unproven and self.round.lasted < self.rules.dead_after
        named = sorted(self.roster.members) if wide else self.lead.candidates()
        return [*super().unpromised(), *(p for p in named if self.roster.presumed(p) and p not in promised)]

    def waited_for(self) -> list[str]:
        """Return the peers that must hold the proposed commit next."""
        return [] if self.round.proposed is None else self.must_hold(self.round.proposed)

    def must_hold(self, proposed: Proposal) -> list[str]:
        """Return the live peers that must hold the proposal before it is published and have not confirmed that they do:
        first those that the present plan names as successors, then those that only the proposal's plan names. So when a
        newly named peer gets the proposal, each peer that may claim the term holds it already. Empty if the proposal
        was computed from damaged tensors, because no other peer can get the version that it was made on."""
        if self.round.trusted or self.state is None:
            return []
        for plan in (self.state.plan, proposed.commit.plan):
            missing = proposed.missing(plan, self.me) - self.lead.passed_over
            if could := sorted(filter(self.roster.can_hold, missing)):
                return could
        return []

    def watched(self) -> set[str]:
        watched = {self.lead.target()[1]} if self.own.mine is not None else set()
        return {*watched, *self.unpromised(), *self.waited_for()}

    def donors(self) -> list[str]:
        """Return the peers in the succession that may have undamaged tensors. If there are none, return all other peers
        that may have them. (Peers outside the succession are usually at an earlier version.)"""
        able = super().donors()
        return [p for p in able if self.state is not None and p in self.state.plan.succession] or able

    @property
    def deadline(self) -> float:
        """The time at which the grace of the earliest submission ends; inf if no submission waits."""
        return min((self.arrived[p] for p in self.round.inbox), default=float("inf")) + self.rules.async_grace

    def closes_at(self) -> float | None:
        return self.deadline if self.round.inbox and self._able() else None

    def _able(self) -> bool:
        """Whether this peer may make a commit now: `ShardLog._able` allows it, and enough workers are live. If the
        tensors are damaged and no peer has better ones (``trusted``), the number of workers does not matter: the commit
        counts nothing, and only makes a version that matches these tensors."""
        return super()._able() and (self.round.trusted or len(self.workers()) >= self.needed)

    def workers(self) -> list[str]:
        """Return the live workers that hold a state."""
        return [p for p, s in self.roster.summaries().items() if s.role == "worker" and s.epochs]

    def _training(self) -> list[str]:
        """Return the workers that are expected to submit: live workers that hold a state and are not idle."""
        return [p for p in self.workers() if (s := self.roster.summary(p)) is not None and not s.idle]

    # -- submissions

    def contribute(self, mine: Contribution, now: float) -> list[Effect]:
        self.own.wait(now, self.rules.dead_after)
        return super().contribute(mine, now)

    def collect(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        """Handle a submission made on the present version or on an earlier one. If a commit has already counted the
        submission, answer its author again."""
        assert self.state is not None
        if why := unfit(sender, contribution, self.state, self.lead, self.rules):
            return [Complaint(sender, f"a contribution to shard {self.shard} is refused: {why}")]
        if self.final or settled(contribution, self.state.counted.get(sender)):
            return [] if sender == self.me else self._news(sender, contribution.base)
        known = self.round.inbox.get(sender)
        misdirected = sender != self.me and self.lead.target()[1] != self.me
        effects: list[Effect] = [Send(sender, self.lead.refusal())] if misdirected else []
        if known is not None and known.id >= contribution.id:
            return effects
        if misdirected and contribution.base != self.version:
            # the answer tells the author the plan, but not the claim to the term; the refusal tells the claim
            return self._news(sender, contribution.base) + effects
        self.round.inbox[sender], self.arrived[sender] = contribution, now
        return effects + self.close(now)

    def overtaken(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        """Handle a submission made on an earlier version: it counts like a submission made on the present version."""
        return self.collect(sender, contribution, now)

    def close(self, now: float) -> list[Effect]:
        """Start the next commit if this peer may make one and there is a reason for it: submissions to count, or a new
        succession."""
        if not self._able() or self.state is None:
            return []
        effects, trusted = self._refuse_stale(self.state.version), self.round.trusted
        window = () if trusted else self._window(now)
        if not (trusted or window or worth_a_commit(self.me, self.state.plan, self._succession(now))):
            return effects
        return effects + self.work(window, now)

    def _window(self, now: float) -> Contributions:
        """Return the submissions that the next commit counts, sorted by peer; none if that commit should wait. If
        ``async_grace`` is 0, return the submission that arrived first. Otherwise return all that have arrived, but no
        more than the Delayed Nesterov buffer has room for. Return them once they fill the buffer, every working peer
        has submitted, or the grace is over."""
        assert self.state is not None
        size, inbox = self.rules.dn_buffer_size, dict(countable(self.round.inbox, self.state))
        room = size - self.state.buffered if size > 1 else len(inbox) + 1
        by_arrival = sorted(inbox.items(), key=lambda entry: (self.arrived[entry[0]], entry[0]))
        if not self.rules.async_grace:
            return tuple(by_arrival[:1])
        everybody = all(p in inbox for p in self._training())
        closes = len(by_arrival) >= room or everybody or now >= self.deadline
        return tuple(sorted(by_arrival[:room])) if closes else ()

    def _refuse_stale(self, version: Version) -> list[Effect]:
        """Refuse submissions whose base is more than ``max_staleness`` epochs behind this version; their authors then
        send the same progress again. Also refuse those made from data that is used or leased to another peer now."""
        most, effects = self.rules.max_staleness, list[Effect]()
        for peer, contribution in sorted(self.round.inbox.items()):
            behind = version.epoch - contribution.base.epoch
            why = misused(peer, contribution, self.state, self.rules)
            if not why and (most is None or behind <= most):
                continue
            del self.round.inbox[peer]
            why = why or f"its base is {behind} epochs behind"
            effects.append(Note("stale", f"shard {self.shard}: refused a submission of {peer}, because {why}"))
            refusal = Stale(self.shard, contribution.id, version)
            if peer == self.me:
                self.own.stale(refusal, self.state)
            else:
                effects += [*self._news(peer, contribution.base), Send(peer, refusal)]
        return effects

    def _news(self, peer: str, base: Version) -> list[Effect]:
        assert self.state is not None
        return self.outgoing.news(self.state, peer, base)

    # -- writing the next commit

    def publish(self, proposed: Proposal, now: float) -> list[Effect]:
        """Append the proposed commit and send it to the authors of the submissions that it counts. If a successor has
        died, answer them only once the next commit has named a new successor and this successor holds the state.
        Otherwise this peer's death could lose submissions that their authors believe to be counted."""
        commit, self.unproven = proposed.commit, False
        counted = [(c.peer, self.round.inbox.pop(c.peer, None)) for c in commit.contributions]
        have_it = {self.me, *proposed.holding}
        owed = self.owed | {peer: c.base for peer, c in counted if c is not None and peer not in have_it}
        self.append(commit, now)
        follows = self.begin(now)
        answers: list[Effect] = []
        state, draft = self.state, self.round.draft if isinstance(self.round.working, Average) else None
        if draft is not None and state is not None and worth_a_commit(self.me, state.plan, draft.plan.succession):
            self.owed = owed
        else:
            answers = [effect for peer, base in sorted(owed.items()) for effect in self._news(peer, base)]
        return [Accept(((self.shard, commit.version.digest),)), *answers, *follows]

    def next_plan(self, contributors: set[str], now: float) -> Plan:
        """Return the plan that the next commit contains. The aggregator and the successors stay, unless one of them is
        gone or another peer is elected."""
        return Plan(tuple(self._training()), self._succession(now))

    def _succession(self, now: float) -> tuple[str, ...]:
        """Return the succession that the next commit names: the aggregator, then the successors."""
        assert self.state is not None
        summaries, room = self.roster.summaries(), self.rules.successors
        able = {p: s for p, s in summaries.items() if p == self.me or not self.roster.passed(p)}
        members = {p: s.eligible for p, s in able.items() if s.epochs and not s.unlike} or {self.me: True}
        reachable, private = ([p for p in members if members[p] is which] for which in (True, False))
        shards = self.rules.divided(self.fragment, self.shard)
        order = elected(self.rules.run, shards, reachable, private)[self.shard]
        stay = may_stay(self.me, self.state.plan, reachable, private, room)
        since = now if self.assigned is None else self.assigned
        hand_over = hands_over(self.me, order, now - since, self.rules.assigned_for)
        return succession(self.me, self.state.plan, order, stay, room, hand_over=hand_over)

    # -- others' commits and states

    def committed(self, sender: str, commit: Commit) -> list[Effect]:
        """Handle a commit that a peer sent. The commit replaces this peer's draft if its author may write it, unless
        this peer's claim wins against the author's. A commit that this peer itself wrote in an earlier incarnation
        always replaces the draft, because another peer may hold that commit."""
        assert self.state is not None
        round, lead = self.round, self.lead
        mine = round.proposed is not None and round.proposed.version == commit.version
        greater = lead.rank(commit.term, commit.aggregator) > lead.rank(lead.term, lead.holder)
        gives_way = isinstance(round.working, Average) and not mine and (greater or commit.aggregator == self.me)
        if gives_way and not objection(commit, self.state, lead, self.rules):
            round.drop_draft()
        return super().committed(sender, commit)

    def missed(self, sender: str, commit: Commit, have: tuple[Version | None, ...], now: float) -> list[Effect]:
        """Handle a commit on a version that this replica has not reached. If that version is this peer's own proposal,
        record that the sender holds the proposal. If this peer is in a succession, or if the commit's author itself
        sent it and no tensor work is under way here, ask the sender for the commits before it."""
        effects = self.held(sender, commit.base, now)
        asks = self._names_me(commit) or (sender == commit.aggregator and self.round.working is None)
        if asks and self.version is not None and self.version.epoch < commit.base.epoch:
            effects.append(Send(sender, Fetch(have, shards=(self.shard,))))
        return effects

    def expects_states_of(self, peer: str) -> bool:
        """Whether the peer may send states unasked: an aggregator may answer a submission with one, however late."""
        answers = self.own.mine is not None and peer in self.lead.candidates()
        return answers or super().expects_states_of(peer)

    def insists(self, sender: str, commit: Commit) -> bool:
        """Return whether this peer has already answered this commit with commits of its own lineage. It gives that
        answer only once: two peers that always answered each other's commits would never stop."""
        return self.told.get(sender) == commit.version

    def repeated(self, sender: str, commit: Commit) -> list[Effect]:
        """Handle a commit that was made on an earlier version or on another lineage. Answer only if the commit's author
        sent it: the author has missed this peer's Held, or lacks newer commits."""
        if sender != commit.aggregator:
            return []
        if commit.version == self.version:
            return [Send(sender, Held(self.shard, commit.version))]
        if not self._names_me(commit):
            return []
        if self.relation(commit.version) == "fork":
            self.told[sender] = commit.version
        return self._news(sender, commit.base)

    def applied(self, base: Version, digest: str, now: float) -> tuple[Commit | None, list[Effect]]:
        """Append another peer's commit, if the outer step that this peer computed for it gives the digest that the
        commit names. If this peer may become the aggregator, tell the commit's author that this peer holds the
        commit."""
        commit = self.round.working.commit if isinstance(self.round.working, Apply) else None
        named = commit is not None and self._names_me(commit)
        wrong, effects = super().applied(base, digest, now)
        if wrong is not None and named and wrong.version.digest not in self.round.refuted:
            # no newer state exists: fetch the base again, then apply this commit again, once
            self.round.refuted.add(wrong.version.digest)
            self.incoming.keep(self.round.told_by, wrong)
            damage.found(self, base, now)
        if effects and commit is not None and named and commit.aggregator != self.me:
            effects.insert(1, Send(commit.aggregator, Held(self.shard, commit.version)))
        return wrong, effects

    def _names_me(self, commit: Commit) -> bool:
        """Whether this peer is in the succession of the commit's plan or of the present plan."""
        return self.me in commit.plan.succession or (self.state is not None and self.me in self.state.plan.succession)

    # -- a new version

    def adopt(self, state: State, now: float) -> list[Effect]:
        """Replace the present state with a fetched or restored one. Once a plan names this peer as aggregator, it must
        first ask for promises, because other peers may have newer versions."""
        self.unproven = True
        return super().adopt(state, now)

    def append(self, commit: Commit, now: float) -> None:
        # a peer that may have to answer submitters stores several commits
        kept = self.rules.answered_with if self.me in commit.plan.succession else 1
        super().append(commit, now)
        self.outgoing.recent = [*self.outgoing.recent, commit][-kept:]

    def begin(self, now: float) -> list[Effect]:
        """Begin the round on a new version. Keep the submissions that this peer must still count, and answer the
        authors of the others."""
        inbox = self.round.inbox
        self.renew(now)
        self.round.inbox = inbox
        state = self.state
        assert state is not None
        self._claim_again(state.version, now)
        effects = [*self.own.settle(state), *self.ask(), *self.take_kept()]
        stays = self.lead.target()[1] == self.me
        for peer, c in sorted(inbox.items()):
            left = not grown_from(state, c.base)  # made on a lineage that was left
            if not stays or left or settled(c, state.counted.get(peer)):
                del inbox[peer]
                effects += [] if peer == self.me or left else self._news(peer, c.base)
        self.owed = {}
        for peer, contribution in sorted(self.incoming.early.items()):
            match self.relation(contribution.base):
                case "equal" | "ancestor":
                    del self.incoming.early[peer]
                    effects += self.collect(peer, contribution, now)
                case "fork":
                    del self.incoming.early[peer]
        return effects + self.advance(now)

    def _claim_again(self, version: Version, now: float) -> None:
        """Record which peer may write the commit after the new version: the peer that the version's plan names, or a
        peer whose claim arrived before the version did."""
        if self.unproven and self.lead.holder == self.me:
            self.lead.promised_by = set()
        if self.lead.holder != self.me:
            self.assigned = None
        elif self.assigned is None:
            self.assigned = now
        claim = self.claims.pop(version, None)
        if claim is not None and wins(self.lead, *claim):
            self.concede(*claim)
            self.lead.claimed_at = now
        self.claims = {base: c for base, c in self.claims.items() if base.epoch > version.epoch}

    # -- lost messages, and time

    def undelivered(self, to: str, message: Commit | State | Held) -> None:
        """Handle a message that did not reach the peer ``to``. A Held, or the commit that this replica proposes now, is
        sent again as it is. In place of an older commit or a state, the newest state is sent."""
        proposed = self.round.proposed
        if isinstance(message, Held):
            self.unheard[to] = message
        elif proposed is not None and message.version == proposed.version:
            proposed.offered.pop(to, None)
        elif self.state is not None:
            self.outgoing.undelivered(to, self.state)

    def insist(self, now: float) -> list[Effect]:
        """Send again what may have been lost: a Held message, and, at growing intervals, this peer's own submission.
        (`advance` sends a proposal again.) Also send the copy of it to which a refusal leads."""
        if not self.roster.may_aggregate(self.lead.target()[1]):
            return []
        unheard, self.unheard = self.unheard, {}
        effects: list[Effect] = [Send(p, held) for p, held in unheard.items() if held.version == self.version]
        effects += self.own.follow(self.state)
        return effects + self.deliver(now) if self.own.sends_again(now) else effects

    # -- failover

    def asked_by(self, sender: str, request: TakeOver, now: float) -> list[Effect]:
        """Answer another peer's claim to write the next commit. If this replica has not reached the version that the
        claim names, store the claim."""
        if request.base != self.version:
            claim = (request.term, sender)
            self.claims[request.base] = max(self.claims.get(request.base, claim), claim)
            if len(self.claims) > self.rules.commits_kept:
                del self.claims[min(self.claims)]
        return super().asked_by(sender, request, now)

    def outdated(self, sender: str, refusal: Outdated, now: float) -> list[Effect]:
        if self.relation(refusal.base) == "ahead" and self.roster.live(refusal.holder):
            self.own.refers(sender, refusal)
        return super().outdated(sender, refusal, now)

    def concede(self, term: int, holder: str) -> None:
        super().concede(term, holder)
        if holder != self.me:
            self.round.drop_draft()
