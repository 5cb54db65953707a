"""What happens at `optimizer.step()`: count, merge what has changed, and when a fragment is due exchange it.

Law: the one path from the optimizer to the run and back, and the only caller of what touches parameters.
Nothing here decides which fragment is due or who averages it: the node's replica says so.
"""

from __future__ import annotations

import logging
import math
import time

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Carry
from p2p_diloco.core.schedule import fragment_interval
from p2p_diloco.errors import ConfigError, GaveUpWaiting, P2PDilocoError
from p2p_diloco.node.shared import Count, Level
from p2p_diloco.peer.line import NodeLine
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.tensors.layout import Layout
from p2p_diloco.tensors.mean import WEIGHT_MIN

STEP_TIME_SMOOTHING = 0.9
"""How much of the old estimate of a step's time stays when a new step has been made."""

log = logging.getLogger("p2p_diloco")


class Hook:
    """One trainer's steps and exchanges. Step times are of training alone: exchanges and pauses don't
    count.
    """

    def __init__(
        self, node: NodeLine, local: LocalModel, config: RunConfig, layout: Layout, wait_timeout_s: float
    ) -> None:
        self._node, self._memory, self._local = node, node.memory, local
        self._config, self._layout, self._wait_timeout_s = config, layout, wait_timeout_s
        fragments = len(layout.fragments)
        self._interval = fragment_interval(config.sync_every, fragments)
        self.steps = 0
        self.samples = 0
        """Reported, since the start."""
        self.sync_count = 0
        self.last_sync_time_s = self.total_sync_time_s = self.waiting_time_s = 0.0
        self._dropped = 0.0
        self._diverged = False  # the last progress was given up, for it was not finite
        shards = len(layout.shards)
        self._since = 0  # steps since the last sending
        self._steps_sent = [0] * shards  # steps at each shard's last sending
        self._samples_sent = [0] * shards  # samples reported until then
        self._uncounted = [0] * shards  # samples whose progress was sent, and is counted by no commit yet
        self._seen = -1
        self._commits = 0  # over all fragments
        self._step_time_s = 0.0
        self._resumed_at: float | None = time.perf_counter()

    @property
    def global_step(self) -> int:
        """Inner steps of the run: those that lead to its commits, and this peer's own since its last
        sending.
        """
        return self._interval * self._commits + self._since

    @property
    def step_time_s(self) -> float:
        """What an inner step usually takes; 0 until known."""
        return self._step_time_s

    @property
    def finished(self) -> bool:
        """Whether the run has ended for all."""
        return bool(self._memory.count(Count.FINISHED))

    @property
    def dropped_samples(self) -> int:
        """Samples whose progress was given up, by the share of the model that lost it."""
        return round(self._dropped)

    # -- what the trainer does

    def report(self, loss: float | None, samples: int | None) -> None:
        """Note the loss and the samples of the step that is about to be made."""
        if loss is not None:
            self._memory.set_level(Level.LOSS, float(loss))
        if samples is not None:
            if samples < 0:
                raise ConfigError("must be 0 or more", key="samples", value=samples, mend="report what was trained on")
            self.samples += samples
            self._memory.set_count(Count.SAMPLES, self.samples)

    def step(self) -> None:
        """After each inner step."""
        self._measure()
        self.steps += 1
        self._since += 1
        self._memory.set_count(Count.STEPS, self.steps)
        self._memory.set_level(Level.STEP_TIME_S, self._step_time_s)
        asked_for = self._memory.count(Count.GOAL) > self._commits
        if (self._since >= self._interval or asked_for) and not self.finished:
            self.exchange()
        elif self._memory.count(Count.CHANGED) != self._seen:
            self.merge()
        self._resumed_at = time.perf_counter()

    def rest(self) -> None:
        """The time from here to the end of the next step is no step's."""
        self._resumed_at = None

    def synchronise(self) -> None:
        """Exchange the whole model now, and have the others do the same at their next step."""
        self.merge()
        goal = self._commits + len(self._layout.fragments)
        self._node.tell("nudge", goal=goal)
        while self._commits < goal and self.exchange():
            pass
        self._resumed_at = time.perf_counter()

    # -- what follows

    def exchange(self) -> bool:
        """Contribute what is due, and wait for its commits; False if nothing is."""
        began = time.perf_counter()
        while due := self.merge():
            self._local.write_delta(due)
            if not self._local.may_be_sent(due):
                self._give_up_progress()
                return False
            if self._contribute(due):
                break
        else:
            return False
        self.merge()
        self.sync_count += 1
        self.last_sync_time_s = time.perf_counter() - began
        self.total_sync_time_s += self.last_sync_time_s
        self.waiting_time_s += self.last_sync_time_s
        self._memory.set_level(Level.WAITING_S, self.waiting_time_s)
        return True

    def merge(self, *, afresh: bool = False) -> list[int]:
        """Merge whatever has changed into the model; the shards that are due next, if any. `afresh`: load all of
        the global parameters, and keep nothing of the local ones.
        """
        self._seen = self._memory.count(Count.CHANGED)
        load = self._node.ask("merge", "load")
        try:
            carries = {shard: self._simplified(shard, Carry(carry)) for shard, carry in load["shards"]}
            if afresh:
                carries = dict.fromkeys(range(len(self._layout.shards)), Carry.DROP)
            self._local.merge(carries)
        finally:
            self._node.tell("have read")
        self._commits = load["commits"]
        due: list[int] = load["due"]
        return due

    def _contribute(self, due: list[int]) -> bool:
        """Send the pseudo-gradient of these shards, which is written, and wait until the exchange is over; False:
        it never began.
        """
        steps = min(self.steps - self._steps_sent[shard] for shard in due)
        samples = min(self.samples - self._samples_sent[shard] for shard in due)
        weight = self._weight(steps, samples, min(self._uncounted[shard] for shard in due))
        counted = samples or steps  # where none are reported, a step is one
        n = self._node.request("contribute", shards=due, weight=weight, samples=counted)
        if not self._wait_for_release(n):
            return False
        self._since, self._diverged = 0, False
        for shard in due:
            self._steps_sent[shard], self._samples_sent[shard] = self.steps, self.samples
            self._uncounted[shard] += counted
        return True

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
        self._local.forget_deltas()
        for shard, place in enumerate(self._layout.shards):
            trained = self.samples - self._samples_sent[shard] or self.steps - self._steps_sent[shard]
            self._dropped += place.numel / self._layout.numel * (trained + self._uncounted[shard])
            self._steps_sent[shard], self._samples_sent[shard] = self.steps, self.samples
            self._uncounted[shard] = 0

    def _wait_for_release(self, n: int) -> bool:
        """Wait for the others, however long they take; only for those that a run starts with, not for
        ever.
        """
        starting = self._config.start_peers > 1 and self._memory.count(Count.EPOCH) == 0
        timeout_s = self._wait_timeout_s if starting else math.inf
        release = self._node.wait_for("release", n=n, timeout_s=timeout_s)
        if release is None:
            raise GaveUpWaiting(
                f"has passed, and fewer than start_peers={self._config.start_peers} peers have come",
                key="wait_timeout",
                value=self._wait_timeout_s,
                mend="start the others, or lower start_peers",
            )
        return bool(release["sent"])

    def _simplified(self, shard: int, carry: Carry) -> Carry:
        """The carry of a shard, accounted for. Where nothing was trained since the sending, to take the
        contribution away leaves nothing: the global value is loaded to the bit.
        """
        match carry:
            case Carry.SUBTRACT:
                self._uncounted[shard] = 0
                return Carry.DROP if self._steps_sent[shard] == self.steps else carry
            case Carry.DROP:
                share = self._layout.shards[shard].numel / self._layout.numel
                self._dropped += share * self._uncounted[shard]
                self._uncounted[shard] = 0
        return carry

    def _weight(self, steps: int, samples: int, carried: int) -> float:
        """`carried`: samples whose progress was sent before, and is sent again for no commit counts it."""
        if not steps and not carried:
            return WEIGHT_MIN  # nothing was trained: the mean is not to be diluted by that
        match self._config.weighting:
            case "steps":
                return float(max(1, steps))
            case "uniform":
                return 1.0
            case "samples":
                if steps and not samples:
                    raise ConfigError(
                        "needs to be told the samples of each step",
                        key="weighting",
                        value="samples",
                        mend="call peer.report(samples=...) before optimizer.step()",
                    )
                return float(samples or carried)

    def _measure(self) -> None:
        if self._resumed_at is None:
            return
        took_s = time.perf_counter() - self._resumed_at
        known, keep = self._step_time_s, STEP_TIME_SMOOTHING
        self._step_time_s = took_s if not known else keep * known + (1 - keep) * took_s
