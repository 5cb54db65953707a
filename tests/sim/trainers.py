"""The trainers of a simulated run: they make inner steps, exchange when due, merge, and pause.

Law: a trainer sees only its own replica, as a real trainer does; the invariants watch it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2p_diloco.core.events import Merge, Pause, Stepped

from .model import Fate, Trainer

if TYPE_CHECKING:
    from p2p_diloco.core.leases import Use

    from .face import Merged
    from .process import Process
    from .world import World


class Trainers:
    """Drives every trainer of a simulated run, and records what became of the steps."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.all: list[tuple[str, Trainer]] = []  # (peer, trainer) of all incarnations
        self.answered = [0 for _ in world.units]  # per unit: the steps that were reported to a trainer as counted
        self.training = True  # False at the end, when the world settles
        self.steps = 0  # number of inner steps so far; each is one bit

    def step(self, process: Process) -> None:
        """Let the trainer make an inner step, or wait, and schedule the next call of this method."""
        world = self.world
        if world.alive.get(process.name) is not process or not self.training:
            return
        held = max(process.stalled_until, process.frozen_until)
        if held > world.now:
            world.at(held - world.now, lambda: self.step(process))
            return
        world.at(process.step_time, lambda: self.step(process))
        trainer = process.trainer
        if process.paused is not None:
            process.active = world.now
        if process.paused is not None or process.replica.merging:
            return
        if self._waits(process) or process.replica.finished:
            self.land(process)
            return
        if not trainer.loaded:
            world.feed(process, Merge())
            if not trainer.loaded:
                return
        if world.data is not None:
            if not world.data.ready(process):
                return
            world.data.stepped(process, self.steps)
        trainer.step(1 << self.steps)
        world.witness.stepped(process)
        self.steps += 1
        process.active = world.now
        process.flown += 1
        world.feed(process, Stepped(process.step_time))
        if process.blocked:
            self.land(process)
        elif process.changed or trainer.since_sending >= process.interval:
            world.feed(process, Merge())

    def _waits(self, process: Process) -> bool:
        """Whether the trainer must wait now until its exchange is over."""
        settings = self.world.settings
        due = process.trainer.since_sending >= process.interval or self._is_dry(process)
        return process.blocked and (due or process.flown >= settings.overlap or process.replica.finished)

    def _is_dry(self, process: Process) -> bool:
        """Whether the trainer has no data for a further step."""
        return self.world.data is not None and not self.world.data.of(process).stock

    def merge(self, process: Process) -> None:
        """Let the trainer merge what is newer."""
        self.world.feed(process, Merge())

    def land(self, process: Process) -> None:
        """If the exchange is over and training waits for it, merge its result."""
        if process.released and self._waits(process):
            process.blocked = process.released = False
            self.world.feed(process, Merge())
            if self.world.data is not None:
                self.world.data.landed(process)

    def load(self, process: Process, merged: Sequence[Merged], due: int | None) -> None:
        """Answer a Merge: merge what is newer, and contribute to the unit that is due."""
        world, trainer = self.world, process.trainer
        world.membership.merges(process)
        for one in merged:
            trainer.merge(one.unit, process.replica.holds(one.unit), one.fate)
            world.witness.merges(process, one)
            if one.fate is Fate.COUNTED:
                self.answered[one.unit] |= trainer.delta[one.unit]
        if world.data is not None:
            world.data.loaded(process, merged)
        process.changed, process.interval = False, process.replica.interval
        if not trainer.loaded:
            trainer.loaded = True
            return
        if not self.training:
            return
        asks = world.data is not None and world.data.of(process).asks and not world.data.of(process).stock
        if due is not None and (asks or trainer.since_sending >= process.interval) and not process.blocked:
            steps = trainer.delta[due] = trainer.pending(due)
            process.blocked, process.flown = True, 0
            world.membership.sends(process, due)
            samples, trainer.since_sending = trainer.since_sending, 0
            uses = () if world.data is None else world.data.uses(process, due)
            hesitation = world.settings.hesitation
            delay = world.rng.uniform(0.0, hesitation) if hesitation else 0.0
            world.at(delay, lambda: self._contribute(process, due, samples, steps, uses))

    def pause(self, process: Process, seconds: float) -> None:
        """Let the trainer announce a pause, and end it after this many seconds."""
        world = self.world
        if process.paused is None and process.training:
            process.paused, arrives = world.now, max(world.now, process.frozen_until)
            world.feed_alive(process, Pause(True))
            world.at(seconds, lambda: self._resume(process, arrives))

    def _resume(self, process: Process, after: float) -> None:
        """End a pause. ``after``: when the node hears that the pause has begun, which a freeze may delay. The node
        hears of the end no earlier, even if healing has ended that freeze since."""
        world = self.world
        if world.alive.get(process.name) is process:
            world.membership.resumes(process)
            process.paused = None
            world.at(max(0.0, after - world.now), lambda: world.feed_alive(process, Pause(False)))

    def _contribute(self, process: Process, unit: int, samples: int, steps: int, uses: tuple[Use, ...]) -> None:
        world = self.world
        if world.alive.get(process.name) is process:
            world.feed(process, process.replica.contribution(unit, samples, steps, uses))
            process.trainer.delta[unit] = process.replica.sent(unit, steps)
