"""One peer in virtual time: the package's own replica, tensor work and merges, and a trainer's loop.

The loop makes the calls of `peer/hook.py` in its order; `feed` carries out effects in the order of
`node/node.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from setting import LIES
from task import Learner

from p2p_diloco.core import events
from p2p_diloco.core.pace import speeds, trains_for
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.state import descends
from p2p_diloco.core.version import incarnation
from p2p_diloco.node.ledger import SubmissionLog
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.node.trainer import contribution
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.peer.progress import LocalProgress
from p2p_diloco.peer.schedule import Schedule
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.mean import Given

if TYPE_CHECKING:
    from virtual import Swarm


class Diverged(Exception):
    """A peer's parameters are not finite."""


class LyingWork(SliceWork):
    """Multiplies the means that it computes."""

    times = 1.0

    def mean_of(self, index: int, given: Sequence[Given]) -> memoryview:
        _, codec = self._run.codecs(index)
        mean = codecs.decode(super().mean_of(index, given), codec, self._run.layout.slices[index].numel)
        return codecs.encode(mean * self.times, codec)


def _unsigned(*of: object) -> bytes:
    return b""


class Member:
    """One peer: its replica, tensors, model and trainer."""

    def __init__(self, swarm: Swarm, number: int, learner: Learner, *, founds: bool) -> None:
        self.swarm, self.name, self.learner = swarm, f"peer{number:03}", learner
        setting, run = swarm.setting, swarm.run
        self.step_s = setting.step_s[number % len(setting.step_s)]
        self.lies = number == setting.peers - 1 > 0
        self._loop = asyncio.get_running_loop()
        life = incarnation(int(1e6 + 1e3 * self._loop.time()), number)
        self.replica = Replica(self.name, run.rules, incarnation=life, now=self._loop.time())
        self.theta, base = torch.zeros(run.layout.numel), torch.zeros(run.layout.numel)
        delta = torch.zeros(run.layout.numel, dtype=codecs.written_in(run.config.codec, run.config.rounding))
        self.work = (LyingWork if self.lies else SliceWork)(run, self.theta, _unsigned, base)
        self.local = LocalModel(learner.model, run.layout, self.theta, base, delta, share=run.config.local_share)
        self.delta, self.progress = delta, LocalProgress(run.config, run.layout)
        self.submissions = SubmissionLog(run.config)
        self._planned = SimpleNamespace(step_time_s=0.0, trains_for_s=math.inf)
        self.schedule = Schedule(run.config, len(run.layout.fragments), self._planned, self._loop.time)  # type: ignore[arg-type]
        self._events: deque[events.Event] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._ready, self._released, self._loaded = asyncio.Event(), self._loop.create_future(), asyncio.Event()
        self._load: events.Load | None = None
        self._weight: float | None = None
        self._sent = 0  # the fragment of the last exchange
        self._again = False  # it was taken up again: what was sent is still out
        self._sent_samples = self._steps = self._commits = 0
        self._flight: tuple[int, int] | None = None  # steps of the round that was sent; own steps at its sending
        self._measures = self._landing = self._changed = self.over = False
        if founds:
            self.local.write_theta()
            self.feed(events.Found(0, tuple(f"{log.fragment:032x}" for log in self.replica.logs)))
        self.feed(events.Wakeup())
        self.task = asyncio.create_task(self._train())
        self.task.add_done_callback(swarm.ended)

    # -- the node's part

    def feed(self, event: events.Event) -> None:
        """Feed an event to the replica and carry out what follows, in the order of `node/node.py`."""
        self._events.append(event)
        if len(self._events) > 1 or self.swarm.failed is not None:
            return
        try:
            while self._events:
                effects = self.replica.handle(self._events[0], self._loop.time())
                if isinstance(self._events[0], events.Found):
                    for log in self.replica.logs:
                        self.work.hold(log.fragment, log.held.version)
                for effect in effects:
                    self._carry_out(effect)
                self._events.popleft()
            self._arm()
        except Exception as error:  # callbacks have no caller that could see it
            self.swarm.fail(error)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self.replica.next_wakeup()
        if math.isfinite(due) and self.name in self.swarm.live:
            self._timer = self._loop.call_at(max(due, self._loop.time() + 1e-3), self.feed, events.Wakeup())

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Send(to, message):
                self.swarm.send(self, to, message)
            case events.Average():
                if isinstance(self.work, LyingWork):
                    self.work.times = self.swarm.setting.wrong_mean if effect.base.epoch >= 4 else 1.0
                self._events.append(self.work.average(effect))
            case events.Apply():
                self._events.append(self.work.apply(effect))
            case events.Fill():
                self._events.append(self.work.fill(effect))
            case events.Roll():
                self._events.append(self.work.roll(effect))
            case events.Accept():
                self.work.accept(effect)
                self.swarm.judge(self)
            case events.Load():
                self._merge(effect)
            case events.Release():
                self._release(effect)
            case events.Start():
                self._ready.set()
            case events.Changed():
                self._changed = not self.swarm.run.rules.asynchronous or self._is_left_behind()
            case events.Finished():
                self.over = self._changed = True

    def _is_left_behind(self) -> bool:
        """Whether what the trainer has merged is of a lineage that has lost."""
        pairs = zip(self.replica.logs, self.replica.own.merged, strict=True)
        return any(v is not None and log.state is not None and not descends(log.held, v) for log, v in pairs)

    def _merge(self, load: events.Load) -> None:
        """Merge what is newer; then, if an exchange is due, compute the pseudo-gradients of what is due."""
        fragments, bases = self.swarm.run.rules.fragments, self.work.bases
        for loaded in load.fragments:
            self.work.merge(loaded)
        blends = self.progress.merge(
            {loaded.fragment: loaded.outcome for loaded in load.fragments},
            (self._steps, self.learner.samples),
            landed=self._sent if self._landing else None,
            due=load.due,
            gone=[number for number, slices in enumerate(fragments) if bases.gone.intersection(slices)],
            again=self._again and self._landing,
            ended=self.over,
        )
        by_slice = {index: blend for number, blend in blends.items() for index in fragments[number]}
        self._again = load.due is not None and self.replica.own.is_out(load.due)
        self.local.merge(by_slice, bases.kept)
        bases.loaded(by_slice)
        if load.due is not None:
            self._weight, self._sent_samples = self.progress.weigh(load.due)
            measures = self._measures and not self._again
            if measures and not self.local.write_delta(fragments[load.due], bases.kept):
                raise Diverged
        self._load = load
        self._loaded.set()

    def _release(self, release: events.Release) -> None:
        if release.sent and self.swarm.run.rules.asynchronous:
            roster = self.replica.roster
            self.submissions.ends(release)
            self.submissions.adjust(roster.mine.speed, speeds(roster.summaries()))
        if not self._released.done():
            self._released.set_result(release.sent)

    # -- the trainer's part

    async def _train(self) -> None:
        schedule, config = self.schedule, self.swarm.run.config
        await self._ready.wait()
        await self._merged()
        while not self.over:
            schedule.resume()
            await asyncio.sleep(self.step_s)
            since = schedule.steps + (self._flight[0] if self._flight else 0)
            self.learner.step(self._merged_samples / self.swarm.samples_a_step + since)
            schedule.step(first=not self._steps)
            self._steps += 1
            self.feed(events.Stepped(schedule.step_time_s))
            if config.pace == "time":
                of_all, nbytes = self.replica.roster.summaries(), self.swarm.run.round_nbytes
                self._planned.trains_for_s = trains_for(self.replica.interval, nbytes, self.name, of_all)
            due = schedule.is_due
            if self._flight and (due or self.over or schedule.has_flown(self._steps - self._flight[1])):
                due = not await self._land() or due
            if due and not self.over:
                await self._exchange()
            elif self._flight is None and self._changed:
                await self._merged()
        await self._merged()

    async def _merged(self, *, measures: bool = False, landing: bool = False) -> events.Load:
        """Merge all changed fragments; return which are due next."""
        self._loaded.clear()
        self._measures, self._landing, self._changed = measures, landing, False
        self.feed(events.Merge())
        await self._loaded.wait()
        commits, self._commits = self._commits, sum(self.replica.roster.mine.epochs)
        if commits != self._commits and not landing:
            self.schedule.next_round()  # a round closed without this peer
        assert self._load is not None
        return self._load

    @property
    def _merged_samples(self) -> int:
        return min((version.samples for version in self.replica.own.merged if version is not None), default=0)

    async def _exchange(self) -> None:
        while True:
            due = (await self._merged(measures=True)).due
            if due is None:
                return
            await self._send(due)
            if self.swarm.run.config.overlap_steps or await self._land():
                return

    async def _send(self, due: int) -> None:
        swarm, weight = self.swarm, self._weight or 0.0
        self._released = self._loop.create_future()
        self._sent = due
        if not self._again:
            self.progress.send(due, self._sent_samples)
            if not swarm.run.config.overlap_steps and not swarm.run.rules.asynchronous:
                self.work.bases.stand(swarm.run.rules.fragments[due])
            if self.lies and swarm.setting.lie:
                for place in swarm.run.layout.slices_of(due):
                    honest = self.delta[place.start : place.stop]
                    honest.copy_(LIES[swarm.setting.lie](honest.float(), swarm.noise))
                weight = min(weight * swarm.setting.lie_weight, swarm.run.rules.weight_max)
        self.schedule.planned()
        self._flight = self.schedule.sent(), self._steps
        swarm.may_cut(self)
        of = swarm.run, self.replica, self.work, due, lambda index: self.delta
        self.feed(await contribution(*of, weight, self._sent_samples))

    async def _land(self) -> bool:
        """Wait until the exchange is over, and merge its result. Returns False if it never began."""
        assert self._flight is not None
        began, (steps, _) = self._loop.time(), self._flight
        sent = await self._released
        self._flight = None
        if not sent:
            self.schedule.unsent(steps)
            if not self._again:
                self.progress.unsend(self._sent, self._sent_samples)
            return False
        await self._merged(landing=True)
        self.schedule.waited(self._loop.time() - began)
        if self.swarm.run.rules.asynchronous:
            self.schedule.follow(self.submissions.steps)
        return True
