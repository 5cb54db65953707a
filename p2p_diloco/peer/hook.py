"""Does the work at each `optimizer.step()`: counts the step, merges changed fragments, and exchanges a fragment when
one is due.

Law: the only path from the optimizer to the run and back. The node's replica decides which fragment is due and which
peer averages it. The result of an exchange is merged (the exchange "lands") `overlap_steps` inner steps after it was
sent; training goes on in between. At most one exchange is under way.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from p2p_diloco.config import RunConfig
from p2p_diloco.core.carry import Outcome
from p2p_diloco.core.leases import Tables
from p2p_diloco.errors import ConfigError, P2PDilocoError
from p2p_diloco.node.channel import Message
from p2p_diloco.node.ledger import GROUP, MERGE, PAUSED, PSEUDO_GRADIENT
from p2p_diloco.peer.devices import memory_reserved
from p2p_diloco.peer.metrics import Metrics, Standing, Times, of_node
from p2p_diloco.peer.node_client import NodeClient, Patience
from p2p_diloco.peer.progress import DATA, ENDED, UNSOUND, Blend, LocalProgress
from p2p_diloco.peer.schedule import Schedule
from p2p_diloco.peer.shard import Supply, tables_of
from p2p_diloco.tensors.layout import Layout

if TYPE_CHECKING:
    from p2p_diloco.peer.rank_hooks import Local  # which needs `Hook`

log = logging.getLogger("p2p_diloco")


@dataclass(frozen=True, slots=True)
class Due:
    """What to send next. `fragment`, `slices`: the fragment that is due, and its slices; `kept`: all slices whose
    loaded values are in `base`, because θ has changed since; `weight`: the contribution's weight, None if samples are
    the weight and the trainer reported none; `samples`: the contribution's samples. `again`: what was last sent of this
    fragment is still out, so the exchange is taken up again with the same Δ."""

    fragment: int
    slices: Sequence[int]
    kept: Collection[int]
    weight: float | None
    samples: int
    again: bool


@dataclass(frozen=True, slots=True)
class Flight:
    """An exchange under way. `request`: the number of its request; `due`: what was sent; `at_step`: the inner step
    after which it was sent; `steps`: the inner steps since the previous sending; `stood_s`: the seconds for which
    training stood still for this exchange before it was sent; `interval`: the inner steps of a whole round
    (`Schedule.interval`)."""

    request: int
    due: Due
    at_step: int
    steps: int
    stood_s: float
    interval: int


class Hook:
    """The trainer's side of all exchanges. Its `step` is called after each inner step."""

    def __init__(
        self,
        node: NodeClient,
        local: Local,
        config: RunConfig,
        layout: Layout,
        wait_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wait_timeout_s`: the longest time to wait until a run has its `start_peers`."""
        self._node, self._memory, self._local = node, node.memory, local
        self._memory.loss = self._memory.held_out_loss = math.nan
        self._config, self._layout = config, layout
        self.patience = Patience(node, config, wait_timeout_s)
        self._asynchronous, self._clock = config.mode == "async", clock
        self._times = Times(node.memory, clock)
        self._schedule = Schedule(config, len(layout.fragments), node.memory, clock)
        self.supply = Supply(config.local_share)
        self._progress = LocalProgress(config, layout)
        self.epoch, self._digest, self.commits = 0, "", 0  # of the last merged state, its commits over all fragments
        self._commit_steps = 0  # inner steps that a peer has made up to that state, if it always makes H
        self._trained, self._workers = 0, 1  # samples that it counts; live peers that train
        self._seen = -1
        self._ended = False  # the run has ended, and the model has its last state
        self._staleness = self._refused = self._pauses = 0
        self._flight: Flight | None = None
        self._diverged = False  # the last progress was dropped because it was not finite
        self._before: Mapping[str, float] = {}
        self.after: Callable[[], None] = lambda: None
        """Called after each step."""

    @property
    def standing(self) -> Standing:
        """The trainer's present position in the run, and its counters."""
        memory, progress = self._memory, self._progress
        totals: dict[str, Any] = {
            "sync_count": progress.counted,
            "sent_count": self._times.exchanges,
            "local_step": memory.steps,
            "dropped_samples": progress.dropped_samples,
            **self._times.totals(),
        }
        return Standing(
            epoch=self.epoch if not self._asynchronous else max(0, memory.epoch),
            digest=self._digest,
            finished=self._ended and memory.changed == self._seen,
            global_step=self._global_step(),
            metrics=Metrics(
                sync_every=self._schedule.sync_every,
                last_sync_time_s=self._times.last_sync_time_s,
                steps_per_second=1 / self._schedule.step_time_s if self._schedule.step_time_s else 0.0,
                staleness=self._staleness,
                refused_submissions=self._refused,
                **{name: value + self._before.get(name, 0) for name, value in totals.items()},
                **of_node(memory),
            ),
        )

    def _global_step(self) -> int:
        """The inner steps of the run: those that led to its commits and to the exchange under way, and this peer's own
        since it last sent a fragment. In asynchronous mode, the steps of all peers that commits count are divided by
        the number of live peers that train."""
        memory, since = self._memory, self._schedule.steps
        if not self._asynchronous:
            since = min(since, self._schedule.interval)  # a lower H may come when more steps are made already
            return self._commit_steps + (0 if self._flight is None else self._flight.interval) + since
        under_way = 0 if self._flight is None else self._flight.steps
        a_step = memory.samples / memory.steps if memory.samples and memory.steps else 1.0
        return round(self._trained / a_step / self._workers) + under_way + since

    @property
    def over(self) -> bool:
        """Whether the run has ended for all."""
        return bool(self._memory.finished)

    @property
    def is_due(self) -> bool:
        """Whether a merge is due: some fragment has changed, or the run has ended and the model has local progress."""
        return self._memory.changed != self._seen or (self.over and not self._ended)

    @property
    def uncounted(self) -> int:
        """The number of inner steps whose progress no merged commit has counted. 0 after the run's end, because no more
        steps are counted then."""
        return 0 if self.over else self._memory.steps - self._progress.settled

    def leave(self, last: Callable[[Hook], None]) -> None:
        """Call `last`, which makes the peer's last exchange."""
        last(self)

    def count_on(self, totals: Mapping[str, float]) -> None:
        """Add the totals from before a restart (`Metrics.totals`) to this hook's counters."""
        self._before = dict(totals)

    # -- what the trainer does

    def report(self, loss: float | None, samples: int | None, held_out_loss: float | None = None) -> None:
        """Record the loss and the samples of the next step, and the held-out loss of the global parameters."""
        self._memory.loss = self._memory.loss if loss is None else loss
        self._memory.held_out_loss = self._memory.held_out_loss if held_out_loss is None else held_out_loss
        self._memory.samples += samples or 0

    def step(self) -> None:
        """Called after each inner step: count it, merge changed fragments, and exchange a fragment when one is due."""
        with self._node.turn():
            self._step()
        self.after()

    def _step(self) -> None:
        self.supply.stepped()
        self._schedule.step(first=not self._memory.steps)
        self._memory.steps += 1
        asked_for = self._asked_for()
        due = asked_for or self._schedule.is_due
        flight, over = self._flight, self.over
        if flight is not None and (due or over or self._schedule.has_flown(self._memory.steps - flight.at_step)):
            due = not self._land(flight) or due
        if due and not self.over:
            self._exchange(at_once=asked_for)
        elif self._flight is None and self.is_due:
            self.merge()
        self._schedule.resume()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A block in which no inner step is made. The node is told at once, and again when the outermost block ends."""
        self._node.tell("pause", on=True)
        self._schedule.rest()
        self._pauses += 1
        try:
            with self.beside():
                yield
        finally:
            self._pauses -= 1
            with suppress(P2PDilocoError):  # if the node has ended, the next step reports that
                self._node.tell("pause", on=self._pauses > 0)

    def beside(self) -> AbstractContextManager[None]:
        """A block whose time is counted as a pause: neither as training nor as part of an exchange."""
        return self._times.part(PAUSED)

    def synchronise(self) -> None:
        """Exchange the whole model now. In synchronous mode, also ask the other peers to do the same at their next
        step."""
        with self._node.turn():
            self.catch_up()
            if self._asynchronous:
                for _ in self._layout.fragments:
                    self._exchange(at_once=True)
            else:
                goal = self.commits + len(self._layout.fragments)
                self._node.tell("nudge", goal=goal)
                while self.commits < goal and self._exchange(at_once=True):
                    pass
            self._schedule.resume()

    def exchange_early(self) -> None:
        """Exchange the fragment that is due now, between two steps, because the trainer has no data."""
        with self._node.turn():
            self._exchange(at_once=True)
            self._schedule.resume()

    def global_values(self) -> dict[str, Tensor]:
        """A copy of the global parameters by name."""
        with self._reading() as kept:
            return self._local.global_values(kept)

    def keep_values(self) -> None:
        """Keep a copy of the global parameters, which stays after the node's end."""
        with self._reading() as kept:
            self._local.keep_values(kept)

    def catch_up(self) -> None:
        """End the exchange that is under way, and merge all changed fragments."""
        with self._node.turn():
            if self._flight is not None:
                self._land(self._flight)
            self.merge()

    def merge(self) -> None:
        """Merge all changed fragments into the model."""
        with self._node.turn(), self._merged():
            pass

    # -- exchanges

    def _asked_for(self) -> bool:
        """Whether some peer has asked all others to exchange now, and this peer has not yet done so."""
        ahead = self._memory.goal > self.commits + (self._flight is not None)
        return ahead and not self._asynchronous

    def _exchange(self, *, at_once: bool = False) -> bool:
        """Contribute the fragment that is due. Without overlap, or with `at_once`, also wait for the fragment's
        commits. Returns False if nothing was contributed."""
        while True:
            began = self._times.waiting_s
            with self._merged(measures=True) as due, self._times.part(PSEUDO_GRADIENT):
                sound = due is None or due.again or self._local.write_delta(due.slices, due.kept)
            if due is None:
                return False
            if not sound:
                self._give_up_progress()
                return False
            goes_on = bool(self._config.overlap_steps) and not at_once
            self._memory.stands_since = 0.0 if goes_on else self._clock()
            flight = self._flight = self._send(due, began, stands=not goes_on)
            if goes_on or self._land(flight):
                return True

    def _send(self, due: Due, began: float, *, stands: bool) -> Flight:
        """Send the pseudo-gradients that were written for the fragment in `due`. `began`: the total waiting time before
        this exchange. `stands`: whether training stands still until the result is merged.

        Raises:
            ConfigError: samples are the weight, and none were reported.
        """
        if due.weight is None and not due.again:
            mend = "call peer.report(samples=...) before optimizer.step()"
            raise ConfigError("needs the number of samples of each step", key="weighting", value="samples", mend=mend)
        # of an exchange that is taken up again, the node knows the weight, and steps may have been made since
        weight, stands = due.weight or 0.0, stands and not due.again
        values = {"weight": weight, "samples": due.samples, "stands": stands, "every": self._schedule.planned()}
        uses = [] if due.again else self.supply.send(due.fragment)
        if not due.again:
            # first: an interrupt after the request would leave a contribution that the record doesn't know
            self._progress.send(due.fragment, due.samples)
        request = self._node.request("contribute", fragment=due.fragment, uses=uses, **values)
        interval, stood_s = self._schedule.interval, self._times.waiting_s - began
        return Flight(request, due, self._memory.steps, self._schedule.sent(), stood_s, interval)

    def _land(self, flight: Flight) -> bool:
        """Wait until the exchange is over, and merge its result. Returns False if the exchange never began; then
        nothing has changed."""
        began = self._times.waiting_s
        hidden_s, self._flight = self._wait_for_commits(flight), None
        if hidden_s is None:
            self._schedule.unsent(flight.steps)
            if not flight.due.again:
                self._progress.unsend(flight.due.fragment, flight.due.samples)
            return False
        self._diverged = False
        with self._merged(landed=flight.due):
            pass
        waited_s = self._times.waiting_s - began
        self._schedule.waited(waited_s)
        self._times.landed(flight.stood_s + waited_s + hidden_s, hidden_s)
        self._memory.gpu_reserved, self._memory.gpu_total = memory_reserved()
        return True

    def _wait_for_commits(self, flight: Flight) -> float | None:
        """Wait until an exchange is over. Returns how many seconds of the exchange were hidden behind training; None if
        the exchange never began."""
        before = self._times.group_s
        if not self._memory.stands_since:
            self._memory.stands_since = self._clock()
        with self._times.part(GROUP):  # the node's answer moves some of this time to other parts
            self._memory.stands = 1
            try:
                release = self.patience.until_over(flight.request)
            finally:
                self._memory.stands = 0
                self._memory.stands_since = 0.0
        hidden = release["hidden"] if release["sent"] else {}
        hidden_s = self._times.exchanged(before, release["stood"], hidden)
        if not release["sent"]:
            return None
        if self._asynchronous:
            self._staleness, self._refused = release["staleness"], release["refused"]
        return hidden_s

    def _give_up_progress(self) -> None:
        """Drop the local progress, which is not finite or too large, and load the global parameters. This peer
        contributes the progress of its next step at once, so that no other peer waits for long.

        Raises:
            P2PDilocoError: the previous progress was dropped too.
        """
        if self._diverged:
            mend = "lower the learning rate, clip gradients or check the data, and start this peer again"
            text = "training has diverged: twice in a row the model's parameters were not finite or too large"
            raise P2PDilocoError(text, mend=mend)
        self._diverged = True
        with self._merged(unsound=True):
            pass

    # -- merging: the node says what newer states count and which fragment is due, `progress` computes what to do with
    # each fragment, and `local` carries it out

    @contextmanager
    def _reading(self) -> Iterator[list[int]]:
        """A block in which the node writes no global parameters. Yields the slices whose loaded values are in
        `base`."""
        with self._node.turn():
            kept = self._node.ask("read", "readable")["kept"]
            try:
                yield kept
            finally:
                self._node.tell("have read", loaded=[])

    @contextmanager
    def _merged(
        self, *, unsound: bool = False, landed: Due | None = None, measures: bool = False
    ) -> Iterator[Due | None]:
        """A block at whose beginning all changed fragments are merged. It yields what is due next. During the block the
        node changes neither θ nor the bases.

        `unsound`: the local values are not finite or too large: load all global parameters. `landed`: what this trainer
        has sent, if this merge brings its result. `measures`: in the block, pseudo-gradients will be computed from the
        bases.
        """
        blends: dict[int, Blend] = {}
        torn = True  # until this merge is complete
        try:
            with self._times.part(MERGE):
                self._seen = self._memory.changed
                data = self.supply.gather(self._schedule.sync_every)
                load = self._node.ask("merge", "load", measures=measures, data=data)
                tables = None if load["tables"] is None else tables_of(load["tables"])
                blends = self._blends(load, tables, landed, unsound=unsound)
                loaded = {index: blend for number, blend in blends.items() for index in self._slices_of(number)}
                self._local.merge(loaded, load["kept"])
                torn = False
            if load["commits"] != self.commits and landed is None:
                self._schedule.next_round()  # a round closed without this peer
            self._schedule.follow(load["every"])
            if tables is not None:
                self.supply.hear(tables, ended=load["ended"])
            self.epoch, self._digest, self.commits = load["epoch"], load["digest"], load["commits"]
            self._commit_steps = load["commit_steps"]
            self._trained, self._workers, self._ended = load["trained"], load["workers"], load["ended"]
            kept, due = set(load["kept"]) - loaded.keys(), load["due"]
            again = load["again"]
            yield None if due is None else Due(due, self._slices_of(due), kept, *self._progress.weigh(due), again)
        finally:
            self._progress.torn |= torn
            self._node.tell("have read", loaded=[] if torn else sorted(blends))

    def _slices_of(self, fragment: int) -> list[int]:
        return [place.index for place in self._layout.slices_of(fragment)]

    def _blends(self, load: Message, tables: Tables | None, landed: Due | None, *, unsound: bool) -> dict[int, Blend]:
        """Compute what a merge does with each fragment. What is dropped is logged. `tables`: of the state's data."""
        progress, before = self._progress, self._progress.dropped.copy()
        blends = progress.merge(
            outcomes_in(load["outcomes"]),
            (self._memory.steps, self._memory.samples),
            landed=None if landed is None else landed.fragment,
            again=landed is not None and landed.again,
            unsound=unsound,
            **{name: load[name] for name in ("due", "gone", "lost", "ended")},
        )
        self.supply.merge(blends.get(0))
        if tables is not None and self.supply.conflicts(tables):
            blends = progress.drop(DATA)
            self.supply.merge(blends.get(0))
        for why, samples in progress.dropped.items():
            if samples > before[why] or (unsound and why == UNSOUND):
                level = logging.INFO if why == ENDED else logging.WARNING
                count = math.ceil(samples - before[why])
                of = f"{count:,} sample{'' if count == 1 else 's'}"
                log.log(level, "the progress of %s is dropped: %s", of, why)
        return blends


def outcomes_in(told: Iterable[tuple[int, dict[str, Any]]]) -> dict[int, Outcome]:
    """Read the outcomes by fragment that the node has told as plain values."""
    return {fragment: Outcome(**outcome) for fragment, outcome in told}
