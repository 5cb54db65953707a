"""Does the work at each `optimizer.step()`: counts the step, merges changed fragments, and exchanges a fragment when
one is due.

Law: the only path from the optimizer to the run and back. The node's replica decides which fragment is due and which
peer averages it. The result of an exchange is merged (the exchange "lands") `overlap_steps` inner steps after it was
sent; training goes on in between. At most one exchange is under way.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer

from p2p_diloco.config import RunConfig
from p2p_diloco.errors import ConfigError, P2PDilocoError
from p2p_diloco.node.ledger import GROUP, PAUSED, PSEUDO_GRADIENT
from p2p_diloco.peer.devices import memory_reserved
from p2p_diloco.peer.local import Local
from p2p_diloco.peer.merging import Due, Flight, Merger
from p2p_diloco.peer.metrics import Metrics, Standing, Times, of_node
from p2p_diloco.peer.node_client import NodeClient, Patience
from p2p_diloco.peer.progress import LocalProgress
from p2p_diloco.peer.rhythm import Rhythm
from p2p_diloco.peer.shard import Supply
from p2p_diloco.tensors.layout import Layout

log = logging.getLogger("p2p_diloco")


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
        self._rhythm = Rhythm(config, len(layout.fragments), node.memory, clock)
        self.supply = Supply(config.local_share)
        progress = LocalProgress(config, layout)
        self.merger = Merger(node, local, layout, self._times, self._rhythm, self.supply, progress)
        self._staleness = self._refused = self._pauses = 0
        self._flight: Flight | None = None
        self._diverged = False  # the last progress was dropped because it was not finite
        self._before: Mapping[str, float] = {}

    @property
    def standing(self) -> Standing:
        """The trainer's present position in the run, and its counters."""
        memory, merger, progress = self._memory, self.merger, self.merger.progress
        totals: dict[str, Any] = {
            "sync_count": progress.counted,
            "sent_count": self._times.exchanges,
            "local_step": memory.steps,
            "dropped_samples": progress.dropped_samples,
            **self._times.totals(),
        }
        return Standing(
            epoch=merger.epoch if not self._asynchronous else max(0, memory.epoch),
            digest=merger.digest,
            finished=merger.finished,
            global_step=self._global_step(),
            metrics=Metrics(
                sync_every=self._rhythm.sync_every,
                last_sync_time_s=self._times.last_sync_time_s,
                steps_per_second=1 / self._rhythm.step_time_s if self._rhythm.step_time_s else 0.0,
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
        memory, merger, since = self._memory, self.merger, self._rhythm.steps
        if not self._asynchronous:
            since = min(since, self._rhythm.interval)  # a lower H may come when more steps are made already
            return merger.commit_steps + (0 if self._flight is None else self._flight.interval) + since
        under_way = 0 if self._flight is None else self._flight.steps
        a_step = memory.samples / memory.steps if memory.samples and memory.steps else 1.0
        return round(merger.trained / a_step / merger.workers) + under_way + since

    @property
    def uncounted(self) -> int:
        """The number of inner steps whose progress no merged commit has counted. 0 after the run's end, because no more
        steps are counted then."""
        return 0 if self.merger.over else self._memory.steps - self.merger.progress.settled

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

    def _step(self) -> None:
        self.supply.stepped()
        self._rhythm.step(first=not self._memory.steps)
        self._memory.steps += 1
        asked_for = self._asked_for()
        due = asked_for or self._rhythm.is_due
        flight, over = self._flight, self.merger.over
        if flight is not None and (due or over or self._rhythm.has_flown(self._memory.steps - flight.at_step)):
            due = not self._land(flight) or due
        if due and not self.merger.over:
            self._exchange(at_once=asked_for)
        elif self._flight is None and self.merger.is_due:
            self.merge()
        self._rhythm.resume()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A block in which no inner step is made. The node is told at once, and again when the outermost block ends."""
        self._node.tell("pause", on=True)
        self._rhythm.rest()
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
                goal = self.merger.commits + len(self._layout.fragments)
                self._node.tell("nudge", goal=goal)
                while self.merger.commits < goal and self._exchange(at_once=True):
                    pass
            self._rhythm.resume()

    def exchange_early(self) -> None:
        """Exchange the fragment that is due now, between two steps, because the trainer has no data."""
        with self._node.turn():
            self._exchange(at_once=True)
            self._rhythm.resume()

    def global_values(self) -> dict[str, Tensor]:
        """A copy of the global parameters by name."""
        with self.merger.reading() as kept:
            return self._local.global_values(kept)

    def catch_up(self) -> None:
        """End the exchange that is under way, and merge all changed fragments."""
        with self._node.turn():
            if self._flight is not None:
                self._land(self._flight)
            self.merge()

    def merge(self) -> None:
        """Merge all changed fragments into the model."""
        with self._node.turn(), self.merger.merged():
            pass

    # -- exchanges

    def _asked_for(self) -> bool:
        """Whether some peer has asked all others to exchange now, and this peer has not yet done so."""
        ahead = self._memory.goal > self.merger.commits + (self._flight is not None)
        return ahead and not self._asynchronous

    def _exchange(self, *, at_once: bool = False) -> bool:
        """Contribute the fragment that is due. Without overlap, or with `at_once`, also wait for the fragment's
        commits. Returns False if nothing was contributed."""
        while True:
            began = self._times.waiting_s
            with self.merger.merged(measures=True) as due, self._times.part(PSEUDO_GRADIENT):
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
        values = {"weight": weight, "samples": due.samples, "stands": stands, "every": self._rhythm.planned()}
        uses = [] if due.again else self.supply.send(due.fragment)
        if not due.again:
            # first: an interrupt after the request would leave a contribution that the record doesn't know
            self.merger.progress.send(due.fragment, due.samples)
        request = self._node.request("contribute", fragment=due.fragment, uses=uses, **values)
        interval, stood_s = self._rhythm.interval, self._times.waiting_s - began
        return Flight(request, due, self._memory.steps, self._rhythm.sent(), stood_s, interval)

    def _land(self, flight: Flight) -> bool:
        """Wait until the exchange is over, and merge its result. Returns False if the exchange never began; then
        nothing has changed."""
        began = self._times.waiting_s
        hidden_s, self._flight = self._wait_for_commits(flight), None
        if hidden_s is None:
            self._rhythm.unsent(flight.steps)
            if not flight.due.again:
                self.merger.progress.unsend(flight.due.fragment, flight.due.samples)
            return False
        self._diverged = False
        with self.merger.merged(landed=flight.due):
            pass
        waited_s = self._times.waiting_s - began
        self._rhythm.waited(waited_s)
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
        with self.merger.merged(unsound=True):
            pass


def after_each_step(optimizer: Optimizer, call: Callable[[], None]) -> Callable[[], None]:
    """Have torch make `call` after each step of the optimizer. Returns the function that ends that.

    torch.compile never traces the call. A script may compile `optimizer.step()`; traced, what happens at a step would
    be compiled again and again, because it differs from step to step. Hooks of gradients may step one optimizer for
    each parameter within a backward pass, which still needs the parameters as they are; then `call` is made when that
    pass has ended. In a forked process nothing is called.
    """
    owner = os.getpid()

    def in_this_process() -> None:
        if os.getpid() == owner:
            call()

    def stepped(*_: object) -> None:
        try:
            Variable._execution_engine.queue_callback(in_this_process)
        except RuntimeError:  # no backward pass is going on
            pass
        else:
            return
        in_this_process()

    if not getattr(type(optimizer).step, "hooked", False):  # a wrapper may not have called torch's own __init__
        Optimizer.__setstate__(optimizer, {"defaults": getattr(optimizer, "defaults", {})})
    untraced = torch.compiler.disable(stepped)  # type: ignore[no-untyped-call]
    return optimizer.register_step_post_hook(untraced).remove
