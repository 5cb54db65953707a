"""One peer's part in the protocol: ``handle(event, now)`` returns effects, and ``next_wakeup()`` the time of the next
Wakeup.

Law: all events enter here. The same state and event give the same effects. A replica knows versions, references and
weights, never tensors; time is an argument. `rounds` plays the fragments' rounds, `lineage` and `fetching` newer
states, `exchange` and `training` this peer's own trainer, `presence` membership.
"""

from __future__ import annotations

import math

from . import claims, closing, digests, holding, waits
from . import events as e
from . import messages as m
from .exchange import Exchange
from .fetching import HEAD, Fetching, part_of
from .fragment import FragmentLog
from .leases import Tables
from .lineage import Lineage, says
from .presence import Presence
from .revision import FOUNDED, Revision
from .roster import Roster
from .round import Phase
from .rounds import DEAF, Rounds
from .rules import Rules
from .state import State, founding
from .training import Training
from .version import Version


class Replica:
    """One peer's view of the run."""

    def __init__(
        self,
        me: str,
        rules: Rules,
        *,
        role: str = "worker",
        eligible: bool = True,
        incarnation: int,
        now: float,
        grant: str = "",
    ) -> None:
        """``grant``: by which this peer is in a private run; empty in an open run."""
        self.me, self.rules = me, rules
        self.roster = Roster(me, rules, m.Summary(incarnation, role, eligible))
        self.logs = [FragmentLog(fragment, rules, self.roster) for fragment in range(len(rules.fragments))]
        self.own = Exchange(me, rules, self.logs, incarnation, grant)
        self.training = Training(rules, self.logs, self.roster, self.own, now)
        self.rounds = Rounds(self.logs, self.own)
        self.presence = Presence(self.roster, self.rounds)
        self.lineage = Lineage(rules, self.logs, self.roster)
        self.fetching = Fetching(rules, self.logs, self.roster)
        self.finished = self.departed = False
        self.adopted = FOUNDED  # the last revision that all fragments used
        self.next_tick = self.planned = self.now = now

    # -- questions

    @property
    def versions(self) -> tuple[Version | None, ...]:
        """The version of each fragment; None where this replica holds no state."""
        return tuple(log.version for log in self.logs)

    @property
    def has_state(self) -> bool:
        """Whether this replica holds a state of every fragment."""
        return all(log.state is not None for log in self.logs)

    @property
    def revision(self) -> Revision:
        """The lowest revision of any fragment."""
        return min((log.state.revision for log in self.logs if log.state is not None), default=FOUNDED)

    @property
    def epoch(self) -> int:
        """The lowest epoch of any fragment; 0 until this replica holds all of them."""
        return min(log.epoch for log in self.logs) if self.has_state else 0

    @property
    def tables(self) -> Tables:
        """The tables of the data that the run's peers share, as far as this replica knows them."""
        return () if self.logs[0].state is None else self.logs[0].state.tables

    @property
    def interval(self) -> int:
        """The inner steps from one exchange to the next (that of the next fragment), by the H of the present state."""
        return self.rules.steps_between(self.revision)

    def state(self, index: int) -> State:
        """Return the replicated state of the fragment of this slice, given by its index in the whole model. This
        replica must hold one."""
        return self.logs[self.rules.fragment_of(index)].held

    def workers(self) -> int:
        """Return the number of live peers that train, this peer included."""
        return sum(summary.role == "worker" for summary in self.roster.summaries().values())

    def next_wakeup(self) -> float:
        """Return when the node must feed a Wakeup, unless another event comes first; inf once this peer has left."""
        if self.departed:
            return math.inf
        closes_at = holding.closes_at if self.rules.asynchronous else closing.closes_at
        self.planned = min([self.next_tick, self.training.loads_by, *map(closes_at, self.logs)])
        return self.planned

    # -- the one entry point

    def handle(self, event: e.Event, now: float) -> list[e.Effect]:
        """Handle one event and return its effects; this replica's state changes in no other way."""
        if self.departed:
            return []
        self.now, before = now, [log.state for log in self.logs]
        effects = self._notice_idleness(now)
        effects += self._dispatch(event, now)
        effects += self._settle(before, now)
        return [effect for effect in effects if not (isinstance(effect, e.Send) and effect.to == self.me)]

    def _dispatch(self, event: e.Event, now: float) -> list[e.Effect]:
        match event:
            case e.Received(sender, message):
                return self._received(sender, message, now)
            case e.Delivered(to, message):
                self.roster.reached(to)
                return self._delivered(to, message, now, ok=True)
            case e.SendFailed(to, message, gone):
                effects = self._delivered(to, message, now, ok=False)
                return effects + (self.presence.failed(to, now) if gone else [])
            case e.Averaged():
                return self.rounds.averaged(event, now)
            case e.Applied():
                return self.rounds.applied(event, now)
            case e.Filled():
                return self.fetching.filled(event, now)
            case e.Rolled():
                return self.fetching.rolled(event, now)
            case e.Digested(fragment, version, found):
                if version == self.logs[fragment].version:
                    digests.record(self.logs[fragment], version.epoch, found)
                return []
            case e.Damaged(fragment, numbers):
                log = self.logs[fragment]
                donors = [peer for peer in self.roster.holders() if log.is_here(peer)]
                return self.fetching.repair(log, numbers, donors, now)
            case e.Found(generation, hashes):
                return self._found(generation, hashes, now)
            case e.Restore(states):
                return self._restore(states, now)
            case e.Contribute():
                return self.own.contribute(event, now) + self.rounds.advance(self.logs[event.fragment], now)
            case e.Wakeup():
                return self._wakeup(now)
        return self._of_peers(event, now)

    def _of_peers(self, event: e.Event, now: float) -> list[e.Effect]:
        """Handle an event of this peer's surroundings or of its trainer."""
        match event:
            case e.Broke(peer) if self.roster.live(peer):
                self.roster.peers[peer].suspect = True
                return self.presence.probe(peer, now)
            case e.Moving(peer):
                self.roster.reached(peer)
                self.fetching.moves(peer, now)
                for log in self.logs if self.roster.live(peer) else ():
                    log.round.moving[peer] = now
                return self.presence.probe(peer, now) if peer in self.roster.peers and self.roster.heard(peer) else []
            case e.Discovered(peer):
                return self.presence.probe(peer, now) if self.roster.discovered(peer) else []
            case e.Measured(bandwidth):
                self.roster.says(bandwidth=bandwidth)
            case e.Reachable(reachable) if reachable != self.roster.mine.eligible:
                self.roster.says(eligible=reachable)
                return [*self.presence.tell_all(now), *self.presence.advance(now)]
            case e.Stepped(step_time):
                self.training.stepped(step_time, now)
            case e.Pause(paused):
                self.training.pauses(paused, now)
                return self._notice_idleness(now)
            case e.Merge():
                return self.training.merge(now)
            case e.Revised(revision):
                return self.presence.learn(revision) + self.presence.advance(now)
            case e.Granted(peer, grant):
                self.roster.granted(peer, grant, now)
            case e.Expelled(peer, reason) if self.roster.expel(peer):
                return [e.Note("expelled", f"{peer} is expelled: {reason}"), *self.rounds.lost(peer, now)]
            case e.Depart(died):
                self.departed = True
                return [e.Send(peer, m.Leave(self.roster.mine.incarnation, died)) for peer in self.roster.alive()]
        return []

    # -- messages

    def _received(self, sender: str, message: m.Message, now: float) -> list[e.Effect]:
        if self.roster.expelled(sender):
            return []
        match message:
            case m.Probe(summary):
                back = self.roster.heard(sender)
                self.presence.describe(now)
                return [
                    e.Send(sender, m.ProbeAck(self.roster.mine)),
                    *self.presence.summarized(sender, summary, back, now),
                ]
            case m.ProbeAck(summary):
                self.roster.reached(sender)
                return self.presence.summarized(sender, summary, self.roster.heard(sender), now)
            case m.Leave(incarnation, died):
                return self.presence.left(sender, incarnation, now, died=died)
            case m.Ask():
                return self._answer(sender, message)
        effects = self.presence.probe(sender, now) if self.roster.heard(sender) else []
        match message:
            case m.Told():
                self.lineage.told(sender, message)
                return effects + self._decide(now)
            case m.Head():
                return effects + self.fetching.headed(sender, message, now)
            case m.Part():
                return effects + self.fetching.part(sender, message, now)
            case m.Held():
                log = self.logs[message.fragment]
                return effects + holding.held(log, sender, message, now) + self.rounds.advance(log, now)
            case m.Stale():
                self.own.refused(sender, message)
                return effects + self._follow(sender, message, now)
            case m.Commit() if (
                self.rules.asynchronous and self.logs[message.fragment].relation(message.base) == "ahead"
            ):
                effects += self._follow(sender, message, now)
        effects += self.rounds.received(sender, message, now)
        return effects + self.fetching.came(message.fragment, now)

    def _answer(self, sender: str, ask: m.Ask) -> list[e.Effect]:
        """Tell what this replica holds, or send what is asked of it."""
        if ask.fragment is None:
            told = self.lineage.tell(leaves=self.fetching.under_way and self.fetching.together)
            return [] if told is None else [e.Send(sender, told)]
        if (log := self.logs[ask.fragment]).state is None:
            return []
        numbers = (ask.numbers or (HEAD,))[: self.rules.fetch_window]
        whole = [number for number in numbers if number not in self.fetching.repaired(log.fragment)]
        self.fetching.unsent |= {(sender, log.fragment, number) for number in numbers if number not in whole}
        return [e.Send(sender, part_of(log, number)) for number in whole]

    def _follow(self, sender: str, message: m.Commit | m.Stale, now: float) -> list[e.Effect]:
        """In asynchronous mode, fetch the state of a leader that answers with a version far ahead: the commits between
        are not kept any more."""
        log = self.logs[message.fragment]
        if not self.rules.asynchronous or log.relation(message.version) != "ahead":
            return []
        if self.fetching.under_way or log.phase not in (Phase.COLLECTING, Phase.LACKING):
            return []  # `_settle` tries again once what is under way has come
        has_it = self.own.fragment == log.fragment and self.own.is_at(sender)
        follows = log.leads_to(message.base if isinstance(message, m.Commit) else message.version)
        if follows or self.roster.doubted(sender, now) or not (has_it or claims.succeeds(log, sender)):
            return []
        return self.fetching.begin([log.fragment], [sender], now, together=False)

    def _delivered(self, to: str, message: m.Message, now: float, *, ok: bool) -> list[e.Effect]:
        match message:
            case m.Ready() | m.Slice():
                self.own.delivered(to, message, now, ok=ok)
            case m.Mean(fragment, base, key, number) if ok and base == self.logs[fragment].version:
                self.logs[fragment].round.delivered.add((to, key, number))
            case m.Head() | m.Part() if not ok:
                self.fetching.unsent.add((to, message.fragment, getattr(message, "number", HEAD)))
            case m.Ask(fragment, numbers) if not ok and fragment is not None:
                self.fetching.unasked(to, fragment, numbers, now)
        return []

    # -- newer states

    def _decide(self, now: float) -> list[e.Effect]:
        """Go over to what most others hold, if that is to be believed: a commit is asked for as such, anything else is
        fetched."""
        belief = self.lineage.decide(now)
        if belief is None:
            return []
        effects, behind = says(belief), list[int]()
        for log, version, links in zip(self.logs, belief.told.versions, belief.told.links, strict=True):
            if (belief.fork and version != log.version) or log.state is None:
                behind.append(log.fragment)
            elif version.epoch > log.epoch and not log.offers(version):
                news = {chain for epoch, chain in links if epoch > log.epoch}
                tried, log.believed = news <= log.believed, news
                if version.epoch > log.epoch + 1 or tried:
                    behind.append(log.fragment)
                else:
                    want = m.Want(log.fragment, log.held.version, m.What.COMMIT)
                    effects += [e.Send(peer, want) for peer in belief.donors]
                    effects += self.rounds.advance(log, now)
        if behind:
            effects += self.fetching.begin(behind, sorted(belief.donors), now, together=belief.fork)
        return effects

    # -- time

    def _wakeup(self, now: float) -> list[e.Effect]:
        """Handle Wakeup: close rounds whose time is over and, once per interval, do the periodic work."""
        if now - self.planned > self.rules.frozen_after:
            self.roster.forgive(now)
            self.fetching.forgive(now)
            for log in self.logs:
                log.unproven = True
        if now < self.next_tick:
            return [*self.training.load(now), *self.presence.advance(now)]
        self.next_tick = now + self.rules.probe_every
        effects: list[e.Effect] = []
        for peer in self.roster.expire(now):
            effects += self.presence.died(peer, "silent", "is silent", now)
        watched = {peer for log in self.logs for peer in waits.watched(log, now)}
        for peer in self.roster.to_probe(watched, now):
            effects += self.presence.probe(peer, now)
        effects += [*self.training.start(now), *self.training.load(now)]
        effects += self.lineage.tick(now, fetching=self.fetching.under_way)
        effects += [*self._decide(now), *self.fetching.tick(now), *self._mend(now)]
        for log in self.logs:
            effects += self.rounds.tick(log, now)
        return effects

    def _mend(self, now: float) -> list[e.Effect]:
        """Repair tensors that most others have otherwise. A repair under way explains why these are."""
        effects: list[e.Effect] = []
        for log in self.logs:
            if log.phase in DEAF or self.fetching.repaired(log.fragment):
                continue
            if others := digests.majority(log):
                effects += self.fetching.repair(log, range(log.slices), others, now)
                effects += digests.unlike(log, others)
        return effects

    # -- what follows from any change

    def _found(self, generation: int, hashes: tuple[str, ...], now: float) -> list[e.Effect]:
        for log, digest in zip(self.logs, hashes, strict=True):
            version = Version(generation, 0, 0, digest)
            log.begin(founding(log.fragment, version, self.me, log.slices), now)
        return []

    def _restore(self, states: tuple[State, ...], now: float) -> list[e.Effect]:
        for state in states:
            self.fetching.adopted(state, now)
            self.logs[state.fragment].fresh = True
        return []

    def _settle(self, before: list[State | None], now: float) -> list[e.Effect]:
        """Tell the trainer and the other peers what the event changed."""
        effects = self.fetching.adopt(now)
        moved = [log for log, old in zip(self.logs, before, strict=True) if log.state is not old]
        for log in moved:
            old = before[log.fragment]
            if old is not None:
                effects += self.fetching.stepped(log, old, now)
            effects += self.rounds.begun(log, now) if log.early else []
        for log in self.logs if moved and self.rules.asynchronous else ():
            for (_, sender, *_), kept in log.early.items():  # an answer that came while nothing could be fetched
                if isinstance(kept, m.Commit):
                    effects += self._follow(sender, kept, now)
        if moved:
            effects += self._moved(before, now)
        if landed := self.own.landed():
            self.training.last_step = now
        return effects + landed

    def _moved(self, before: list[State | None], now: float) -> list[e.Effect]:
        if not self.has_state:
            return []
        effects: list[e.Effect] = []
        first = any(state is None for state in before)
        self.own.renew_incarnation()
        self.presence.describe(now)
        if self.revision != self.adopted:
            self.adopted = self.revision
            effects.append(e.Note("revision", f"all fragments now use {self.adopted}"))
        if first or self._is_left_out():
            effects += self.presence.tell_all(now)
        effects += [*self.training.start(now), e.Changed(), *self.training.load(now), *self.presence.advance(now)]
        if not self.finished and all(log.final for log in self.logs):
            self.finished = True
            effects.append(e.Finished())
        return effects

    def _is_left_out(self) -> bool:
        """Whether this peer trains, but a newest commit does not count it: then it announces what it holds."""
        mine = self.roster.mine
        if self.rules.asynchronous or mine.role != "worker" or mine.idle:
            return False
        members = [(log.held.roll.get(self.me), log.epoch) for log in self.logs]
        return any(member is None or member.epoch < epoch for member, epoch in members)

    def _notice_idleness(self, now: float) -> list[e.Effect]:
        idle = self.training.is_idle(now) or self.fetching.starves
        if idle == self.roster.mine.idle:
            return []
        self.roster.says(idle=idle)
        return self.presence.tell_all(now)
