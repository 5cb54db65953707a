"""What this peer's trainer does, as far as its replica knows: it waits for a state, trains, merges, or is idle."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .events import Effect, Start
from .exchange import Exchange
from .fragment import FragmentLog
from .roster import Roster
from .round import Phase
from .rules import Rules


class Training:
    """What this peer's trainer does, and since when."""

    def __init__(self, rules: Rules, logs: Sequence[FragmentLog], roster: Roster, own: Exchange, now: float) -> None:
        self.rules, self.logs, self.roster, self.own = rules, logs, roster, own
        self.ready = False  # training may start
        self.step_time, self.last_step = 0.0, now
        self.paused: float | None = None
        self.merging: float | None = None  # since when the trainer waits for the answer to a Merge

    def stepped(self, step_time_s: float, now: float) -> None:
        """Record that the trainer has made inner steps."""
        self.step_time, self.last_step = step_time_s, now
        self.roster.says(speed=1 / step_time_s if step_time_s > 0 else 0.0)

    def pauses(self, paused: bool, now: float) -> None:
        """Record that a pause begins or ends. It adds nothing to the time without steps, and does not reset it: else a
        stuck trainer that pauses again and again would never be idle."""
        if paused:
            self.paused = now if self.paused is None else self.paused
        elif self.paused is not None:
            self.last_step, self.paused = min(now, self.last_step + now - self.paused), None
        self.roster.says(paused=paused)

    def is_idle(self, now: float) -> bool:
        """Whether other peers should not wait for this trainer. A pause counts only once it is long."""
        if self.paused is not None and (self.rules.asynchronous or now - self.paused >= self.rules.pause_timeout):
            return True
        exchanging = self.own.flying or self.merging is not None
        trains = self.ready and self.roster.mine.role == "worker" and not exchanging
        until = now if self.paused is None else self.paused
        return trains and until - self.last_step > self.rules.idle_after(self.step_time)

    def start(self, now: float) -> list[Effect]:
        """Let training start once all fragments are held."""
        if self.ready or any(log.state is None or log.phase is Phase.FETCHING for log in self.logs):
            return []
        self.ready, self.last_step = True, now
        return [Start()]

    def merge(self, now: float) -> list[Effect]:
        """Handle the trainer's request for a merge."""
        self.merging = now if self.merging is None else self.merging
        return self.load(now)

    @property
    def loads_by(self) -> float:
        """The latest time to answer the trainer's Merge; inf if none waits."""
        if self.merging is None or any(log.state is None for log in self.logs):
            return math.inf
        return self.merging + self.rules.loads_within

    def load(self, now: float) -> list[Effect]:
        """Answer a Merge. The answer waits briefly while the next version is near: a contribution on the present one
        would be too late."""
        near = (Phase.LACKING, Phase.APPLYING, Phase.FETCHING)
        delayed = not self.own.flying and any(log.phase in near for log in self.logs) and now < self.loads_by
        if self.loads_by == math.inf or delayed:
            return []
        self.merging = None
        return [self.own.merge()]
