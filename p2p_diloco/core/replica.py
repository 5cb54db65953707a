"""One peer's part in the protocol: ``handle(event, now)`` returns effects, and ``next_wakeup()`` the time of the next
Wakeup.

All events enter the core here. The same state and event give the same effects. A replica knows versions, references and
weights, never tensors; time is an argument. `shard` handles one shard, `catchup` the whole state, `presence`
membership, `contributing` this peer's own trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import outlook
from .asynchronous import AsynchronousLog
from .attendance import Attendance
from .catchup import CatchUp
from .contributing import Contributing
from .events import (
    Applied,
    Averaged,
    Changed,
    Closed,
    Contribute,
    Damaged,
    Delivered,
    Depart,
    Discovered,
    Effect,
    Event,
    Expelled,
    Filled,
    Finished,
    Found,
    Granted,
    Measured,
    Merge,
    Moving,
    Note,
    Pause,
    Reachable,
    Received,
    Release,
    Restore,
    Revised,
    Send,
    SendFailed,
    Stepped,
    Wakeup,
)
from .leases import Tables
from .logs import Logs, PerShard
from .memory import Memory
from .mending import Mending
from .messages import Fetch, Leave, Message, Probe, ProbeAck, State, Summary
from .mismatches import Mismatches
from .passing import pass_over
from .presence import Presence
from .revision import FOUNDED, Revision
from .roster import Roster
from .rounds import Rounds
from .rules import Rules
from .state import founding
from .state import founding_meta as founding_meta
from .state import meta_of as meta_of
from .synchronous import SynchronousLog
from .training import Training
from .version import ModelVersion, Version


class Replica:
    """One peer's view of the run: the log of every shard, the other peers, and this peer's own trainer."""

    def __init__(
        self, me: str, rules: Rules, *, role: str = "worker", eligible: bool = True, incarnation: int, now: float
    ) -> None:
        self.me, self.rules = me, rules
        summary = Summary(incarnation, role, eligible, ModelVersion(), (), idle=False)
        self.roster = Roster(me, rules, summary)
        self.attendances = [Attendance(f, rules, self.roster) for f in range(len(rules.fragments))]
        of = {shard: self.attendances[f] for f, shards in enumerate(rules.fragments) for shard in shards}
        log = AsynchronousLog if rules.asynchronous else SynchronousLog
        self.logs = Logs(rules, (log(s, rules, self.roster, of[s]) for s in range(rules.shards)))
        self.catchup = CatchUp(rules, self.logs, self.roster)
        self.own = Contributing(me, rules, self.logs, incarnation)
        self.training = Training(rules, self.logs, self.roster, self.own, now)
        self.memory = Memory(me, rules, self.logs)
        self.mending = Mending(rules, self.logs, self.roster, self.catchup)
        self.mismatches = Mismatches(rules, self.roster, now)
        self.presence = Presence(self.logs, self.roster, self.catchup)
        self.rounds = Rounds(self.logs, self.catchup, self.mending, self.mismatches, self.training)
        self.finished = self.departed = False
        self.had_state = False  # whether all shards were held before the last event
        self.adopted = FOUNDED  # the revision last logged as reached by every shard
        self.next_tick = self.planned = now
        self.ends = PerShard(self.logs, lambda log: log.closes_at())  # when the round closes if nothing arrives
        self.asked_of = self.roster.changes  # as it was when `ends` was last computed

    # -- questions

    @property
    def versions(self) -> tuple[Version | None, ...]:
        """The version of each shard; None where this replica holds no state."""
        return self.logs.versions()

    @property
    def has_state(self) -> bool:
        """Whether this replica holds a state of every shard."""
        return self.logs.whole

    @property
    def epoch(self) -> int:
        """The lowest epoch of any shard; 0 until this replica holds all shards."""
        return min(self.logs.epochs()) if self.has_state else 0

    @property
    def tables(self) -> Tables:
        """The tables of the data that the run's peers share, as far as this replica knows them."""
        return self.logs.tables

    @property
    def revision(self) -> Revision:
        """The lowest revision of any shard. No later outer step uses a lower one."""
        return self.logs.revision

    @property
    def interval(self) -> int:
        """The inner steps from one exchange to the next (that of the next fragment), by the H of the present state."""
        return self.rules.steps_between(self.revision)

    @property
    def steps(self) -> int:
        """How many inner steps a peer that always makes H has made up to the present state."""
        return outlook.steps(self)

    @property
    def ended_by(self) -> Revision:
        """The revision whose stop the run has reached."""
        return outlook.ended_by(self)

    def state(self, shard: int) -> State:
        """Return the replicated state of a shard. This replica must hold one."""
        state = self.logs.look_at(shard).state
        assert state is not None
        return state

    def workers(self) -> int:
        """Return the number of live peers that train, this peer included."""
        return sum(summary.role == "worker" for summary in self.roster.summaries().values())

    def aggregates(self) -> tuple[int, ...]:
        """Return the shards whose next commit this peer would write, as far as it knows."""
        return tuple(log.shard for log in self.logs if log.version is not None and log.lead.target()[1] == self.me)

    def round(self) -> tuple[int, int, int] | None:
        """Return (fragment, contributions received, contributions expected) of a round that this peer aggregates."""
        return outlook.round_now(self)

    @property
    def collected(self) -> int:
        """The number of other peers' payloads stored here, for rounds or for versions that are not reached yet."""
        return self.logs.collected

    def crowded(self, shard: int) -> bool:
        """Whether a contribution to this shard should wait, because this replica stores too many payloads."""
        return self.memory.crowded(shard)

    def waiting(self) -> str:
        """Return one sentence that says what this replica waits for; an empty string if it waits for nothing."""
        return outlook.waiting(self)

    def next_wakeup(self) -> float:
        """Return when the node must feed a Wakeup, unless another event comes first; inf once this peer has left."""
        if self.departed:
            return float("inf")
        if (changes := self.roster.changes) != self.asked_of:
            self.asked_of = changes
            self.ends.forget()
        if [attendance for attendance in self.attendances if attendance.has_news()]:
            self.ends.forget()
        self.planned = min([self.next_tick, self.training.loads_by, *self.ends.now().values()])
        return self.planned

    # -- the one entry point

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle one event and return its effects; this replica's state changes in no other way."""
        if self.departed:
            return []
        effects = self._notice_idleness(now)
        effects += self._dispatch(event, now)
        effects += self._settle(now)
        # a commit of this peer's earlier incarnation names this peer as its author: no answer goes to this peer itself
        effects = [effect for effect in effects if not (isinstance(effect, Send) and effect.to == self.me)]
        self.roster.asked.sent(effects, now)
        return effects

    def _dispatch(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Received(sender, message):
                return self._received(sender, message, now)
            case Delivered(to, message):
                self.roster.probing.reached(to)
                self.roster.asked.delivered(to, message, now)
                self.rounds.delivered(to, message)
                return []
            case SendFailed(to, message, gone):
                effects = self.rounds.undelivered(to, message, now)
                return effects + self.presence.failed(to, now) if gone else effects
            case Closed(peer):
                if not self.roster.live(peer):
                    return []
                self.roster.suspected(peer)
                return self.presence.probe(peer, now)
            case Moving(peer):
                self.roster.probing.reached(peer)
                self.roster.asked.progresses(peer, now)
                self.catchup.lag.moving = now
                return self.presence.probe(peer, now) if self.roster.known(peer) and self.roster.heard(peer) else []
            case Discovered(peer):
                return self.presence.probe(peer, now) if self.roster.discovered(peer) else []
            case Granted(peer, grant):
                self.roster.granted(peer, grant, now)
                return []
            case Measured(bandwidth):
                self.roster.says(bandwidth=bandwidth)
                return []
            case Reachable(reachable):
                return self.presence.turns(reachable, now)
            case Stepped(step_time):
                self.training.stepped(step_time, now)
                return []
            case Pause(paused):
                self.training.pauses(paused, now)
                return self._notice_idleness(now)
            case Merge():
                return self.training.merge(now)
            case Contribute():
                return self.own.contribute(event, now)
            case Averaged(shard):
                return self.logs[shard].averaged(event, now)
            case Damaged(shard, base):
                return self.rounds.damaged(shard, base, now)
            case Applied(shard, base, digest):
                return self.rounds.applied(shard, base, digest, now)
            case Filled(shard, version, digest):
                return self.catchup.filled(shard, version, digest, now)
            case Found(generation, digests):
                return self._found(generation, digests, now)
            case Restore(states):
                return self._restore(states, now)
            case Revised(revision):
                return self.presence.learn(revision)
            case Expelled(peer, reason):
                return self.presence.expel(peer, reason, now)
            case Depart(died):
                self.departed = True
                return self.presence.leave(died)
            case Wakeup():
                return self._wakeup(now)

    # -- messages

    def _received(self, sender: str, message: Message, now: float) -> list[Effect]:
        """Handle a message from another peer. Ignore expelled peers. Probe a peer that has sent no Summary yet or
        counted as dead, but only answer one that is known by its questions alone: it may be an observer."""
        if self.roster.expelled(sender):
            return []
        if isinstance(message, Fetch) and not self.roster.known(sender):
            return self.rounds.received(sender, message, now)
        match message:
            case Probe() | ProbeAck() | Leave():
                return self.presence.received(sender, message, now)
        back = self.roster.heard(sender)
        effects = self.presence.probe(sender, now) if back else []
        return effects + self.rounds.received(sender, message, now)

    def _wakeup(self, now: float) -> list[Effect]:
        """Handle Wakeup: close rounds whose time is over and, once per heartbeat interval, do the periodic work."""
        if now - self.planned > self.rules.frozen_after:
            self.roster.probing.forgive(now)
        if now < self.next_tick:
            return [*self.training.load(now), *(effect for log in self.logs for effect in log.close(now))]
        self.next_tick = now + self.rules.probe_every
        self.roster.asked.tick(now)
        effects = self.presence.tick(now)
        effects += [*self.training.start(now), *self.training.load(now)]
        effects += self.catchup.tick(now)
        effects += self.mending.mend(now)
        for log in self.logs:
            effects += pass_over(log, now)
        for log in self.logs:
            effects += log.tick(now)
        return effects

    # -- what follows from any change

    def _restore(self, states: tuple[State, ...], now: float) -> list[Effect]:
        """Begin with the states of a checkpoint."""
        return [effect for state in states for effect in self.logs[state.shard].adopt(state, now)]

    def _found(self, generation: int, digests: tuple[str, ...], now: float) -> list[Effect]:
        """Found the run: begin with every shard at epoch 0."""
        effects: list[Effect] = []
        for log, digest in zip(self.logs, digests, strict=True):
            version = Version(generation, 0, 0, digest)
            effects += log.adopt(founding(log.shard, version, self.me, self.roster.mine.role), now)
        return effects

    def _settle(self, now: float) -> list[Effect]:
        """Tell the trainer and the other peers what the event changed."""
        moved = self.logs.moved()
        if not self.rules.asynchronous:  # in asynchronous mode stored commits also serve as answers
            self.memory.moved(moved)
        if not moved and not self.rules.asynchronous:
            return []
        effects = self._moved(moved, now) if moved else []
        if self.training.landed(now):
            effects.append(Release(sent=True))
        return effects

    def _moved(self, moved: Sequence[int], now: float) -> list[Effect]:
        """Handle new versions of these shards: update `catchup`, the trainer, this peer's Summary and its revision."""
        had_state, self.had_state = self.had_state, self.has_state
        states = (self.logs.look_at(shard).state for shard in moved)
        effects = self.catchup.moved(now) + self.presence.learn(
            *(state.revision for state in states if state is not None)
        )
        if not self.has_state:
            return effects
        self.own.renew_incarnation(moved if had_state else range(len(self.logs)))
        self._describe()
        if self.revision != self.adopted:
            self.adopted = self.revision
            effects.append(Note("revision", f"all shards now use {self.adopted}"))
        self.training.moved(now, first=not had_state)
        if not had_state or self._is_left_out(moved):
            effects += self.presence.tell_all(now)
        effects += [*self.training.start(now), Changed(), *self.training.load(now)]
        if not self.finished and self.logs.ended:
            self.finished = True
            effects.append(Finished())
        return effects

    def _notice_idleness(self, now: float) -> list[Effect]:
        """Tell all peers if this peer's trainer has become idle or trains again."""
        idle = self.training.is_idle(now)
        if idle == self.roster.mine.idle:
            return []
        self.roster.says(idle=idle)
        return self.presence.tell_all(now)

    def _is_left_out(self, moved: Sequence[int]) -> bool:
        """Whether this peer trains, but a commit that made one of its new versions does not count it. The peer then
        announces its new epochs, so that the next plans name it again."""
        mine = self.roster.mine
        if self.rules.asynchronous or mine.role != "worker" or mine.idle or not self.logs.even:
            return False
        fragments = {self.logs.look_at(shard).fragment for shard in moved}
        return not all(self.logs.look_at(s).counts_me for f in fragments for s in self.rules.fragments[f])

    def _describe(self) -> None:
        """Update this peer's own Summary with its present state."""
        model, epochs = self.logs.model(), self.logs.epochs()
        self.roster.says(model=model, epochs=epochs, incarnation=self.own.incarnation)
