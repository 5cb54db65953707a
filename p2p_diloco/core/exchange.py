"""This peer's own trainer as the core sees it: what it has merged, its contribution on the way, what is due next, and
what becomes of its progress.

Law: one exchange is under way at a time, and a contribution is made on the version that was merged last. While that
version stays, an exchange that is taken up again has the same id and the same slices: else a part could be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from . import claims, holding, leading, owning
from .admission import is_counted
from .carry import Carried
from .events import Contribute, Effect, Load, Loaded, Note, Release, Send
from .fragment import FragmentLog
from .leases import WEIGHT_MIN
from .messages import Ready, Slice, Stale, Want, What
from .round import Phase
from .rules import Rules
from .schedule import fragment_by_log
from .state import descends, rooted
from .version import ContributionId, Version, incarnation_after

ENDED = "the run has ended"
LEFT = "this peer has left the lineage that the submission was made on"
TOO_OLD = "the submission was further behind than max_staleness"
MISUSED = "the submission was made from data that another peer had used or leased"
"""Why a submission was not counted."""

SENDS_IN = frozenset({Phase.COLLECTING, Phase.CLAIMING, Phase.CLOSING, Phase.HOLDING, Phase.LACKING})


class Exchange:
    """The contribution of this peer's trainer to one fragment, and who has which part of it."""

    def __init__(self, me: str, rules: Rules, logs: Sequence[FragmentLog], incarnation: int, grant: str = "") -> None:
        self.me, self.rules, self.logs, self.grant = me, rules, logs, grant
        self.incarnation, self.sequence = incarnation, 0
        self.carried = [Carried() for _ in logs]
        self.ready: Ready | None = None
        self.parts: dict[int, Slice] = {}
        self.handed: dict[int, str] = {}  # by slice (-1: the Ready): who has it
        self.going: dict[int, str] = {}  # the same: to whom it is on its way
        self.flying = False  # the trainer waits for the end of the exchange
        self.over: set[int] = set()  # asynchronous: fragments whose exchange is over, and not merged since
        self.stale: Version | None = None  # asynchronous: at which version the submission was refused
        self.since, self.patience = 0.0, 0.0  # asynchronous: when the Ready was sent last, and until when to wait

    # -- questions

    @property
    def fragment(self) -> int | None:
        return None if self.ready is None else self.ready.fragment

    @property
    def merged(self) -> list[Version | None]:
        """By fragment, the version that the trainer merged last; None: none yet."""
        return [carried.base for carried in self.carried]

    def sent(self) -> tuple[int, ...]:
        """Return, by fragment, the epoch for which this peer's contribution is out; -1: none."""
        out = self.fragment, self.ready_base
        return tuple(log.epoch if out == (log.fragment, log.version) else -1 for log in self.logs)

    def is_out(self, fragment: int) -> bool:
        """Whether this peer's contribution to a fragment is out on the present version. An exchange that ended early is
        taken up again then: other peers may have some of it."""
        version = self.logs[fragment].version
        return not self.rules.asynchronous and (self.fragment, self.ready_base) == (fragment, version)

    def due(self) -> int | None:
        """Return the fragment to which the trainer should contribute next; None at the end of the run."""
        if self.rules.asynchronous:
            turns = (fragment % len(self.logs) for fragment in range(self.sequence, self.sequence + len(self.logs)))
            return next((fragment for fragment in turns if not self.logs[fragment].final), None)
        return fragment_by_log([None if log.final else log.epoch for log in self.logs])

    # -- merging

    def merge(self) -> Load:
        """Return the answer to the trainer's Merge."""
        if self.flying:
            return Load((), None)
        loads = []
        for log in self.logs:
            if log.version is not None and self._loads(log, self.merged[log.fragment]):
                loads.append(self._load(log))
        self.over.clear()
        return Load(tuple(loads), self.due())

    def _loads(self, log: FragmentLog, base: Version | None) -> bool:
        """Whether the trainer should merge the present version. In asynchronous mode others' commits are no reason:
        they would make the next submission, whose steps were made on an older base, pass as fresh. The end of an
        exchange is one, even without a newer version: what was refused twice is dropped."""
        if log.fragment in self.over:
            return True
        changes = not self.rules.asynchronous or base is None or log.final or not descends(log.held, base)
        return changes and log.version != base

    def _load(self, log: FragmentLog) -> Loaded:
        carried, member = self.carried[log.fragment], log.held.roll.get(self.me)
        counted = None if member is None else member.id
        kin = carried.base is None or descends(log.held, carried.base)
        most = 1 if self.rules.asynchronous else self.rules.carry_rounds
        outcome = carried.merge(log.held.version, counted, kin=kin, most=most)
        if not kin and self.fragment == log.fragment:
            self.ready, self.parts = None, {}  # the trainer drops this progress: what it makes next has another id
        return Loaded(log.fragment, log.held.version, counted, outcome)

    # -- sending

    def contribute(self, event: Contribute, now: float) -> list[Effect]:
        """Begin to send the trainer's contribution, unless its base is no longer the present version."""
        log = self.logs[event.fragment]
        base = self.merged[event.fragment]
        if base is None or log.phase is Phase.FINAL or not self._counts(log, base):
            return [Release(sent=False)]
        if not self.rules.asynchronous and log.phase not in SENDS_IN:
            return [Release(sent=False)]
        self.flying = True
        if not self.is_out(event.fragment):
            self._begin(event, log, now)
        return self.deliver(log, now)

    def _begin(self, event: Contribute, log: FragmentLog, now: float) -> None:
        self.sequence += 1
        id, mine = ContributionId(self.incarnation, self.sequence), log.roster.mine
        uses = event.uses if not log.fragment else tuple(replace(use, used=(), wants=0) for use in event.uses)
        empty = bool(uses) and event.weight <= WEIGHT_MIN
        weight = 1.0 if self.rules.asynchronous and not empty else event.weight
        size = weight, event.samples, event.hashes, mine.bandwidth, mine.eligible, self.grant
        carried = self.carried[log.fragment]
        carried.send(id)
        base, oldest = carried.base or log.held.version, id
        if self.rules.asynchronous:  # with the oldest progress in it, so that old work can't pass as fresh
            oldest, base = carried.oldest or id, min(base, carried.oldest_base or base)
        else:
            carried.sends += 1
        self.ready = rooted(Ready(log.fragment, base, id, oldest, *size, uses))
        numbered = enumerate(zip(event.hashes, event.payloads, strict=True))
        self.parts = {n: Slice(log.fragment, base, self.me, id, n, h, p) for n, (h, p) in numbered}
        self.handed, self.going, self.stale = {}, {}, None
        self.since, self.patience = now, self.rules.dead_after

    def aggregates(self, log: FragmentLog) -> None:
        """Take part in a round as a peer that only aggregates: with a Ready of weight 0."""
        if log.roster.mine.role != "aggregator" or log.phase is not Phase.COLLECTING or self.rules.asynchronous:
            return
        if self.fragment is not None and self.logs[self.fragment].version == self.ready_base:
            return
        self.sequence += 1
        id, mine = ContributionId(self.incarnation, self.sequence), log.roster.mine
        self.ready = Ready(
            log.fragment, log.held.version, id, id, 0.0, 0, (), mine.bandwidth, mine.eligible, self.grant
        )
        self.parts, self.handed, self.going = {}, {}, {}

    @property
    def ready_base(self) -> Version | None:
        return None if self.ready is None else self.ready.base

    def deliver(self, log: FragmentLog, now: float) -> list[Effect]:
        """Send what has not arrived where it belongs: the Ready to the leader, each slice to its owner."""
        ready = self.ready
        if ready is None or ready.fragment != log.fragment or log.phase not in SENDS_IN:
            return []
        if not self._counts(log, ready.base):
            return []
        if self.rules.asynchronous:
            return self._submit(log, ready, now)
        effects: list[Effect] = []
        if self.me not in log.round.readys:
            effects += leading.collect(log, self.me, ready, now)
        _, leader = claims.target(log)
        effects += self._send(log, -1, ready, leader)
        told = not log.founding or log.round.attempt >= 0  # who the owners are
        for number, part in self.parts.items():
            owner = log.round.owners[number]
            if (number, self.me) not in log.round.slices:
                effects += owning.collect(log, self.me, part, now)
            effects += self._send(log, number, part, owner) if told else []
        return effects

    def _counts(self, log: FragmentLog, base: Version) -> bool:
        """Whether a contribution on this base can still be counted."""
        return descends(log.held, base) if self.rules.asynchronous else base == log.version

    def _submit(self, log: FragmentLog, ready: Ready, now: float) -> list[Effect]:
        """Send a submission, whole, to the acting leader."""
        if not self.flying or is_counted(log.held, self.me, ready):
            return []
        _, leader = claims.target(log)
        effects: list[Effect] = []
        whole: list[tuple[int, Ready | Slice]] = [(-1, ready), *self.parts.items()]
        for number, what in whole:
            if leader == self.me:
                effects += holding.submitted(log, self.me, what, now)
            effects += self._send(log, number, what, leader)
        return effects

    def again(self, log: FragmentLog, now: float) -> None:
        """Asynchronous: let the Ready be sent again if there was no answer for long: it may have been lost."""
        if self.flying and self.fragment == log.fragment and now - self.since >= self.patience:
            self.since, self.patience = now, min(2 * self.patience, self.rules.say_again)
            self.handed.pop(-1, None)

    def is_at(self, peer: str) -> bool:
        """Whether the peer has the Ready, or it is on its way to there."""
        return peer in (self.handed.get(-1), self.going.get(-1))

    def refused(self, sender: str, refusal: Stale) -> None:
        """Handle the leader's refusal of a submission: the exchange ends once that version is reached here. A word of
        another peer is none: it could have all others' progress dropped."""
        if self.ready is None or refusal.id != self.ready.id or not (self.flying and self.is_at(sender)):
            return
        most, uses = self.rules.max_staleness, bool(self.ready.uses)
        if uses or (most is not None and refusal.version.epoch - self.ready.base.epoch > most):
            self.stale = refusal.version

    def _send(self, log: FragmentLog, number: int, what: Ready | Slice, to: str) -> list[Effect]:
        reach = log.roster.live(to) or log.roster.presumed(to)
        if to == self.me or not reach or to in (self.handed.get(number), self.going.get(number)):
            return []
        self.going[number] = to
        return [Send(to, what)]

    def wanted(self, log: FragmentLog, sender: str, want: Want) -> list[Effect]:
        """Send again what a leader asks for, even if it was delivered before: it may have been lost. The Ready goes to
        any leader, also while this peer takes another one for it: else one of the two would wait for ever. Slices do so
        while the one that this peer takes for it is gone."""
        if self.ready is None or self.ready.base != want.base or self.ready.fragment != log.fragment:
            return []
        if want.what is What.READY:
            return [Send(sender, self.ready)]
        if sender != log.round.leader and claims.able(log, log.round.leader):
            return []
        return [Send(sender, self.parts[number]) for number in want.numbers if number in self.parts]

    def delivered(self, to: str, message: Ready | Slice, now: float, *, ok: bool) -> None:
        """Record whether a part has arrived. One that has not is sent again at the next tick."""
        number = message.number if isinstance(message, Slice) else -1
        if self.ready is None or message.id != self.ready.id or self.going.get(number) != to:
            return
        del self.going[number]
        if ok:
            self.handed[number] = to
            log = self.logs[message.fragment]
            waits = self.flying if self.rules.asynchronous else log.version == message.base  # for the answer
            if number < 0 and waits:
                before, since = log.round.handed
                log.round.handed = to, since if before == to else now

    def lost(self, peer: str) -> None:
        """Handle a peer that is gone or has restarted: it does not have what was sent to it."""
        self.handed = {number: to for number, to in self.handed.items() if to != peer}
        self.going = {number: to for number, to in self.going.items() if to != peer}

    # -- what follows

    def landed(self) -> list[Effect]:
        """Let the trainer go on if the exchange under way has just ended: its fragment has moved, or another one is
        due."""
        if not self.flying or self.ready is None:
            return []
        log, base = self.logs[self.ready.fragment], self.ready.base
        if self.rules.asynchronous:
            return self._submitted(log, self.ready) if self._is_over(log, self.ready) else []
        if log.version == base and self.due() == log.fragment:
            return []
        self.flying = False
        return [Release(sent=True)]

    def _submitted(self, log: FragmentLog, ready: Ready) -> list[Effect]:
        """Let the trainer go on after a submission, and say what became of it."""
        self.flying = False
        log.round.handed = "", 0.0  # nobody is waited for any more
        self.over.add(log.fragment)
        if is_counted(log.held, self.me, ready):
            return [Release(sent=True, staleness=log.held.roll[self.me].epoch - ready.base.epoch - 1)]
        if log.final:
            return [Release(sent=True, refused=ENDED)]
        self.carried[log.fragment].sends += 1
        why = TOO_OLD if holding.is_stale(log, ready.base) else MISUSED
        refused = why if descends(log.held, ready.base) else LEFT
        text = f"fragment {log.fragment}: this peer's submission on {ready.base.epoch} counts as refused"
        return [Note("stale", text), Release(sent=True, refused=refused)]

    def _is_over(self, log: FragmentLog, ready: Ready) -> bool:
        """Whether a submission is counted, refused, or can't be counted any more."""
        if log.state is None or log.phase is Phase.FETCHING:
            return False
        told = self.stale is not None and log.epoch >= self.stale.epoch
        gone = log.final or not descends(log.held, ready.base) or holding.is_stale(log, ready.base)
        return told or gone or is_counted(log.held, self.me, ready)

    def renew_incarnation(self) -> None:
        """Raise this peer's incarnation if a state counts a higher id of it: lower ids would never be counted."""
        for log in self.logs:
            member = None if log.state is None else log.state.roll.get(self.me)
            if member is not None and member.id > ContributionId(self.incarnation, self.sequence):
                self.incarnation, self.sequence = incarnation_after(member.id.incarnation, self.incarnation), 0
