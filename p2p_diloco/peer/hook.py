"""What happens at `optimizer.step()`: count, merge what has changed, and when a fragment is due exchange it.

Law: the one path from the optimizer to the run and back, and the only caller of what touches parameters.
Nothing here decides which fragment is due or who averages it: the node's replica says so. An exchange is sent, and
lands (its result is merged) `overlap_steps` later; training goes on meanwhile. One is under way at a time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Carry
from p2p_diloco.core.pace import StepTimes, is_over
from p2p_diloco.core.schedule import fragment_interval
from p2p_diloco.errors import ConfigError, GaveUpWaiting, P2PDilocoError
from p2p_diloco.node import ledger as parts
from p2p_diloco.node.channel import Message
from p2p_diloco.node.ledger import OF_EXCHANGE, OF_TRAINING, Ledger, last_round, told
from p2p_diloco.peer.local import Local
from p2p_diloco.peer.node_client import NodeClient
from p2p_diloco.peer.tally import Sent, Tally
from p2p_diloco.tensors.layout import Layout

TOLD_EVERY_S = 60.0
"""How often the log tells where the time of a round went."""

log = logging.getLogger("p2p_diloco")


@dataclass(frozen=True, slots=True)
class Flight:
    """An exchange under way: the request and what was sent, after which step, how many steps after the sending before
    it, and how long training stood still for it."""

    request: int
    sent: Sent
    at_step: int
    steps: int
    stood_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a trainer stands, between two of its steps; what `Peer` tells of it."""

    epoch: int
    digest: str
    finished: bool
    global_step: int
    steps: int
    sync_count: int
    sent_count: int
    last_sync_time_s: float
    total_sync_time_s: float
    waiting_time_s: float
    hidden_time_s: float
    step_time_s: float
    dropped_samples: int
    sync_every: int = 0
    staleness: int = 0
    refused_submissions: int = 0
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part, by their names in `Metrics`."""


class Stepping(Protocol):
    """What `Peer` asks of the hook, whichever process it speaks for."""

    @property
    def standing(self) -> Standing: ...

    def report(self, loss: float | None, samples: int | None) -> None: ...

    def step(self) -> None: ...

    def rest(self) -> None: ...

    def beside(self) -> AbstractContextManager[None]: ...

    def synchronise(self) -> None: ...


class Hook:
    """One trainer's steps and exchanges. Step times are of training alone: exchanges and pauses don't
    count.
    """

    def __init__(
        self,
        node: NodeClient,
        local: Local,
        config: RunConfig,
        layout: Layout,
        wait_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._memory, self._local = node, node.memory, local
        self._memory.loss = math.nan
        self._config, self._layout, self._wait_timeout_s = config, layout, wait_timeout_s
        self._asynchronous, self._by_time = config.mode == "async", config.pace == "time"
        self._sync_every = config.sync_every
        self._interval = fragment_interval(config.sync_every, len(layout.fragments))
        self._trained, self._workers = 0, 1  # asynchronous: samples counted in what is merged, live peers that train
        self._staleness = self._refused = 0
        self._tally = Tally(config, layout)
        self.sync_count = self.sent_count = 0
        """Exchanges that were counted in every shard, and all that were made."""
        self.last_sync_time_s = self.total_sync_time_s = 0.0
        self.ledger = Ledger(OF_TRAINING, clock)
        """Where the trainer's time goes."""
        self._clock, self._told_at = clock, -math.inf
        self._hidden = dict.fromkeys(OF_EXCHANGE, 0.0)
        self._round_began = self.ledger.stood
        self._diverged = False  # the last progress was given up, for it was not finite
        self._ended = False  # the run has, and the model is the run's
        self._torn = False  # a merge was broken off: what was trained can't be told any more
        self._flight: Flight | None = None
        self._since = 0  # steps since the last sending
        self._sent_at = 0  # after which step something left last, also if it came to nothing
        self._seen = -1
        self._epoch, self._digest = 0, ""  # of what is merged
        self._commits = 0  # over all fragments
        self._step_times = StepTimes()
        self._round_steps = self._interval  # of this peer's last round
        self._resumed_at: float | None = None  # how long the first step takes nobody knows: when it began is not seen
        self._round_at = math.inf  # when the base of this round was merged; with overlap, when the last one was sent

    @property
    def waiting_time_s(self) -> float:
        """How long training has stood still: all but inner steps and pauses."""
        return sum(seconds for part, seconds in self.ledger.stood.items() if part not in (parts.INNER, parts.PAUSED))

    @property
    def hidden_time_s(self) -> float:
        """How long training went on while an exchange was under way."""
        return sum(self._hidden.values())

    @property
    def steps(self) -> int:
        """Inner steps, since the start."""
        return self._tally.steps

    @property
    def global_step(self) -> int:
        """Inner steps of the run: those that lead to its commits and to the exchange under way, and this peer's own
        since its last sending. Asynchronous: of those that lead to its commits a live peer's share.
        """
        if not self._asynchronous:
            return self._interval * (self._commits + (self._flight is not None)) + self._since
        under_way = 0 if self._flight is None else self._flight.steps
        return round(self._trained / self._tally.samples_per_step / self._workers) + under_way + self._since

    @property
    def step_time_s(self) -> float:
        """What an inner step usually takes; 0 until known."""
        return self._step_times.usual

    @property
    def standing(self) -> Standing:
        """Where this trainer stands at this moment."""
        return Standing(
            epoch=self._epoch if not self._asynchronous else max(0, self._memory.epoch),
            digest=self._digest,
            finished=self.finished,
            global_step=self.global_step,
            steps=self.steps,
            sync_count=self.sync_count,
            sent_count=self.sent_count,
            last_sync_time_s=self.last_sync_time_s,
            total_sync_time_s=self.total_sync_time_s,
            waiting_time_s=self.waiting_time_s,
            hidden_time_s=self.hidden_time_s,
            step_time_s=self.step_time_s,
            dropped_samples=self.dropped_samples,
            sync_every=self._sync_every,
            staleness=self._staleness,
            refused_submissions=self._refused,
            times={
                **{f"{part}_time_s": seconds for part, seconds in self.ledger.stood.items()},
                **{f"hidden_{part}_time_s": seconds for part, seconds in self._hidden.items()},
            },
        )

    @property
    def finished(self) -> bool:
        """Whether the run has ended for all, and the model has its last state: what is under way lands at the next
        step, and where others have ended it, their state is merged there.
        """
        return self._ended and self._memory.changed == self._seen

    @property
    def _over(self) -> bool:
        return bool(self._memory.finished)

    @property
    def _ends(self) -> bool:
        """Whether the run has ended, and what is local is still in the model."""
        return self._over and not self._ended

    @property
    def dropped_samples(self) -> int:
        """Samples whose progress was given up, by the share of the model that lost it."""
        return self._tally.dropped_samples

    # -- what the trainer does

    def report(self, loss: float | None, samples: int | None) -> None:
        """Note the loss and the samples of the step that is about to be made."""
        if loss is not None:
            self._memory.loss = float(loss)
        if samples is not None:
            if samples < 0:
                raise ConfigError("must be 0 or more", key="samples", value=samples, mend="report what was trained on")
            self._tally.samples += samples
            self._memory.samples = self._tally.samples

    def step(self) -> None:
        """After each inner step."""
        self._measure()
        if not self.steps:
            self._round_at = self._clock()
        self._tally.steps += 1
        self._since += 1
        self._memory.steps = self.steps
        self._memory.step_time_s = self.step_time_s
        asked_for = self._asked_for()
        due = asked_for or self._since >= self._interval or self._time_is_up()
        if self._flight is not None and (due or self._over or self._has_flown(self._flight)):
            due = not self._land(self._flight) or due
        if due and not self._over:
            self.exchange(at_once=asked_for)
        elif self._flight is None and (self._memory.changed != self._seen or self._ends):
            self.merge()
        self._resumed_at = self._clock()

    def rest(self) -> None:
        """The time from here to the end of the next step is no step's."""
        self._resumed_at = None

    def beside(self) -> AbstractContextManager[None]:
        """What happens meanwhile is neither training nor an exchange."""
        return self.ledger.part(parts.PAUSED)

    def synchronise(self) -> None:
        """Exchange the whole model now, and have the others do the same at their next step; in asynchronous mode they
        are not asked.
        """
        if self._flight is not None:
            self._land(self._flight)
        if self._asynchronous:
            for _ in self._layout.fragments:
                self.exchange(at_once=True)
            self._resumed_at = self._clock()
            return
        self.merge()
        goal = self._commits + len(self._layout.fragments)
        self._node.tell("nudge", goal=goal)
        while self._commits < goal and self.exchange(at_once=True):
            pass
        self._resumed_at = self._clock()

    # -- what follows

    def exchange(self, *, at_once: bool = False) -> bool:
        """Contribute what is due; without overlap, or `at_once`, wait for its commits. False if nothing is due."""
        while True:
            began = self.waiting_time_s
            with self._merged(measures=True) as (due, kept), self.ledger.part(parts.PSEUDO_GRADIENT):
                if due:
                    self._local.write_delta(due, kept)
            if not due:
                return False
            with self.ledger.part(parts.PSEUDO_GRADIENT):
                sound = self._local.may_be_sent(due)
            if not sound:
                self._give_up_progress()
                return False
            goes_on = bool(self._config.overlap_steps) and not at_once
            self._memory.stands_since = 0.0 if goes_on else self._clock()
            flight = self._flight = self._send(due, began, stands=not goes_on)
            if goes_on or self._land(flight):
                return True

    def merge(self, *, afresh: bool = False, landing: Collection[int] = ()) -> list[int]:
        """Merge whatever has changed into the model; the shards that are due next, if any. `afresh`: load all of
        the global parameters, and keep nothing of the local ones; so it is when the run has ended, for no round is left
        to take these along. `landing`: shards whose exchange is just over; what is trained since they were sent is
        treated as `merge` says, if this peer's part of it was counted.
        """
        with self._merged(afresh, landing) as (due, _):
            return due

    # -- inside

    def _asked_for(self) -> bool:
        """Whether a peer asks all to exchange now."""
        ahead = self._memory.goal > self._commits + (self._flight is not None)
        return ahead and not self._asynchronous

    def _time_is_up(self, share: float = 1.0) -> bool:
        """With pace="time": whether the steps of this round are made, or those of its first part."""
        planned_s = self._memory.trains_for_s if self._by_time else math.inf
        return is_over(self._clock() - self._round_at, self.step_time_s, share * planned_s)

    @contextmanager
    def _merged(
        self, afresh: bool = False, landing: Collection[int] = (), *, measures: bool = False
    ) -> Iterator[tuple[list[int], Collection[int]]]:
        """Merge; the shards that are due, and those whose base is kept beside θ. Meanwhile the node leaves both as they
        are. `measures`: from them a pseudo-gradient is to be measured."""
        loaded: set[int] = set()
        try:
            with self.ledger.part(parts.MERGE):
                self._seen, ends = self._memory.changed, self._over and self._flight is None
                torn, self._torn = self._torn, True  # until this is through
                load = self._node.ask("merge", "load", measures=measures)
                loaded.update(self._merge(load, afresh or ends or torn, landing))
                if torn:
                    self._local.forget_deltas(loaded)
                if torn or (ends and not self._ended):
                    self._tally.give_up()
                self._torn, self._ended = False, self._ended or ends
            yield load["due"], set(load["kept"]) - loaded
        finally:
            self._node.tell("have read", loaded=sorted(loaded))

    def _merge(self, load: Message, afresh: bool, landing: Collection[int]) -> Collection[int]:
        """Merge what the node offers; which shards were loaded."""
        carries = {shard: Carry(carry) for shard, carry in load["shards"]}
        self.sync_count += bool(landing) and all(carries.get(shard) is Carry.SUBTRACT for shard in landing)
        for shard, carry in carries.items():
            self._tally.merged(shard, carry)
        if afresh:
            carries, mixed = dict.fromkeys(range(len(self._layout.shards)), Carry.DROP), []
        else:
            mixed = self._mixed(landing, carries)
            if not self._config.local_share:  # nothing of the local values
                carries |= dict.fromkeys(mixed, Carry.DROP)
                mixed = []
            carries = {shard: self._simplified(shard, carry) for shard, carry in carries.items()}
            for shard in set(load["gone"]) - set(mixed) if self._sent_at != self.steps else ():
                if carries.get(shard, Carry.DROP) is not Carry.DROP:  # a wait was broken off, and trained on from:
                    self._tally.overwritten(shard, 1.0)  # what was sent stays alone
            lost = set(load["lost"]) & {*carries, *load["due"]}
            carries, mixed = carries | self._given_up(lost), [shard for shard in mixed if shard not in lost]
        self._local.merge(carries, mixed, load["kept"], load["gone"])
        if load["commits"] != self._commits and self._flight is None and not landing:
            self._round_at = self._clock()  # a round that this peer has no part in is over, and the next one has begun
        self._commits, self._epoch, self._digest = load["commits"], load["epoch"], load["digest"]
        if self._asynchronous:
            self._trained, self._workers = load["trained"], max(1, load["workers"])
        return carries.keys()

    def _send(self, due: list[int], began: float, *, stands: bool) -> Flight:
        """Send the pseudo-gradient of these shards, which is written; `began`: the waiting time before. `stands`:
        nothing is trained until its result was merged.
        """
        sent = self._tally.send(due)
        if self._by_time and self._since:
            self._sync_every = self._since * len(self._layout.fragments)
        values = {"weight": sent.weight, "samples": sent.samples, "stands": stands, "every": self._sync_every}
        request = self._node.request("contribute", shards=due, **values)
        flight = Flight(request, sent, self.steps, self._since, self.waiting_time_s - began)
        self._round_steps, self._round_at = self._since, self._clock()
        self._since, self._sent_at = 0, self.steps
        return flight

    def _has_flown(self, flight: Flight) -> bool:
        overlap = self._config.overlap_steps
        return self.steps - flight.at_step >= overlap or self._time_is_up(overlap / self._interval)

    def _land(self, flight: Flight) -> bool:
        """Wait until the exchange is over, and merge its result; False: it never began, and all is as before it."""
        began = self.waiting_time_s
        hidden_s, self._flight = self._flown(flight), None
        if hidden_s is None:
            self._tally.unsend(flight.sent)
            self._since += flight.steps
            return False
        self._diverged = False
        self.merge(landing=flight.sent.shards)
        self._round_at += self.waiting_time_s - began  # what was waited for is no time to train in
        self.sent_count += 1
        self.last_sync_time_s = flight.stood_s + self.waiting_time_s - began + hidden_s
        self.total_sync_time_s += self.last_sync_time_s
        self._memory.waiting_s = self.waiting_time_s
        self._tell_round(hidden_s)
        return True

    def _tell_round(self, hidden_s: float) -> None:
        """Where the time since the last landing went: for the peer's record, and now and then for the log."""
        before, now = self._round_began, self._clock()
        self._round_began = self.ledger.stood
        spent = {part: seconds - before[part] for part, seconds in self._round_began.items()}
        self._memory.last_round = last = last_round(spent, hidden_s)
        if now - self._told_at >= TOLD_EVERY_S:
            self._told_at, took_s = now, sum(spent.values()) - spent[parts.PAUSED]
            log.info("round %d took %.2f s: %s", self.sent_count, took_s, told(last))

    def _flown(self, flight: Flight) -> float | None:
        """Wait for the others, however long they take; only for those that a run starts with, not for ever. How many
        seconds of the exchange training went on for; None: it never began.
        """
        starting = self._config.start_peers > 1 and self._memory.epoch == 0
        timeout_s = self._wait_timeout_s if starting else math.inf
        before = self.ledger.stood[parts.GROUP]
        if not self._memory.stands_since:
            self._memory.stands_since = self._clock()
        with self.ledger.part(parts.GROUP):  # until the node has told what else it was
            self._memory.stands = 1
            try:
                release = self._node.wait_for("release", n=flight.request, timeout_s=timeout_s)
            finally:
                self._memory.stands = 0
                self._memory.stands_since = 0.0
        if release is None:
            raise GaveUpWaiting(
                f"has passed, and fewer than start_peers={self._config.start_peers} peers have come",
                key="wait_timeout",
                value=self._wait_timeout_s,
                mend="start the others, or lower start_peers",
            )
        self.ledger.split(parts.GROUP, before, release["stood"])
        if not release["sent"]:
            return None
        if self._asynchronous:
            self._staleness, self._refused = release["staleness"], release["refused"]
            self._sync_every = release["steps"]
            self._interval = max(1, fragment_interval(self._sync_every, len(self._layout.fragments)))
        for part, seconds in release["hidden"].items():
            self._hidden[part] += seconds
        return float(sum(release["hidden"].values()))

    def _mixed(self, landing: Collection[int], carries: dict[int, Carry]) -> list[int]:
        """The shards in which local and global values are weighed, where that is the rule of the run."""
        if self._config.merge != "mix":
            return []
        mixed = [shard for shard in landing if carries.get(shard) is Carry.SUBTRACT]
        for shard in mixed:
            self._tally.overwritten(shard, 1 - self._config.local_share)
        return mixed

    def _given_up(self, shards: Collection[int]) -> dict[int, Carry]:
        """What was trained on these can't be told, for its base was changed in memory: the global values are loaded."""
        for shard in shards:
            self._tally.overwritten(shard, 1.0)
            self._tally.merged(shard, Carry.DROP)
        self._local.forget_deltas(shards)
        return dict.fromkeys(shards, Carry.DROP)

    def _simplified(self, shard: int, carry: Carry) -> Carry:
        """Where nothing was trained since the sending, to take the contribution away leaves nothing: the global value
        is loaded to the bit.
        """
        return Carry.DROP if carry is Carry.SUBTRACT and self._tally.idle_since_sending(shard) else carry

    def _give_up_progress(self) -> None:
        """Begin again from the global parameters: what was trained since can't be averaged. The next step's progress
        is contributed at once, so that nobody waits for long.

        Raises:
            P2PDilocoError: the same happened at the attempt before.
        """
        if self._diverged:
            mend = "lower the learning rate, clip gradients or look at the data, and start this peer again"
            raise P2PDilocoError(
                "training has diverged: twice in a row the model's parameters were not finite, or huge", mend=mend
            )
        log.warning("this round's local progress is not finite, or huge: it is dropped, the global model is loaded")
        self._diverged = True
        self.merge(afresh=True)
        self._local.forget_deltas(range(len(self._layout.shards)))
        self._tally.give_up()

    def _measure(self) -> None:
        if self._resumed_at is None:
            return
        self._step_times.add(self._clock() - self._resumed_at, self._round_steps)
