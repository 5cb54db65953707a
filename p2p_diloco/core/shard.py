"""One shard's log of commits, as one replica holds it: its version, the round after it, and who may write the next.

Law: a method returns the effects of one thing that happened; it sees other peers only through the roster. Catching up
with a newer state is `catchup`'s work, the trainer's side is `replica`'s.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

from .attendance import Attendance
from .carry import Progress
from .election import assigned
from .events import Accept, Apply, Average, Effect, Note, Send
from .messages import Commit, Contribution, Counted, Held, Outdated, Plan, Promise, Stale, State, TakeOver, Want
from .revision import FOUNDED, Revision
from .roster import Roster
from .rules import Rules
from .version import ContributionId, Version, descends


def meta(
    version: Version,
    term: int,
    plan: Plan,
    counted: dict[str, ContributionId] | tuple[tuple[str, ContributionId], ...],
    buffered: int = 0,
    revision: Revision = FOUNDED,
) -> bytes:
    """Canonical bytes of the replicated state beside the tensors; a version's digest covers them (its own apart)."""
    table = sorted(counted.items() if isinstance(counted, dict) else counted)
    state: list[object] = [
        version.generation,
        version.samples,
        version.epoch,
        term,
        plan.group,
        plan.succession,
        [[peer, id.incarnation, id.sequence] for peer, id in table],
    ]
    if revision.number:
        state += [buffered, [revision.number, revision.outer_lr, revision.outer_momentum]]
    elif buffered:
        state.append(buffered)
    return json.dumps(state, separators=(",", ":")).encode()


def meta_of(state: State) -> bytes:
    """What a state's digest covers beside its tensors."""
    return meta(state.version, state.term, state.plan, state.counted, state.buffered, state.revision)


class ShardLog:
    def __init__(self, shard: int, me: str, rules: Rules, roster: Roster, attendance: Attendance) -> None:
        self.shard, self.fragment = shard, attendance.fragment
        self.me, self.rules, self.roster, self.attendance = me, rules, roster, attendance
        # the replicated state
        self.version: Version | None = None
        self.made_term = 0
        self.plan = Plan((), ())
        self.counted: dict[str, ContributionId] = {}
        self.history: dict[int, str] = {}
        self.buffered = 0  # submissions in the Delayed Nesterov buffer
        self.revision = FOUNDED
        self.last: Commit | None = None  # the commit that made the version, while anybody may lack it (`let_go`)
        self.lacking: set[str] = set()  # who may
        self.counts_me = False  # whether the commit that made the version counts this peer
        # the round after it
        self.term, self.holder = 0, ""  # the highest claim known to aggregate it: of equal terms, the greater id
        self.promised_by: set[str] | None = None  # set while this peer has the term by a claim, not by the plan
        self.inbox: dict[str, Contribution] = {}
        self.early: dict[str, Contribution] = {}  # on a base not reached yet
        self.kept: dict[Version, Commit] = {}  # by base, bases not reached yet
        self.opened = 0.0  # when the version came, then the first contribution
        self.wants, self.patience = 0.0, 0.0  # when what is missing is asked for next, and how long after the last time
        self.again: dict[str, Commit | State] = {}  # of the present version, to peers that it did not reach
        self.resent: dict[str, int] = {}  # how often it was sent again
        self.working: Average | Apply | None = None  # tensor work in flight
        self.frozen = False  # another lineage is about to take this one's place: nothing is appended
        self.damaged: float | None = None  # since when the tensors are not the version's: nothing is averaged
        self.trusted = False  # they are not, and nobody has better ones: the next commit makes them true
        self.past_mending = False  # they are not, and no commit comes any more
        # this peer's own contribution to it
        self.mine: Contribution | None = None
        self.refusals = 0  # of it, since the trainer last merged
        self.behind: int | None = 0  # asynchronous: the last one's staleness as its answer told; None: it isn't counted
        self.uncounted = ""  # why it isn't
        self.handed: str | None = None  # who has it
        self.sending_to: str | None = None

    # -- questions

    @property
    def collected(self) -> int:
        """Payloads of others that wait here: for the round, or for a version that is not reached yet."""
        return len(self.inbox) - (self.me in self.inbox) + len(self.early) + len(self.kept)

    @property
    def final(self) -> bool:
        """The run ends for this shard at its present version."""
        v, rules = self.version, self.rules
        if v is None:
            return False
        by_epochs = rules.stop_after_epochs is not None and v.epoch >= rules.stop_after_epochs
        return by_epochs or (rules.stop_after_samples is not None and v.samples >= rules.stop_after_samples)

    def relation(self, theirs: Version) -> str:
        """``equal``, ``ancestor`` (of mine), ``fork``, or ``ahead``: newer, and nothing speaks against its descent."""
        mine = self.version
        if mine is None:
            return "ahead"
        if theirs == mine:
            return "equal"
        if theirs.generation != mine.generation:
            return "fork"
        if theirs.epoch > mine.epoch:
            return "ahead" if theirs.samples >= mine.samples else "fork"
        return "ancestor" if descends(mine, self.history, theirs) else "fork"

    def line(self) -> list[str]:
        """All that the plan lets aggregate, in order: the succession, then the rest of the group."""
        return [*self.plan.succession, *(p for p in self.plan.group if p not in self.plan.succession)]

    def target(self) -> tuple[int, str]:
        """Who should aggregate now, and under which term, as this peer sees it: the holder while it lives, else the
        next in the line, else (the whole line being gone) the lowest of the others that hold state."""
        if self.roster.may_aggregate(self.holder):
            return self.term, self.holder
        line = self.line()
        for step in range(1, len(line) + 1):
            peer = line[(self.term + step) % len(line)]
            if self.roster.may_aggregate(peer):
                return self.term + step, peer
        others = [p for p in self.roster.summaries() if self.roster.may_aggregate(p)]
        return (self.term + len(line) + 1, others[0]) if others else (self.term, self.holder)

    def waited_for(self) -> list[str]:
        """Members of the averaging group that work, and whose contribution is missing."""
        if self.version is None:
            return []
        group = self.attendance.group(self.plan, self.version.epoch)
        return [p for p in group if p not in self.inbox and self._expected(p)]

    def _taking_part(self, now: float) -> list[str]:
        """Those of them that are not given up: they take part for sure, or their grace has not ended."""
        return [p for p in self.waited_for() if now < self._given_up_at(p)]

    @property
    def awaits_me(self) -> bool:
        """Whether this round waits for this peer, which has contributed nothing to it yet."""
        if self.version is None or (self.mine is not None and self.mine.base == self.version):
            return False
        return self.attendance.is_named(self.me, self.plan, self.version.epoch)

    def _given_up_at(self, peer: str) -> float:
        """When a member that works is given up, if its contribution does not come; never if it is sure to come."""
        sure = self.roster.presumed(peer) or (
            self.version is not None and self.attendance.sure(peer, self.version.epoch)
        )
        return math.inf if sure else self.attendance.waits_until(peer, self.opened)

    @property
    def needed(self) -> int:
        """Contributions without which no outer step is taken, whoever is there."""
        founding = self.version is not None and self.version.epoch == 0
        return max(self.rules.min_peers, self.rules.start_peers) if founding else self.rules.min_peers

    def quorum(self, now: float) -> int:
        """Contributions without which no outer step is taken as long as others take part: half of all, and two. The
        outer momentum would carry the model after one peer's data."""
        taking_part = len(self.inbox) + len(self._taking_part(now))
        return max(self.needed, min(taking_part, max(2, math.ceil(taking_part / 2))))

    def may_close(self, now: float) -> bool:
        """Whether the round may end with the contributions that came."""
        if len(self.inbox) < max(1, self.quorum(now)):
            return False
        return now >= self.deadline() or not self._taking_part(now)

    @property
    def asked(self) -> list[str]:
        """Who must still promise before this peer, having claimed the term, may write the commit."""
        if self.promised_by is None:
            return []
        return [p for p in self.roster.alive() if self.roster.holds_state(p) and p not in self.promised_by]

    @property
    def aggregating(self) -> bool:
        """Whether this peer holds the term and has all promises."""
        return self.holder == self.me and not self.asked

    def gives_up(self, carried: Progress) -> bool:
        """Whether progress that is not counted has been sent so often that it is dropped rather than sent again."""
        return carried.sends > self.rules.carry_rounds

    def loads(self, base: Version | None) -> bool:
        """Whether the trainer, whose base is another than the present version, merges this shard now."""
        return True

    def exchanging(self, base: Version, due: bool) -> bool:
        """Whether the exchange of this peer's contribution, made on ``base``, goes on; ``due``: the shard is due."""
        return self.version == base and due

    def watched(self) -> set[str]:
        """The peers that something here waits for."""
        watched: set[str] = set()
        if self.mine is not None and self.mine.base == self.version:
            watched.add(self.target()[1])
        if self.holder == self.me and self.version is not None:
            watched |= {*self.asked, *(self.waited_for() if self.inbox else ())}
        return watched

    def closes_at(self) -> float | None:
        """When time alone will end the round, if it will."""
        able = self.working is None and not self.frozen and self.damaged is None
        if not able or not self.aggregating or not self.inbox:
            return None
        moments = {self.deadline(), *(self._given_up_at(p) for p in self.waited_for())} - {math.inf}
        return next(filter(self.may_close, sorted(moments)), None)

    def donors(self) -> list[str]:
        """Who may have this shard's tensors as they should be."""
        return [p for p in self.roster.alive() if self.roster.holds_state(p)]

    def state(self) -> State:
        """The replicated state, to be sent or saved; the payload is filled in by whoever holds the tensors."""
        assert self.version is not None
        newest = sorted(self.history.items())[-self.rules.history :]
        counted = tuple(sorted(self.counted.items()))
        held = self.version, self.made_term, self.plan, counted, tuple(newest)
        return State(self.shard, *held, self.buffered, revision=self.revision)

    def news(self, peer: str, base: Version | None) -> Commit | State:
        """What brings a peer from ``base`` to here: the last commit, if that does and the peer can apply it, or the
        whole state."""
        summary = self.roster.summary(peer)
        unlike = summary is not None and summary.unlike
        return self.state() if self.last is None or self.last.base != base or unlike else self.last

    def reached(self, peer: str, version: Version) -> None:
        """A peer has what made a version. Once nobody who is there lacks it, its payload is given up: who comes later
        takes the whole state."""
        if version == self.version:
            self.lacking.discard(peer)
            if not self.lacking:
                self.last = None

    def let_go(self) -> None:
        """Its memory is needed: whoever made the commit is there to send it. A peer that may be gone is not, and then
        those that lack its commit have to ask."""
        if self.last is not None and self.roster.sound(self.last.aggregator):
            self.last, self.lacking = None, set()

    # -- contributions

    def contribute(self, mine: Contribution, now: float) -> list[Effect]:
        """This peer's own pseudo-gradient for the round is ready."""
        self.mine, self.handed, self.sending_to = mine, None, None
        return self.deliver(now)

    def deliver(self, now: float) -> list[Effect]:
        """Hand this peer's contribution to the aggregator, if it hasn't it already."""
        if self.mine is None or not self._sendable(self.mine):
            return []
        _, holder = self.target()
        if holder == self.me:
            self.handed = self.me
            return self.collect(self.me, self.mine, now)
        here = self.roster.live(holder) or self.roster.presumed(holder)
        if holder in (self.handed, self.sending_to) or not here:
            return []
        self.sending_to = holder
        return [Send(holder, self.mine)]

    def _sendable(self, mine: Contribution) -> bool:
        """Whether an aggregator could still count it."""
        return mine.base == self.version

    def delivered(self, to: str, message: Contribution, ok: bool) -> None:
        if self.mine is None or message.id != self.mine.id or self.sending_to != to:
            return
        self.sending_to = None
        if ok:
            self.handed = to

    def want(self, now: float) -> list[Effect]:
        """Ask for the contributions that are missing: once the round has lasted a while, then ever more rarely:
        most have none to give yet."""
        if self.version is None or self.final or not self.aggregating or now < self.wants:
            return []
        self.patience = min(2 * self.patience, self.rules.dead_after)
        self.wants = now + self.patience
        return [Send(peer, Want(self.shard, self.version)) for peer in self._missing() if peer != self.me]

    def _missing(self) -> list[str]:
        """Whose contributions would help: those waited for; if there are none and more are needed, of all that work."""
        if (waited_for := self.waited_for()) or len(self.inbox) >= self.needed:
            return waited_for
        working = [p for p, s in self.roster.summaries().items() if s.role == "worker" and s.epochs and not s.idle]
        return [p for p in working if p not in self.inbox]

    def _open(self, now: float) -> None:
        """A round begins, by its version, its first contribution or a takeover."""
        self.opened, self.patience = now, self.rules.settle
        self.wants = now + self.patience

    def passed(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        """A contribution on an earlier version: it comes too late, and its author will soon stand on a later one."""
        self.attendance.shows(sender, contribution.base.epoch + 1)
        return [Send(sender, self.news(sender, contribution.base))]

    def wanted(self, sender: str, base: Version, now: float) -> list[Effect]:
        """The aggregator hasn't got what it was handed: hand it over again. If somebody else asks, whoever has it may
        know nothing any more of its claim: asked again, it says so."""
        if base == self.version and self.handed != self.me:
            self.handed = None
        return self.deliver(now)

    def withdraw(self) -> None:
        """The trainer is about to write the next pseudo-gradient where the last one lies."""
        self.mine = None
        self.inbox.pop(self.me, None)

    def forgotten_by(self, peer: str) -> None:
        """The peer restarted: what it was handed and what it promised is gone."""
        self.attendance.forget(peer)
        if self.handed == peer:
            self.handed = None
        if self.promised_by is not None:
            self.promised_by.discard(peer)

    def collect(self, sender: str, contribution: Contribution, now: float) -> list[Effect]:
        """A contribution to the present round."""
        known = self.inbox.get(sender)
        if self.final:
            return []
        elsewhere = sender != self.me and self.target()[1] != self.me
        effects: list[Effect] = [Send(sender, self._outdated())] if elsewhere else []
        if known is not None and known.id >= contribution.id:
            return effects
        counted = self.counted.get(sender)
        if counted is not None and contribution.id <= counted:
            return [Note("refused", f"{sender} sent contribution {contribution.id} again after it was counted")]
        if not self.inbox:
            self._open(now)
        self.reached(sender, contribution.base)
        self.attendance.shows(sender, contribution.base.epoch)
        self.inbox[sender] = contribution
        return effects + self.close(now)

    def stash(self, sender: str, contribution: Contribution) -> None:
        """A contribution on a base that this replica has not reached; kept until it does. A stranger's, too: it
        was told that it is here, and will be met or found dead soon."""
        if not self.roster.away(sender):
            self.early[sender] = contribution

    # -- writing the next commit

    def close(self, now: float) -> list[Effect]:
        """End the round if it may end: enough contributions, and all that are expected or the time is up.

        Of damaged tensors that nobody can replace, a commit of no contributions makes a version that is true again.
        """
        if self.working is not None or self.frozen or self.damaged is not None or self.version is None:
            return []
        if not self.aggregating or (self.final and not self.trusted):
            return []
        if not self.trusted and not self.may_close(now):
            return []
        return self._work(() if self.trusted else tuple(sorted(self.inbox.items())), now)

    def _work(self, contributions: tuple[tuple[str, Contribution], ...], now: float) -> list[Effect]:
        """Have the next commit computed."""
        assert self.version is not None
        draft = self._draft(contributions, now)
        held = None if self.trusted else self._meta()
        after = self._meta_after(draft)
        work = Average(self.shard, self.version, contributions, after, held, self.buffered, draft.revision)
        self.working, self._drafted = work, draft
        return [work]

    def _meta(self) -> bytes:
        """What the digest of the present version covers beside its tensors."""
        assert self.version is not None
        return meta(self.version, self.made_term, self.plan, self.counted, self.buffered, self.revision)

    def _meta_after(self, commit: Commit) -> bytes:
        """What the digest of the commit's version covers beside its tensors."""
        counted = {**self.counted, **{c.peer: c.id for c in commit.contributions}}
        return meta(commit.version, commit.term, commit.plan, counted, self._buffered_after(commit), commit.revision)

    def _buffered_after(self, commit: Commit) -> int:
        """How full the Delayed Nesterov buffer is then; no commit goes beyond the submission that empties it."""
        size = self.rules.dn_buffer_size
        return (self.buffered + len(commit.contributions)) % size if size > 1 else 0

    def deadline(self) -> float:
        """When the round ends with whoever has contributed."""
        return self.opened + self.rules.round_timeout

    def averaged(self, base: Version, digest: str, payload: object, now: float) -> list[Effect]:
        """The outer step has been computed: commit it, unless something newer has come meanwhile."""
        if not isinstance(self.working, Average) or self.working.base != base:
            return []
        self.working = None
        if not self.aggregating or base != self.version or self.frozen:
            return self.close(now)
        draft = self._drafted
        commit = replace(draft, version=replace(draft.version, digest=digest), payload=payload)
        effects: list[Effect] = [Accept(((self.shard, digest),))]
        self._append(commit, now)
        effects += [Send(p, self.news(p, base)) for p in self.roster.alive()]  # who still fetches, too: see `keep`
        return effects + self.begin(now)

    def found_damaged(self, base: Version, now: float) -> bool:
        """The tensors are not those of this version. True where that is news of the present one."""
        if base != self.version or self.damaged is not None or self.trusted or self.past_mending:
            return False
        self.damaged = now
        if isinstance(self.working, Average):
            self.working = None
        return True

    def give_up(self) -> None:
        """Nobody has better tensors, and the run has ended."""
        self.damaged, self.past_mending = None, True

    def mended(self, now: float, *, trusted: bool = False) -> list[Effect]:
        """The tensors are those of the version again; or they are all there is (``trusted``). Then the next commit is
        this peer's, whoever else may claim it: whoever could promise would have had better tensors."""
        self.damaged, self.trusted = None, trusted
        if trusted:
            self.term, self.holder, self.promised_by = self.term + 1, self.me, None
        return self.close(now)

    def _draft(self, contributions: tuple[tuple[str, Contribution], ...], now: float) -> Commit:
        assert self.version is not None
        base = self.version
        version = Version(base.generation, base.samples + sum(c.samples for _, c in contributions), base.epoch + 1, "")
        listed = tuple(Counted(peer, c.id, c.weight, c.samples) for peer, c in contributions)
        plan = self._next_plan({peer for peer, _ in contributions}, now)
        revision = max(self.revision, self.roster.mine.revision)
        return Commit(self.shard, base, version, self.term, self.me, listed, plan, revision=revision)

    def _next_plan(self, contributors: set[str], now: float) -> Plan:
        """Wait for every live worker that holds a state; let those aggregate that already took part."""
        assert self.version is not None
        epoch = self.version.epoch
        group, members, unlike = dict[str, float](), dict[str, float](), dict[str, float]()
        for peer, s in self.roster.summaries().items():
            if peer not in contributors and (not s.epochs or self.roster.elsewhere(s)):
                continue
            attends = s.role == "worker" and not s.idle
            if attends and self.attendance.names(peer, self.plan, epoch, contributors):
                group[peer] = s.bandwidth
            took_part = peer in self.plan.succession or self.attendance.has_counted(peer)
            near = (s.role == "aggregator" or took_part) and self.attendance.is_near(peer, epoch)
            if s.eligible and (near or peer in contributors or peer == self.me):
                (unlike if s.unlike else members)[peer] = s.bandwidth
        shards, able = self.rules.fragments[self.fragment], members or unlike or {self.me: 0.0}
        plan = assigned(self.rules.run, epoch + 1, shards, tuple(able.items()), tuple(group.items()))
        return Plan(tuple(group), plan[self.shard])

    # -- others' commits and states

    def undelivered(self, to: str, message: Commit | State | Held) -> None:
        """What makes the present version did not reach a peer, who may be the one that everybody waits for."""
        tries = self.resent.get(to, 0)
        if message.version == self.version and tries < self.rules.resends and not isinstance(message, Held):
            self.resent[to], self.again[to] = tries + 1, message

    def send_again(self) -> list[Effect]:
        """What did not reach a peer that lives."""
        again, self.again = self.again, {}
        return [Send(peer, message) for peer, message in again.items() if self.roster.live(peer)]

    def committed(self, sender: str, commit: Commit) -> list[Effect]:
        """A commit on the present version: apply it, unless a living peer has claimed a higher term."""
        if self.working is not None or self.frozen:
            return []
        older = (commit.term, commit.aggregator) < (self.term, self.holder)
        if sender == commit.aggregator and older and self._claimed_by_another(sender):
            return [Send(sender, self._outdated())]
        if commit.revision < self.revision:
            return [Note("refused", f"a commit of {commit.aggregator} on shard {self.shard} goes back a revision")]
        self.working = Apply(commit, self._meta_after(commit), self.buffered)
        return [self.working]

    def missed(self, sender: str, commit: Commit, have: tuple[Version | None, ...], now: float) -> list[Effect]:
        """A commit on a version that this replica has not reached. ``have``: what it has of all shards."""
        return []

    def repeated(self, sender: str, commit: Commit) -> list[Effect]:
        """A commit on an earlier version."""
        return []

    def held(self, sender: str, version: Version, now: float) -> list[Effect]:
        """A peer says that it holds a version. Nobody waits for that here."""
        return []

    def stale(self, refusal: Stale) -> None:
        """This peer's contribution is refused as too far behind. Here it never is."""

    def keep(self, commit: Commit) -> None:
        """A commit on a base that this replica has not reached, because it still fetches; applied once it has."""
        self.kept[commit.base] = commit
        if len(self.kept) > self.rules.commits_kept:
            del self.kept[min(self.kept)]

    def _commit_kept(self) -> list[Effect]:
        version = self.version
        assert version is not None
        self.kept = {base: commit for base, commit in self.kept.items() if base.epoch >= version.epoch}
        commit = self.kept.pop(version, None)
        return [] if commit is None else self.committed(commit.aggregator, commit)

    def applied(self, base: Version, digest: str, now: float) -> tuple[Commit | None, list[Effect]]:
        """The outer step of a commit is computed; the commit, if it led to another digest than it names."""
        if not isinstance(self.working, Apply) or self.working.commit.base != base:
            return None, []
        commit, self.working = self.working.commit, None
        if commit.base != self.version or self.frozen:
            return None, []
        if commit.version.digest != digest:
            return commit, []
        self._append(commit, now)
        return None, [Accept(((self.shard, digest),)), *self.begin(now)]

    def adopt(self, state: State, now: float) -> list[Effect]:
        """Take a whole state in place of the present one; its proposal has been accepted already."""
        if self.version is not None and not descends(state.version, dict(state.history), self.version):
            self.attendance.clear()
        self.version, self.made_term, self.plan = state.version, state.term, state.plan
        self.counted, self.history = dict(state.counted), dict(state.history)
        self.buffered, self.revision = state.buffered, state.revision
        self.last, self.lacking, self.counts_me = None, set(), False
        return self.begin(now)

    def _append(self, commit: Commit, now: float) -> None:
        if not self.rules.asynchronous:
            self.attendance.appended(self.plan, commit, now)
        self.counts_me = any(c.peer == self.me for c in commit.contributions)
        self.buffered, self.revision = self._buffered_after(commit), commit.revision
        self.version, self.made_term, self.plan = commit.version, commit.term, commit.plan
        self.last, self.lacking = commit, {*self.roster.alive(), self.me} - {commit.aggregator}
        self.reached(self.me, commit.version)
        self.counted |= {c.peer: c.id for c in commit.contributions}
        self.history[commit.version.epoch] = commit.version.digest
        if len(self.history) > self.rules.history:
            del self.history[min(self.history)]

    def begin(self, now: float) -> list[Effect]:
        """The round after a new version: nothing collected but what had come early."""
        self._renew(now)
        self.inbox = {}
        effects = self._commit_kept()
        for peer, contribution in sorted(self.early.items()):
            if contribution.base == self.version:
                del self.early[peer]
                effects += self.collect(peer, contribution, now)
            elif self.version is not None and contribution.base.epoch < self.version.epoch:
                del self.early[peer]  # passed by; should its lineage come back, it is asked for again
        return effects

    def _renew(self, now: float) -> None:
        """Forget what was of the version before."""
        if self.version is not None:
            self.attendance.planned(self.plan, self.version.epoch)
        self.term, self.holder = 0, self.plan.succession[0]
        self.working, self.promised_by = None, None
        self.damaged, self.trusted, self.past_mending = None, False, False
        self.again = {p: self.state() for p, message in self.again.items() if isinstance(message, State)}
        self.resent = {}
        self._open(now)
        for peer in self.line():
            self.roster.name(peer)

    # -- failover

    def lost(self, peer: str, now: float) -> list[Effect]:
        """A peer has died or left: nobody waits for it, and its successor takes over."""
        if self.sending_to == peer:
            self.sending_to = None
        if not self.roster.met(peer):
            self.early.pop(peer, None)
        return self.lead(now)

    def lead(self, now: float) -> list[Effect]:
        """Take over if it falls to this peer; hand over the contribution and close the round if either is due."""
        if self.version is None or self.final or self.frozen:
            return []
        term, holder = self.target()
        effects: list[Effect] = []
        if holder == self.me and self.holder != self.me:
            self.term, self.holder = term, self.me
            self.promised_by = set()
            self._open(now)
            effects.append(Note("takeover", f"takes over shard {self.shard} after epoch {self.version.epoch}"))
            effects += self.ask()
        return effects + self.deliver(now) + self.close(now)

    def ask(self) -> list[Effect]:
        """Ask for promises; again until the commit is made, for whoever adopts the version later knows of no claim."""
        if self.version is None or self.promised_by is None or self.frozen:
            return []
        request = TakeOver(self.shard, self.version, self.term)
        return [Send(p, request) for p in self.roster.alive() if self.roster.holds_state(p)]

    def asked_by(self, sender: str, request: TakeOver, now: float) -> list[Effect]:
        """Somebody wants to take over on this version: promise, unless a greater claim is known."""
        if request.base == self.version:
            if (request.term, sender) < (self.term, self.holder):
                return [Send(sender, self._outdated())]
            self._concede(request.term, sender)
        return [Send(sender, Promise(self.shard, request.base, request.term)), *self.deliver(now)]

    def promised(self, sender: str, promise: Promise, now: float) -> list[Effect]:
        mine = promise.base == self.version and self.holder == self.me and promise.term == self.term
        if not mine or self.promised_by is None:
            return []
        self.promised_by.add(sender)
        return self.close(now)

    def outdated(self, sender: str, refusal: Outdated, now: float) -> list[Effect]:
        """Somebody knows of a higher claim, or the holder knows nothing of its own."""
        greater = (refusal.term, refusal.holder) > (self.term, self.holder)
        denied = sender == self.holder != refusal.holder
        if refusal.base != self.version or not (greater or denied):
            return []
        self._concede(refusal.term, refusal.holder)
        return self.deliver(now)

    # -- inside

    def _claimed_by_another(self, sender: str) -> bool:
        """A living third peer holds the term, and has not moved on to a later epoch itself."""
        summary = self.roster.summary(self.holder) if self.holder not in (self.me, sender) else None
        if summary is None or self.version is None:
            return False
        return not summary.epochs or summary.epochs[self.fragment] <= self.version.epoch

    def _concede(self, term: int, holder: str) -> None:
        """Somebody else holds the term."""
        self.term, self.holder, self.promised_by = term, holder, None

    def _outdated(self) -> Outdated:
        assert self.version is not None
        return Outdated(self.shard, self.version, self.term, self.holder)

    def _expected(self, peer: str) -> bool:
        summary = self.roster.summary(peer)
        return self.roster.presumed(peer) if summary is None else summary.role == "worker" and not summary.idle
