"""A run of several peers in virtual time, in one process, with the protocol and the tensors of a real run.

Every peer is the package's own: `Replica` decides, `SliceWork` encodes, averages and takes outer steps, `Rhythm`,
`LocalProgress` and `LocalModel` do the trainer's part. Only three things are imitated here: the clock, which jumps to
the next event; the wires, which deliver each message after `LATENCY_S` unless a link is cut or the receiver is dead;
and the trainer's loop (`member`). So a result depends on the arguments alone, and a step takes as long as its peer's
`step_s` says, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections import deque

import torch
from member import Diverged, Member
from setting import DEAD_S, Result, Setting
from task import Learner, Task

from p2p_diloco import RunConfig
from p2p_diloco.core.events import Broke, Delivered, Discovered, Event, Received, SendFailed
from p2p_diloco.core.messages import Mean, Message, Part, Slice
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.node.run import Run, layout_of
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.peer.progress import Blend
from p2p_diloco.tensors.layout import specs_of

LATENCY_S = 0.02
SETTLES_S = 20.0
"""After the last step, peers that were cut off still learn what the others hold."""


class _Instant(selectors.DefaultSelector):
    """Waits for no time: the clock jumps instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen again"
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 0 and jumps to the next timer when nothing is left to do."""

    def __init__(self) -> None:
        self._instant = _Instant()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.now


class Swarm:
    """All peers of one run, and the wires between them."""

    def __init__(self, setting: Setting, seed: int, task: Task, points: int) -> None:
        self.setting, self.seed, self.task = setting, seed, task
        self.samples_a_step = setting.peers * setting.batch
        self.samples = round(setting.steps * task.steps) * self.samples_a_step
        self._start = task.started(seed, round(setting.warm * task.warm))
        self._judge = task.model(seed)
        config = RunConfig(**{**setting.config.to_wire(), "stop_after_samples": self.samples})
        self.run = Run("experiment", config, layout_of(config, specs_of(self._judge)))
        self.live: dict[str, Member] = {}
        self._cut_until: dict[str, float] = {}
        self.drawn, self.noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self.payload_bytes = self._came = 0
        self._marks = deque(self.samples * (point + 1) // points for point in range(points))
        self._joins = deque(self.samples * share for share in setting.joins)
        self.curve: list[tuple[float, int, float]] = []
        self.failed: BaseException | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def result(self) -> Result:
        """Make the run."""
        loop = asyncio.get_running_loop()
        for _ in range(self.setting.peers):
            self.join()
        if self.setting.kill_every_s:
            loop.call_later(self._pause(), self._kill)
        try:
            await self.over
            took_s = loop.time()
            await asyncio.sleep(SETTLES_S)
            if self.failed is not None:
                raise self.failed
        except (Diverged, P2PDilocoError):
            return Result(math.inf, loop.time(), self.payload_bytes, tuple(self.curve))
        finally:
            for peer in self.live.values():
                peer.task.cancel()
        over = [peer for peer in self.live.values() if peer.over]
        assert len({peer.replica.versions for peer in over}) == 1, "replicas differ"
        assert all(torch.equal(peer.theta, over[0].theta) for peer in over), "tensors differ"
        peer = next(iter(self.live.values()))
        return Result(self._loss(peer, self.task.windows), took_s, self.payload_bytes, tuple(self.curve))

    def fail(self, error: BaseException) -> None:
        """End the run with an error."""
        self.failed = self.failed or error
        if not self.over.done():
            self.over.set_exception(error)

    def ended(self, task: asyncio.Task[None]) -> None:
        """End the run if all trainers have ended, or one has failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)
        elif all(peer.over for peer in self.live.values()) and not self.over.done():
            self.over.set_result(None)

    # -- who takes part

    def join(self) -> None:
        """Start another peer: the first one founds the run."""
        number, self._came = self._came, self._came + 1
        learner = Learner(self.task, self.setting, self.seed, f"peer{number}")
        if not number:
            learner.model.load_state_dict(self._start)
        peer = Member(self, number, learner, founds=not number)
        others = list(self.live.values())
        self.live[peer.name] = peer
        for other in others:
            self._later(peer, LATENCY_S, Discovered(other.name))
            self._later(other, LATENCY_S, Discovered(peer.name))

    def _pause(self) -> float:
        return self.drawn.uniform(0.5, 1.5) * self.setting.kill_every_s

    def _kill(self) -> None:
        """Kill a peer that trains, and start a newcomer."""
        if self.over.done():
            return
        able = [peer for peer in self.live.values() if peer.replica.has_state]
        if len(able) == len(self.live):
            peer = self.live.pop(self.drawn.choice(able).name)
            peer.task.cancel()
            for other in self.live.values():
                self._later(other, LATENCY_S, Broke(peer.name))
            self.join()
        asyncio.get_running_loop().call_later(self._pause(), self._kill)

    def may_cut(self, peer: Member) -> None:
        """Cut a peer's links for a while, by chance."""
        if self.drawn.random() < self.setting.drop:
            self._cut_until[peer.name] = asyncio.get_running_loop().time() + 2 * DEAD_S

    # -- the wires

    def _later(self, peer: Member, delay: float, event: Event) -> None:
        def feed() -> None:
            if self.live.get(peer.name) is peer:
                peer.feed(event)

        asyncio.get_running_loop().call_later(delay, feed)

    def _is_cut(self, *names: str) -> bool:
        now = asyncio.get_running_loop().time()
        return any(self._cut_until.get(name, 0.0) > now for name in names)

    def send(self, sender: Member, to: str, message: Message) -> None:
        """Deliver a message, or report to its sender that it was not delivered."""
        target = self.live.get(to)
        if target is None or self._is_cut(sender.name, to):
            gone = target is None
            self._later(sender, LATENCY_S if gone else DEAD_S, SendFailed(to, message, gone=gone))
            return
        if isinstance(message, Part):
            message = sender.work.part(message.fragment, message.number)
        if isinstance(message, Slice | Mean):
            self.payload_bytes += len(message.payload)
        self._later(target, LATENCY_S, Received(sender.name, message))
        self._later(sender, 2 * LATENCY_S, Delivered(to, message))

    # -- the outcome

    def judge(self, peer: Member) -> None:
        """Evaluate the global parameters if enough samples were counted since the last evaluation."""
        versions = peer.replica.versions
        if next(iter(self.live.values()), None) is not peer or None in versions:
            return
        counted = min(version.samples for version in versions if version is not None)
        while self._joins and counted >= self._joins[0]:
            self._joins.popleft()
            self.join()
        if self._marks and counted >= self._marks[0]:
            while self._marks and counted >= self._marks[0]:
                self._marks.popleft()
            self.curve.append((asyncio.get_running_loop().time(), counted, self._loss(peer, self.task.few)))

    def _loss(self, peer: Member, windows: int) -> float:
        judge = LocalModel(self._judge, self.run.layout, peer.theta, peer.theta, peer.delta)
        judge.merge(dict.fromkeys(range(len(self.run.layout.slices)), Blend.NONE))
        return self.task.loss(self._judge, windows)


def simulated(setting: Setting, seed: int, task: Task, points: int = 8) -> Result:
    """Make one run in virtual time."""

    async def made() -> Result:
        return await Swarm(setting, seed, task, points).result()

    loop = VirtualLoop()
    try:
        return loop.run_until_complete(made())
    finally:
        loop.close()
