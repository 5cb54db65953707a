"""When the next exchange is due: after a number of inner steps, or with pace="time" after a time.

Law: counts the steps of a round and times them; exchanges and pauses don't count. It exchanges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from p2p_diloco.config import RunConfig
from p2p_diloco.core.pace import StepTimes, is_over
from p2p_diloco.core.schedule import fragment_interval
from p2p_diloco.node.shared import SharedMemory


class Rhythm:
    """The rounds of one trainer, `fragments` of them to an exchange of the whole model."""

    def __init__(self, config: RunConfig, fragments: int, memory: SharedMemory, clock: Callable[[], float]) -> None:
        self._fragments, self._memory, self._clock = fragments, memory, clock
        self._by_time = config.pace == "time"
        self.sync_every = config.sync_every
        """H of this peer: inner steps between two exchanges of the whole model."""
        self.interval = fragment_interval(config.sync_every, fragments)
        """Inner steps of a round; with pace="time" those that it has at most."""
        self.steps = 0
        """Inner steps since the last sending."""
        self._overlap_steps = config.overlap_steps
        self._step_times = StepTimes()
        self._sent_steps = self.interval  # of this peer's last round
        self._resumed_at: float | None = None  # when the step under way began; None: its time is not counted
        self._round_at = math.inf  # when the base of this round was merged; with overlap, when the last one was sent

    @property
    def step_time_s(self) -> float:
        """What an inner step usually takes; 0 until known."""
        return self._step_times.usual

    def step(self, first: bool) -> None:
        """After an inner step, which may be the `first` of all."""
        now = self._clock()
        if self._resumed_at is not None:
            self._step_times.add(now - self._resumed_at, self._sent_steps)
        if first:
            self._round_at = now
        self.steps += 1
        self._memory.step_time_s = self.step_time_s

    def resume(self) -> None:
        """The next step begins."""
        self._resumed_at = self._clock()

    def rest(self) -> None:
        """The time from here to the end of the next step is no step's."""
        self._resumed_at = None

    @property
    def is_due(self) -> bool:
        """Whether the steps of this round are made."""
        return self.steps >= self.interval or self._time_is_up()

    def has_flown(self, steps: int) -> bool:
        """Whether an exchange is to land that was sent so many inner steps ago."""
        return steps >= self._overlap_steps or self._time_is_up(self._overlap_steps / self.interval)

    def _time_is_up(self, share: float = 1.0) -> bool:
        """With pace="time": whether the steps of this round are made, or those of its first part."""
        planned_s = self._memory.trains_for_s if self._by_time else math.inf
        return is_over(self._clock() - self._round_at, self.step_time_s, share * planned_s)

    def planned(self) -> int:
        """H as it is told with what is sent now: with pace="time" by the steps that were made."""
        if self._by_time and self.steps:
            self.sync_every = self.steps * self._fragments
        return self.sync_every

    def sent(self) -> int:
        """A round's progress leaves; how many steps it had."""
        self._sent_steps, self.steps = self.steps, 0
        self.next_round()
        return self._sent_steps

    def unsent(self, steps: int) -> None:
        """It did not leave after all."""
        self.steps += steps

    def next_round(self) -> None:
        """A round begins now."""
        self._round_at = self._clock()

    def waited(self, seconds: float) -> None:
        """Training stood still for so long: no time to train in."""
        self._round_at += seconds

    def change(self, sync_every: int) -> None:
        """From now on this peer makes so many inner steps to an exchange of the whole model."""
        self.sync_every = sync_every
        self.interval = max(1, fragment_interval(sync_every, self._fragments))
