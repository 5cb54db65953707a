"""What this peer's trainer does, as its replica knows: it waits for a state, trains, merges, pauses, or stands still.

Law: the trainer starts on the newest state that is at hand, and merges states of the run, not mixtures of two epochs.
A wait for either is bounded, for others may wait for this trainer.
"""

from __future__ import annotations

from .contributing import Contributing
from .events import Apply, Effect, Ready
from .logs import Logs
from .roster import Roster
from .rules import Rules


class Training:
    def __init__(self, rules: Rules, logs: Logs, roster: Roster, own: Contributing, now: float) -> None:
        self.rules, self.logs, self.roster, self.own = rules, logs, roster, own
        self.ready = False  # training may start
        self.whole_since = now  # when the last shard came
        self.step_time, self.last_step = 0.0, now
        self.paused: float | None = None  # since when the trainer pauses
        self.merging: float | None = None  # since when it waits for the answer to a Merge

    # -- the trainer's word

    def stepped(self, step_time_s: float, now: float) -> None:
        """It has made inner steps."""
        self.step_time, self.last_step = step_time_s, now
        self.roster.says(speed=1 / step_time_s if step_time_s > 0 else 0.0)

    def pauses(self, paused: bool, now: float) -> None:
        """It will make no steps for a while, or is back."""
        self.paused, self.last_step = now if paused else None, now
        self.roster.says(paused=paused)

    def landed(self, now: float) -> bool:
        """Whether its exchange has just ended, so that it goes on."""
        if not self.own.landed():
            return False
        self.last_step = now
        return True

    # -- what follows

    def is_idle(self, now: float) -> bool:
        """Whether others should not wait for it: this is its own word. One that pauses is waited for, for a while: it
        comes back, and rounds without it would carry the model after the others' data."""
        if self.paused is not None:
            return self.rules.asynchronous or now - self.paused >= self.rules.pause_timeout
        exchanging = self.own.flight is not None or self.merging is not None
        trains = self.ready and self.roster.mine.role == "worker" and not exchanging
        return trains and now - self.last_step > self.rules.idle_after(self.step_time)

    def start(self, now: float) -> list[Effect]:
        """Let training start on the newest state: not while this replica has commits that lead further than it is, and
        not at once while the shards of a fragment are at unlike epochs."""
        if self.ready or not self.logs.whole:
            return []
        if not self.rules.asynchronous:
            behind = any(log.incoming.commits or isinstance(log.round.working, Apply) for log in self.logs)
            waits = self.rules.fetch_again if behind else 0.0 if self.logs.even else self.rules.even_within
            if now - self.whole_since < waits:
                return []
        self.ready, self.last_step = True, now
        return [Ready()]

    def merge(self, now: float) -> list[Effect]:
        """The trainer asks for what is new."""
        self.merging = now
        return self.load(now)

    def load(self, now: float) -> list[Effect]:
        """Answer its Merge. While the shards of a fragment are at unlike epochs the answer waits a little, so that what
        is merged is one state of the run; not for long, for others may wait for a contribution to those that are
        behind."""
        if self.merging is None:
            return []
        if self.own.uneven:
            if now < self.loads_by:
                return []
            self.own.tolerate()
        self.merging = None
        return [self.own.merge()]

    @property
    def loads_by(self) -> float:
        """When its Merge is answered at the latest; inf while none waits."""
        return float("inf") if self.merging is None else self.merging + self.rules.even_within
