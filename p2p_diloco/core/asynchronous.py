"""One shard's log in asynchronous mode: a submission is a commit as soon as it comes, and nobody waits for anybody.

Law: a commit is the aggregator's present state only once those that it names hold it, so nobody is ever answered with,
or fetches, what one more death could undo. The aggregator stays until a commit of its own names another. Versions, the
counted table, claims and promises are the synchronous log's.
"""

from __future__ import annotations

from dataclasses import replace

from .attendance import Attendance
from .events import Accept, Apply, Average, Effect, Note, Send
from .messages import Commit, Contribution, Fetch, Held, Plan, Stale, State, TakeOver
from .proposal import Proposal
from .roster import Roster
from .rules import Rules
from .submitting import SubmittingLog, settled
from .succession import elected, hands_over, succession, worth_a_commit
from .version import Version


class AsynchronousLog(SubmittingLog):
    def __init__(self, shard: int, me: str, rules: Rules, roster: Roster, attendance: Attendance) -> None:
        super().__init__(shard, me, rules, roster, attendance)
        self.recent: list[Commit] = []  # the last ones, which bring a submitter to here
        self.arrived: dict[str, float] = {}  # when what is in the inbox came
        self.proposed: Proposal | None = None  # computed, and not yet held by those who must hold it
        self.interrupted: Average | None = None  # the same, while the tensors that it was made on are mended
        self.owed: dict[str, Version] = {}  # submitters that are counted and not answered, and where they stood
        self.unheard: dict[str, Held] = {}  # said, and not delivered
        self.claims: dict[Version, tuple[int, str]] = {}  # on versions that are not reached yet
        self.unproven = False  # the version that comes next was fetched: it may be behind what others hold
        self.assigned: float | None = None  # since when a plan names this peer to aggregate

    # -- questions

    @property
    def needed(self) -> int:
        """Workers that must be alive for an outer step to be taken; the first needs ``start_peers`` of them."""
        return self.rules.min_peers if self.counted else max(self.rules.min_peers, self.rules.start_peers)

    @property
    def asked(self) -> list[str]:
        """As for any claim; and whoever the plan names, until it is met or found dead."""
        if self.promised_by is None:
            return []
        return [*super().asked, *(p for p in self.line() if self.roster.presumed(p) and p not in self.promised_by)]

    def waiting(self) -> str:
        """What this peer's submission waits for, in one sentence."""
        _, holder = self.target()
        if not self.roster.may_aggregate(holder):
            return f"waiting for a peer that may aggregate and can be reached; of {', '.join(self.line())} none can"
        if holder != self.me:
            return f"waiting for {holder} to answer a submission"
        if self.asked:
            return f"taking over shard {self.shard}, waiting for {', '.join(sorted(self.asked))}"
        if missing := self.waited_for():
            return f"waiting for {', '.join(missing)} to hold a commit of shard {self.shard}"
        workers = len(self._workers())
        if workers < self.needed:
            key = "min_peers" if self.needed <= self.rules.min_peers else "start_peers"
            return f"waiting for peers: {workers} of {self.needed} ({key}) are there"
        return ""

    def waited_for(self) -> list[str]:
        """Who must hold the proposed commit and doesn't yet: those that its plan or the present one names, and live.
        Nobody, if it was made of damaged tensors that nobody else has: nobody could be given its base."""
        if self.proposed is None or self.trusted:
            return []
        return sorted(p for p in self.proposed.missing(self.plan, self.me) if self._must_hold(p))

    def watched(self) -> set[str]:
        """The peers that something here waits for."""
        watched = {self.target()[1]} if self.mine is not None else set()
        return {*watched, *self.asked, *self.waited_for()}

    def donors(self) -> list[str]:
        """Others are behind, as a rule."""
        able = super().donors()
        return [p for p in able if p in self.plan.succession] or able

    def deadline(self) -> float:
        """When the grace window of the first submission ends."""
        return min((self.arrived[p] for p in self.inbox), default=float("inf")) + self.rules.async_grace

    def closes_at(self) -> float | None:
        """When time alone will close a window, if it will."""
        return self.deadline() if self.inbox and self._able() else None

    # -- submissions

    def collect(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        """A submission, on this version or an earlier one. What is counted already is answered again, not counted."""
        if self.final or settled(contribution, self.counted.get(sender)):
            return [] if sender == self.me else self._answer(sender, contribution.base)
        known = self.inbox.get(sender)
        elsewhere = sender != self.me and self.target()[1] != self.me
        effects: list[Effect] = [Send(sender, self._outdated())] if elsewhere else []
        if known is not None and known.id >= contribution.id:
            return effects
        if elsewhere and contribution.base != self.version:
            return self._answer(sender, contribution.base) + effects  # the plan is in there, the claim is not
        self.inbox[sender], self.arrived[sender] = replace(contribution, weight=1.0), now
        return effects + self.close(now)

    def passed(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        """A submission on an earlier version is as good as any."""
        return self.collect(sender, contribution, now)

    def close(self, now: float) -> list[Effect]:
        """Make the next commit, if there is anything to commit: a submission, a window of them, or a better plan."""
        if not self._able():
            return []
        effects = self._refuse_stale()
        window = () if self.trusted else self._window(now)
        if not (self.trusted or window or worth_a_commit(self.me, self.plan, self._succession(now))):
            return effects
        return effects + self._work(window, now)

    def _able(self) -> bool:
        """Whether this peer may make a commit now."""
        if self.working is not None or self.proposed is not None or self.version is None:
            return False
        if self.frozen or self.damaged is not None:
            return False
        if not self.aggregating or (self.final and not self.trusted):
            return False
        return self.trusted or len(self._workers()) >= self.needed

    def _window(self, now: float) -> tuple[tuple[str, Contribution], ...]:
        """What is applied as one, by peer: without grace, what came first. With it, all that came, as soon as time is
        up, every live peer has submitted, or the Delayed Nesterov buffer is full."""
        size = self.rules.dn_buffer_size
        room = size - self.buffered if size > 1 else len(self.inbox) + 1
        by_arrival = sorted(self.inbox.items(), key=lambda entry: (self.arrived[entry[0]], entry[0]))
        if not self.rules.async_grace:
            return tuple(by_arrival[:1])
        everybody = all(p in self.inbox for p in self._training())
        closes = len(by_arrival) >= room or everybody or now >= self.deadline()
        return tuple(sorted(by_arrival[:room])) if closes else ()

    def _refuse_stale(self) -> list[Effect]:
        """What is too far behind is not counted; its author carries it over once."""
        most, version, effects = self.rules.max_staleness, self.version, list[Effect]()
        assert version is not None
        for peer, contribution in sorted(self.inbox.items()) if most is not None else ():
            behind = version.epoch - contribution.base.epoch
            if most is None or behind <= most:
                continue
            del self.inbox[peer]
            effects.append(Note("stale", f"shard {self.shard}: refused a submission of {peer}, {behind} epochs behind"))
            refusal = Stale(self.shard, contribution.id, version)
            if peer == self.me:
                self.stale(refusal)
            else:
                effects += [*self._answer(peer, contribution.base), Send(peer, refusal)]
        return effects

    def _answer(self, peer: str, base: Version) -> list[Effect]:
        """The newest value, to one that stands at ``base`` or further: the commits since then, or the whole state."""
        assert self.version is not None
        summary = self.roster.summary(peer)
        at = next((i for i, commit in enumerate(self.recent) if commit.base == base), None)
        if at is None or (summary is not None and summary.unlike):
            return [Send(peer, self.state())]
        return [Send(peer, commit) for commit in self.recent[at:]]

    # -- from a computed step to a commit

    def averaged(self, base: Version, digest: str, payload: object, now: float) -> list[Effect]:
        """The outer step has been computed: propose it to those who must hold it."""
        if not isinstance(self.working, Average) or self.working.base != base or self.proposed is not None:
            return []
        if not self.aggregating or base != self.version or self.frozen:
            self.working = None
            return self.close(now)
        draft = self._drafted
        self.proposed = Proposal(replace(draft, version=replace(draft.version, digest=digest), payload=payload))
        return self._offer(now)

    def held(self, sender: str, version: Version, now: float) -> list[Effect]:
        """A peer holds what was proposed."""
        if self.proposed is None or self.proposed.version != version:
            return []
        self.proposed.holding.add(sender)
        return self._offer(now)

    def _offer(self, now: float) -> list[Effect]:
        """Send the proposed commit to whoever must hold it and may not have it; if all do, it is a commit."""
        if self.proposed is None or self.frozen:
            return []
        waited_for = self.waited_for()
        if not waited_for:
            return self._conclude(self.proposed, now)
        due = self.proposed.due(waited_for, now, self.rules.dead_after)
        return [Send(p, self.proposed.commit) for p in due]

    def _conclude(self, proposal: Proposal, now: float) -> list[Effect]:
        commit = proposal.commit
        counted = [(c.peer, self.inbox.pop(c.peer, None)) for c in commit.contributions]
        have_it = {self.me, *proposal.holding}
        owed = self.owed | {peer: c.base for peer, c in counted if c is not None and peer not in have_it}
        self._append(commit, now)
        follows = self.begin(now)
        answers: list[Effect] = []
        if isinstance(self.working, Average) and worth_a_commit(self.me, self.plan, self._drafted.plan.succession):
            self.owed = owed  # a holder has died, and another is found: an answer must be able to rely on that one
        else:
            answers = [effect for peer, base in sorted(owed.items()) for effect in self._answer(peer, base)]
        return [Accept(((self.shard, commit.version.digest),)), *answers, *follows]

    def _must_hold(self, peer: str) -> bool:
        """A named peer that lives; but one whose arithmetic is another could never hold what it computes, and one that
        began anew from nothing can't hold it before it has fetched the whole model: it counts like one that is gone."""
        summary = self.roster.summary(peer)
        if summary is None:
            return self.roster.presumed(peer)
        return bool(summary.epochs) and not summary.unlike

    # -- who is named

    def _next_plan(self, contributors: set[str], now: float) -> Plan:
        """The same aggregator and successors, unless some are gone or others are elected."""
        return Plan(tuple(self._training()), self._succession(now))

    def _succession(self, now: float) -> tuple[str, ...]:
        """Who has the shard after the next commit."""
        members = self.roster.summaries().items()
        able = tuple(p for p, s in members if s.eligible and s.epochs and not s.unlike) or (self.me,)
        order = elected(self.rules.run, self.rules.fragments[self.fragment], able)[self.shard]
        since = now if self.assigned is None else self.assigned
        hand_over = hands_over(self.me, order, now - since, self.rules.assigned_for)
        return succession(self.me, self.plan, order, able, self.rules.successors, hand_over=hand_over)

    # -- others' commits and states

    def committed(self, sender: str, commit: Commit) -> list[Effect]:
        """A commit on the present version. Unless its claim is the lesser one, it takes the place of this peer's own
        draft: it may also be what an earlier life of this peer proposed, and somebody holds."""
        mine = self.proposed is not None and self.proposed.version == commit.version
        greater = (commit.term, commit.aggregator) > (self.term, self.holder) or commit.aggregator == self.me
        if isinstance(self.working, Average) and not mine and greater:
            self._drop_draft()
        return super().committed(sender, commit)

    def missed(self, sender: str, commit: Commit, have: tuple[Version | None, ...], now: float) -> list[Effect]:
        """A commit on a version that is not reached. If it is what this peer has proposed, then it is held. If this
        peer may have to hold it (the plan in between may name it, too), it asks for what lies between."""
        effects = self.held(sender, commit.base, now)
        asks = self._names_me(commit) or (sender == commit.aggregator and self.working is None)
        if asks and self.version is not None and self.version.epoch < commit.base.epoch:
            effects.append(Send(sender, Fetch(have, shards=(self.shard,))))
        return effects

    def repeated(self, sender: str, commit: Commit) -> list[Effect]:
        """A commit that leads nowhere new: its aggregator has not heard that it is held, or is behind."""
        if sender != commit.aggregator:
            return []
        if commit.version == self.version:
            return [Send(sender, Held(self.shard, commit.version))]
        return self._answer(sender, commit.base) if self._names_me(commit) else []

    def applied(self, base: Version, digest: str, now: float) -> tuple[Commit | None, list[Effect]]:
        """The outer step of another peer's commit is computed: say so, if it had to be held."""
        commit = self.working.commit if isinstance(self.working, Apply) else None
        named = commit is not None and self._names_me(commit)
        wrong, effects = super().applied(base, digest, now)
        if wrong is not None and named:  # its aggregator has nothing newer: take the base anew, then this again
            self.kept[wrong.base] = wrong
            self.found_damaged(base, now)
        if effects and commit is not None and named:
            effects.insert(1, Send(commit.aggregator, Held(self.shard, commit.version)))
        return wrong, effects

    def found_damaged(self, base: Version, now: float) -> bool:
        """What was proposed by then may be held by somebody already: it is to be computed again, and nothing else."""
        average, proposed = self.working, self.proposed is not None
        news = super().found_damaged(base, now)
        if news and proposed and isinstance(average, Average):
            self.proposed, self.interrupted = None, average
        return news

    def mended(self, now: float, *, trusted: bool = False) -> list[Effect]:
        """The tensors are those of the version again, or all there is. What was interrupted comes first."""
        average, self.interrupted = self.interrupted, None
        if average is not None and self.holder == self.me and not trusted:
            self.damaged, self.working = None, average
            return [average]
        effects = super().mended(now, trusted=trusted)
        return effects if self.working is not None or trusted else effects + self._commit_kept()

    def undelivered(self, to: str, message: Commit | State | Held) -> None:
        """A proposal goes out again; of an answer, what is newest then."""
        if isinstance(message, Held):
            self.unheard[to] = message
        elif self.proposed is not None and message.version == self.proposed.version:
            self.proposed.offered.pop(to, None)
        elif (tries := self.resent.get(to, 0)) < self.rules.resends:
            self.resent[to], self.again[to] = tries + 1, self.state()

    def want(self, now: float) -> list[Effect]:
        """Whatever may have been lost is said again, ever more rarely where it is long."""
        effects = self._offer(now)
        if not self.roster.may_aggregate(self.target()[1]):
            return effects
        unheard, self.unheard = self.unheard, {}
        effects += [Send(p, held) for p, held in unheard.items() if held.version == self.version]
        return effects + self.insist(now)

    def adopt(self, state: State, now: float) -> list[Effect]:
        """Take a whole state in place of the present one. Whom it was fetched from, or the disk that held it, may be
        behind, and the others have gone on: a plan that comes with it gives no right to aggregate."""
        self.recent, self.unproven = [], True
        return super().adopt(state, now) + self.ask()

    def _append(self, commit: Commit, now: float) -> None:
        kept = self.rules.answered_with if self.me in commit.plan.succession else 1  # by who may have to answer
        super()._append(commit, now)
        self.recent = [*self.recent, commit][-kept:]

    def begin(self, now: float) -> list[Effect]:
        """After a new version: what is left of the inbox is for this peer to count, or not any more."""
        self.proposed = self.interrupted = None
        self._renew(now)
        if self.unproven and self.holder == self.me:
            self.promised_by = set()
        self.unproven = False
        if self.holder != self.me:
            self.assigned = None
        elif self.assigned is None:
            self.assigned = now
        assert self.version is not None
        claim = self.claims.pop(self.version, None)
        if claim is not None and claim > (self.term, self.holder):
            self._concede(*claim)
        self.claims = {base: c for base, c in self.claims.items() if base.epoch > self.version.epoch}
        self.end_exchange()
        effects = self._commit_kept()
        stays = self.target()[1] == self.me
        for peer, c in sorted(self.inbox.items()):
            left = not self.descends_from(c.base)  # its lineage was: its author carries it over
            if not stays or left or settled(c, self.counted.get(peer)):
                del self.inbox[peer]
                effects += [] if peer == self.me or left else self._answer(peer, c.base)
        self.owed = {}
        for peer, contribution in sorted(self.early.items()):
            match self.relation(contribution.base):
                case "equal" | "ancestor":
                    del self.early[peer]
                    effects += self.collect(peer, contribution, now)
                case "fork":
                    del self.early[peer]
        return effects + self.lead(now)

    # -- failover

    def lead(self, now: float) -> list[Effect]:
        """As in any round; and what is proposed may have lost the last one that had to hold it."""
        return super().lead(now) + self._offer(now)

    def forgotten_by(self, peer: str) -> None:
        """The peer restarted: what it was handed, promised or held is gone."""
        super().forgotten_by(peer)
        if self.proposed is not None:
            self.proposed.forgotten_by(peer)

    def asked_by(self, sender: str, request: TakeOver, now: float) -> list[Effect]:
        """A claim on a version that is not reached yet is remembered until it is."""
        if request.base != self.version:
            claim = (request.term, sender)
            known = self.claims.get(request.base, claim)
            self.claims[request.base] = max(known, claim)
            if len(self.claims) > self.rules.commits_kept:
                del self.claims[min(self.claims)]
        return super().asked_by(sender, request, now)

    def _concede(self, term: int, holder: str) -> None:
        super()._concede(term, holder)
        if holder != self.me:
            self._drop_draft()
        else:
            self.promised_by = set()  # a claim of its own that it has forgotten, with a lineage left: it asks anew

    def _drop_draft(self) -> None:
        """Another one writes the next commit."""
        self.proposed = self.interrupted = None
        if isinstance(self.working, Average):
            self.working = None

    # -- inside

    def _workers(self) -> list[str]:
        return [p for p, s in self.roster.summaries().items() if s.role == "worker" and s.epochs]

    def _training(self) -> list[str]:
        """The workers that will submit something before long."""
        return [p for p in self._workers() if (s := self.roster.summary(p)) is not None and not s.idle]

    def _names_me(self, commit: Commit) -> bool:
        return self.me in commit.plan.succession or self.me in self.plan.succession
