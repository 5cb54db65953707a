"""Decides when the next exchange is due: after a number of inner steps or, with pace="time", after a time.

Law: only counts the steps of a round and measures their time, without exchanges and pauses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from p2p_diloco.config import RunConfig
from p2p_diloco.core.pace import StepTimes, is_over
from p2p_diloco.core.schedule import fragment_interval
from p2p_diloco.node.shared import SharedMemory


class Schedule:
    """Counts the rounds of one trainer. The whole model is exchanged in `fragments` rounds."""

    def __init__(self, config: RunConfig, fragments: int, memory: SharedMemory, clock: Callable[[], float]) -> None:
        self._fragments, self._memory, self._clock = fragments, memory, clock
        self._by_time = config.pace == "time"
        self.sync_every = config.sync_every
        """This peer's H: inner steps between two exchanges of the whole model."""
        self._most = config.sync_every
        self._turn = 0  # the fragment that is due next, if this peer missed none
        self.steps = 0
        """Inner steps since the last sending."""
        self._overlap_steps = config.overlap_steps
        self._step_times = StepTimes()
        self._sent_steps = self.interval  # steps of this peer's last round
        self._resumed_at: float | None = None  # the start of the present step; None: its time is not counted
        self._round_at = math.inf  # when this round's base was merged; with overlap, when the last fragment was sent

    @property
    def interval(self) -> int:
        """Inner steps of this round; with pace="time" the most that it may have."""
        return max(1, fragment_interval(self._most, self._fragments, self._turn))

    @property
    def step_time_s(self) -> float:
        """The usual time of an inner step in seconds. 0 while it is unknown."""
        return self._step_times.usual

    def step(self, first: bool) -> None:
        """Count an inner step. `first`: whether it was this trainer's first."""
        now = self._clock()
        if self._resumed_at is not None:
            self._step_times.add(now - self._resumed_at, self._sent_steps)
        if first:
            self._round_at = now
        self.steps += 1
        self._memory.step_time_s = self.step_time_s

    def resume(self) -> None:
        """Begin to measure the time of the next step."""
        self._resumed_at = self._clock()

    def rest(self) -> None:
        """Exclude the time from now to the end of the next step from the measured step times."""
        self._resumed_at = None

    @property
    def is_due(self) -> bool:
        """Whether the next exchange is due: the round's steps are made or, with pace="time", its time has passed."""
        return self.steps >= self.interval or self._time_is_up()

    def has_flown(self, steps: int) -> bool:
        """Whether it is time to merge the result of an exchange that was sent `steps` inner steps ago."""
        return steps >= self._overlap_steps or self._time_is_up(self._overlap_steps / self.interval)

    def _time_is_up(self, share: float = 1.0) -> bool:
        """Whether the time planned for this `share` of the round's steps has passed. Without pace="time" no time is
        planned."""
        planned_s = self._memory.trains_for_s if self._by_time else math.inf
        return is_over(self._clock() - self._round_at, self.step_time_s, share * planned_s)

    def planned(self) -> int:
        """The H to report with a contribution that is sent now. With pace="time" it is computed from the steps made in
        this round."""
        if self._by_time and self.steps:
            self.sync_every = self.steps * self._fragments
        return self.sync_every

    def sent(self) -> int:
        """Record that a round's progress was sent, and count the next round's steps from 0. Returns the number of steps
        in the sent round."""
        self._sent_steps, self.steps = self.steps, 0
        self._turn = (self._turn + 1) % self._fragments
        self.next_round()
        return self._sent_steps

    def unsent(self, steps: int) -> None:
        """Undo `sent`, because the exchange never began. Its `steps` are added to the round's steps again."""
        self.steps += steps
        self._turn = (self._turn - 1) % self._fragments

    def next_round(self) -> None:
        """Record that a round begins now."""
        self._round_at = self._clock()

    def waited(self, seconds: float) -> None:
        """Extend the round by the seconds for which training stood still."""
        self._round_at += seconds

    def follow(self, sync_every: int) -> None:
        """Go over to another H, if it has changed: the run's, or this peer's own. If the round has as many steps
        already, its exchange is due now."""
        if sync_every != self._most:
            self.sync_every = self._most = sync_every
