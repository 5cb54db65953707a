"""One shard's log in asynchronous mode: a submission becomes a commit as soon as it comes, and no peer is waited for.

Law: a proposal is a commit only once the peers that it names hold it, so no peer is ever answered with, or fetches,
what one more death could undo. The aggregator stays until a commit of its own names another.
"""

from __future__ import annotations

from dataclasses import replace

from .attendance import Attendance
from .events import Accept, Apply, Average, Effect, Note, Send
from .messages import Commit, Contribution, Fetch, Held, Plan, Stale, State, TakeOver
from .proposal import Proposal
from .roster import Roster
from .rules import Rules
from .shard import Contributions, ShardLog
from .state import grown_from
from .submitting import Submitting, settled
from .succession import elected, hands_over, succession, worth_a_commit
from .version import Version


class AsynchronousLog(ShardLog):
    own: Submitting

    def __init__(self, shard: int, rules: Rules, roster: Roster, attendance: Attendance) -> None:
        super().__init__(shard, rules, roster, attendance, Submitting(roster.me, rules))
        self.recent: list[Commit] = []  # the last ones, which bring a submitter to here
        self.arrived: dict[str, float] = {}  # when what is in the inbox came
        self.owed: dict[str, Version] = {}  # submitters that are counted and not answered, and where they stood
        self.unheard: dict[str, Held] = {}  # said, and not delivered
        self.claims: dict[Version, tuple[int, str]] = {}  # on versions that are not reached yet
        self.unproven = False  # the version that comes next was fetched: it may be behind what others hold
        self.assigned: float | None = None  # since when a plan names this peer to aggregate

    # -- questions

    @property
    def needed(self) -> int:
        """Workers that must be alive for an outer step to be taken; the first needs ``start_peers`` of them."""
        rules, counted = self.rules, self.state is not None and self.state.counted
        return rules.min_peers if counted else max(rules.min_peers, rules.start_peers)

    def unpromised(self) -> list[str]:
        """As for any claim; and all that the plan names, until they are met or found dead."""
        promised = self.lead.promised_by
        if promised is None:
            return []
        strangers = [p for p in self.lead.candidates() if self.roster.presumed(p) and p not in promised]
        return [*super().unpromised(), *strangers]

    def waiting(self) -> str:
        """What this peer's submission waits for, in one sentence."""
        _, holder = self.lead.target()
        if not self.roster.may_aggregate(holder):
            candidates = ", ".join(self.lead.candidates())
            return f"waiting for a peer that may aggregate and can be reached; of {candidates} none can"
        if holder != self.me:
            return f"waiting for {holder} to answer a submission"
        if unpromised := self.unpromised():
            return f"taking over shard {self.shard}, waiting for {', '.join(sorted(unpromised))}"
        if missing := self.waited_for():
            return f"waiting for {', '.join(missing)} to hold a commit of shard {self.shard}"
        workers = len(self._workers())
        if workers < self.needed:
            key = "min_peers" if self.needed <= self.rules.min_peers else "start_peers"
            return f"waiting for peers: {workers} of {self.needed} ({key}) are there"
        return ""

    def waited_for(self) -> list[str]:
        """The peers that must hold the proposed commit, and don't yet."""
        return [] if self.round.proposed is None else self.must_hold(self.round.proposed)

    def must_hold(self, proposed: Proposal) -> list[str]:
        """Those that the proposal's plan or the present one names, and that live. None, if it was made of damaged
        tensors that no other peer has: no peer could be given its base."""
        if self.round.trusted or self.state is None:
            return []
        return sorted(p for p in proposed.missing(self.state.plan, self.me) if self._can_hold(p))

    def _can_hold(self, peer: str) -> bool:
        """A live peer can hold a commit, but not one that computes other outer steps; nor one that began anew from
        nothing: it has to fetch the whole model first, and counts like a peer that is gone."""
        summary = self.roster.summary(peer)
        if summary is None:
            return self.roster.presumed(peer)
        return bool(summary.epochs) and not summary.unlike

    def watched(self) -> set[str]:
        watched = {self.lead.target()[1]} if self.own.mine is not None else set()
        return {*watched, *self.unpromised(), *self.waited_for()}

    def donors(self) -> list[str]:
        """Others are behind, as a rule."""
        able = super().donors()
        return [p for p in able if self.state is not None and p in self.state.plan.succession] or able

    @property
    def deadline(self) -> float:
        """When the grace window of the first submission ends."""
        return min((self.arrived[p] for p in self.round.inbox), default=float("inf")) + self.rules.async_grace

    def closes_at(self) -> float | None:
        return self.deadline if self.round.inbox and self._able() else None

    def _able(self) -> bool:
        return super()._able() and (self.round.trusted or len(self._workers()) >= self.needed)

    def _workers(self) -> list[str]:
        return [p for p, s in self.roster.summaries().items() if s.role == "worker" and s.epochs]

    def _training(self) -> list[str]:
        """The workers that will submit something before long."""
        return [p for p in self._workers() if (s := self.roster.summary(p)) is not None and not s.idle]

    # -- submissions

    def contribute(self, mine: Contribution, now: float) -> list[Effect]:
        self.round.patience = self.rules.dead_after
        self.round.asks_at = now + self.round.patience
        return super().contribute(mine, now)

    def collect(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        """A submission, on this version or an earlier one. What is counted already is answered again, not counted."""
        assert self.state is not None
        if self.final or settled(contribution, self.state.counted.get(sender)):
            return [] if sender == self.me else self._answer(sender, contribution.base)
        known = self.round.inbox.get(sender)
        elsewhere = sender != self.me and self.lead.target()[1] != self.me
        effects: list[Effect] = [Send(sender, self.lead.refusal())] if elsewhere else []
        if known is not None and known.id >= contribution.id:
            return effects
        if elsewhere and contribution.base != self.version:
            return self._answer(sender, contribution.base) + effects  # the plan is in there, the claim is not
        self.round.inbox[sender], self.arrived[sender] = replace(contribution, weight=1.0), now
        return effects + self.close(now)

    def passed(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        """A submission on an earlier version is as good as any."""
        return self.collect(sender, contribution, now)

    def close(self, now: float) -> list[Effect]:
        """There may be a submission to commit, a window of them, or a better plan."""
        if not self._able() or self.state is None:
            return []
        effects, trusted = self._refuse_stale(self.state.version), self.round.trusted
        window = () if trusted else self._window(now)
        if not (trusted or window or worth_a_commit(self.me, self.state.plan, self._succession(now))):
            return effects
        return effects + self.work(window, now)

    def _window(self, now: float) -> Contributions:
        """What is applied as one, by peer: without grace, what came first. With it, all that came, as soon as time is
        up, every live peer has submitted, or the Delayed Nesterov buffer is full."""
        assert self.state is not None
        size, inbox = self.rules.dn_buffer_size, self.round.inbox
        room = size - self.state.buffered if size > 1 else len(inbox) + 1
        by_arrival = sorted(inbox.items(), key=lambda entry: (self.arrived[entry[0]], entry[0]))
        if not self.rules.async_grace:
            return tuple(by_arrival[:1])
        everybody = all(p in inbox for p in self._training())
        closes = len(by_arrival) >= room or everybody or now >= self.deadline
        return tuple(sorted(by_arrival[:room])) if closes else ()

    def _refuse_stale(self, version: Version) -> list[Effect]:
        """What is too far behind is not counted; its author carries it over once."""
        most, effects = self.rules.max_staleness, list[Effect]()
        for peer, contribution in sorted(self.round.inbox.items()) if most is not None else ():
            behind = version.epoch - contribution.base.epoch
            if most is None or behind <= most:
                continue
            del self.round.inbox[peer]
            effects.append(Note("stale", f"shard {self.shard}: refused a submission of {peer}, {behind} epochs behind"))
            refusal = Stale(self.shard, contribution.id, version)
            if peer == self.me:
                self.own.stale(refusal, self.state)
            else:
                effects += [*self._answer(peer, contribution.base), Send(peer, refusal)]
        return effects

    def _answer(self, peer: str, base: Version) -> list[Effect]:
        """The newest value, to a peer that stands at ``base`` or further: the commits since then, or the whole
        state."""
        assert self.state is not None
        summary = self.roster.summary(peer)
        at = next((i for i, commit in enumerate(self.recent) if commit.base == base), None)
        if at is None or (summary is not None and summary.unlike):
            return [Send(peer, self.state)]
        return [Send(peer, commit) for commit in self.recent[at:]]

    # -- writing the next commit

    def publish(self, proposed: Proposal, now: float) -> list[Effect]:
        """The submitters are answered. But where a holder has died and another is found, not before that one holds the
        state, too: an answer must be able to rely on it."""
        commit = proposed.commit
        counted = [(c.peer, self.round.inbox.pop(c.peer, None)) for c in commit.contributions]
        have_it = {self.me, *proposed.holding}
        owed = self.owed | {peer: c.base for peer, c in counted if c is not None and peer not in have_it}
        self.append(commit, now)
        follows = self.begin(now)
        answers: list[Effect] = []
        draft = self.round.draft if isinstance(self.round.working, Average) else None
        if (
            draft is not None
            and self.state is not None
            and worth_a_commit(self.me, self.state.plan, draft.plan.succession)
        ):
            self.owed = owed
        else:
            answers = [effect for peer, base in sorted(owed.items()) for effect in self._answer(peer, base)]
        return [Accept(((self.shard, commit.version.digest),)), *answers, *follows]

    def next_plan(self, contributors: set[str], now: float) -> Plan:
        """The same aggregator and successors, unless some are gone or others are elected."""
        return Plan(tuple(self._training()), self._succession(now))

    def _succession(self, now: float) -> tuple[str, ...]:
        """The peers that have the shard after the next commit."""
        assert self.state is not None
        members = self.roster.summaries().items()
        able = tuple(p for p, s in members if s.eligible and s.epochs and not s.unlike) or (self.me,)
        order = elected(self.rules.run, self.rules.fragments[self.fragment], able)[self.shard]
        since = now if self.assigned is None else self.assigned
        hand_over = hands_over(self.me, order, now - since, self.rules.assigned_for)
        return succession(self.me, self.state.plan, order, able, self.rules.successors, hand_over=hand_over)

    # -- others' commits and states

    def committed(self, sender: str, commit: Commit) -> list[Effect]:
        """Unless its claim is the lesser one, the commit takes the place of this peer's own draft: it may also be what
        an earlier life of this peer proposed, and another peer holds."""
        round, lead = self.round, self.lead
        mine = round.proposed is not None and round.proposed.version == commit.version
        greater = (commit.term, commit.aggregator) > (lead.term, lead.holder) or commit.aggregator == self.me
        if isinstance(round.working, Average) and not mine and greater:
            round.drop_draft()
        return super().committed(sender, commit)

    def missed(self, sender: str, commit: Commit, have: tuple[Version | None, ...], now: float) -> list[Effect]:
        """If the commit's base is what this peer has proposed, then that is held. If this peer may have to hold the
        commit (the plan in between may name it, too), it asks for what lies between."""
        effects = self.held(sender, commit.base, now)
        asks = self._names_me(commit) or (sender == commit.aggregator and self.round.working is None)
        if asks and self.version is not None and self.version.epoch < commit.base.epoch:
            effects.append(Send(sender, Fetch(have, shards=(self.shard,))))
        return effects

    def repeated(self, sender: str, commit: Commit) -> list[Effect]:
        """Its aggregator has not heard that it is held, or is behind."""
        if sender != commit.aggregator:
            return []
        if commit.version == self.version:
            return [Send(sender, Held(self.shard, commit.version))]
        return self._answer(sender, commit.base) if self._names_me(commit) else []

    def applied(self, base: Version, digest: str, now: float) -> tuple[Commit | None, list[Effect]]:
        """Say so, if it had to be held."""
        commit = self.round.working.commit if isinstance(self.round.working, Apply) else None
        named = commit is not None and self._names_me(commit)
        wrong, effects = super().applied(base, digest, now)
        if wrong is not None and named:  # its aggregator has nothing newer: take the base anew, then this again
            self.incoming.commits[wrong.base] = wrong
            self.found_damaged(base, now)
        if effects and commit is not None and named:
            effects.insert(1, Send(commit.aggregator, Held(self.shard, commit.version)))
        return wrong, effects

    def _names_me(self, commit: Commit) -> bool:
        present = () if self.state is None else self.state.plan.succession
        return self.me in commit.plan.succession or self.me in present

    # -- a new version

    def adopt(self, state: State, now: float) -> list[Effect]:
        """The donor that it was fetched from, or the disk that held it, may be behind, and the others have gone on: a
        plan that comes with it gives no right to aggregate."""
        self.recent, self.unproven = [], True
        return super().adopt(state, now) + self.ask()

    def append(self, commit: Commit, now: float) -> None:
        kept = self.rules.answered_with if self.me in commit.plan.succession else 1  # by those that may have to answer
        super().append(commit, now)
        self.recent = [*self.recent, commit][-kept:]

    def begin(self, now: float) -> list[Effect]:
        """What is left of the inbox is for this peer to count, or not any more."""
        inbox = self.round.inbox
        self.renew(now)
        self.round.inbox = inbox
        state = self.state
        assert state is not None
        self._claim_again(state.version, now)
        self.own.settle(state)
        effects = self.take_kept()
        stays = self.lead.target()[1] == self.me
        for peer, c in sorted(inbox.items()):
            left = not grown_from(state, c.base)  # its lineage was: its author carries it over
            if not stays or left or settled(c, state.counted.get(peer)):
                del inbox[peer]
                effects += [] if peer == self.me or left else self._answer(peer, c.base)
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
        """What gives this peer the right to aggregate the new version, or takes it: a plan, and claims that came
        early."""
        if self.unproven and self.lead.holder == self.me:
            self.lead.promised_by = set()
        self.unproven = False
        if self.lead.holder != self.me:
            self.assigned = None
        elif self.assigned is None:
            self.assigned = now
        claim = self.claims.pop(version, None)
        if claim is not None and claim > (self.lead.term, self.lead.holder):
            self.concede(*claim)
        self.claims = {base: c for base, c in self.claims.items() if base.epoch > version.epoch}

    # -- lost messages, and time

    def undelivered(self, to: str, message: Commit | State | Held) -> None:
        """A proposal goes out again; of an answer, what is newest then."""
        proposed = self.round.proposed
        if isinstance(message, Held):
            self.unheard[to] = message
        elif proposed is not None and message.version == proposed.version:
            proposed.offered.pop(to, None)
        elif self.state is not None:
            self.outgoing.undelivered(to, self.state)

    def insist(self, now: float) -> list[Effect]:
        """Whatever may have been lost is said again, ever more rarely where it is long: a proposal, that a commit is
        held, and this peer's own submission."""
        effects = self.offer(now)
        if not self.roster.may_aggregate(self.lead.target()[1]):
            return effects
        unheard, self.unheard = self.unheard, {}
        effects += [Send(p, held) for p, held in unheard.items() if held.version == self.version]
        own = self.own
        if own.mine is None or own.handed in (None, self.me) or now < self.round.asks_at:
            return effects
        self.round.ask_later(now, self.rules.say_again)
        own.handed = None
        return effects + self.deliver(now)

    # -- failover

    def asked_by(self, sender: str, request: TakeOver, now: float) -> list[Effect]:
        """A claim on a version that is not reached yet is remembered until it is."""
        if request.base != self.version:
            claim = (request.term, sender)
            self.claims[request.base] = max(self.claims.get(request.base, claim), claim)
            if len(self.claims) > self.rules.commits_kept:
                del self.claims[min(self.claims)]
        return super().asked_by(sender, request, now)

    def concede(self, term: int, holder: str) -> None:
        super().concede(term, holder)
        if holder != self.me:
            self.round.drop_draft()
        else:
            self.lead.promised_by = set()  # a claim of its own that it has forgotten, with a lineage left: it asks anew
