"""What this peer's trainer does, as far as its replica knows: it waits for a state, trains, merges, pauses, or is idle.

Law: the trainer starts on the newest state available, and merges states of the run, not mixtures of two epochs. The
start and the merges are delayed only for a bounded time, because other peers may wait for this trainer.
"""

from __future__ import annotations

from .contributing import Contributing
from .events import Apply, Effect, Ready, Release
from .logs import Logs
from .roster import Roster
from .rules import Rules
from .version import Version


class Training:
    """What this peer's trainer does, and since when."""

    def __init__(self, rules: Rules, logs: Logs, roster: Roster, own: Contributing, now: float) -> None:
        self.rules, self.logs, self.roster, self.own = rules, logs, roster, own
        self.ready = False  # training may start
        self.whole_since = self.moved_at = now  # when the last shard arrived; when any last changed
        self.step_time, self.last_step = 0.0, now
        self.paused: float | None = None  # since when the trainer pauses
        self.merging: float | None = None  # since when the trainer waits for the answer to a Merge

    # -- what the trainer reports

    def stepped(self, step_time_s: float, now: float) -> None:
        """Record that the trainer has made inner steps."""
        self.step_time, self.last_step = step_time_s, now
        self.roster.says(speed=1 / step_time_s if step_time_s > 0 else 0.0)

    def pauses(self, paused: bool, now: float) -> None:
        """Record that the trainer begins a pause (``paused``), or ends it. A pause adds nothing to the time without
        steps, but does not reset that time: else a stuck trainer that pauses again and again would never be idle."""
        if paused:
            self.paused = now if self.paused is None else self.paused
        elif self.paused is not None:
            self.last_step, self.paused = min(now, self.last_step + now - self.paused), None
        self.roster.says(paused=paused)

    def moved(self, now: float, *, first: bool) -> None:
        """Record that shards have new versions, and that all shards are held. ``first``: they were not all held
        before."""
        self.moved_at = now
        self.whole_since = now if first else self.whole_since

    def landed(self, now: float) -> bool:
        """Whether the trainer's exchange has just ended."""
        if not self.own.landed():
            return False
        self.last_step = now
        return True

    def wanted(self, shard: int, base: Version, now: float) -> list[Effect]:
        """Handle an aggregator's request for this peer's contribution to a shard at the version ``base``: end the
        exchange under way if it has left this shard out."""
        if self.rules.asynchronous or not self.own.left_out(shard, base):
            return []
        self.last_step = now
        return [Release(sent=True)]

    # -- what follows

    def is_idle(self, now: float) -> bool:
        """Whether other peers should not wait for this trainer. In synchronous mode they wait for a paused trainer
        until ``pause_timeout``, because rounds without it would move the model towards the other peers' data."""
        if self.paused is not None and (self.rules.asynchronous or now - self.paused >= self.rules.pause_timeout):
            return True
        exchanging = self.own.flight is not None or self.merging is not None
        trains = self.ready and self.roster.mine.role == "worker" and not exchanging
        until = now if self.paused is None else self.paused
        return trains and until - self.last_step > self.rules.idle_after(self.step_time)

    def start(self, now: float) -> list[Effect]:
        """Let training start on the newest state. The start is delayed while stored commits lead to newer states, and,
        if the shards of a fragment are at different epochs, until none has moved on for a short while."""
        if self.ready or not self.logs.whole:
            return []
        if not self.rules.asynchronous:
            behind = any(log.incoming.commits or isinstance(log.round.working, Apply) for log in self.logs)
            settled = not behind and (self.logs.even or now - self.moved_at >= self.rules.even_within)
            if not settled and now - self.whole_since < self.rules.fetch_again:
                return []
        self.ready, self.last_step = True, now
        return [Ready()]

    def merge(self, now: float) -> list[Effect]:
        """Handle the trainer's request for a merge."""
        self.merging = now
        return self.load(now)

    def load(self, now: float) -> list[Effect]:
        """Answer the trainer's Merge, if one waits for an answer. Delay the answer while the shards of a fragment are
        at different epochs, so that the trainer merges a state of the run, and while stored commits lead to newer
        versions, so that it merges these. The delay is short, because a shard that is behind may wait for this
        trainer's contribution."""
        if self.merging is None or (now < self.loads_by and (self.own.uneven or self._catches_up())):
            return []
        if self.own.uneven:
            self.own.tolerate()
        self.merging = None
        return [self.own.merge()]

    def _catches_up(self) -> bool:
        """Whether a shard applies a commit, and the commit after it is stored already: a contribution on the version
        between the two would be too late."""
        if self.rules.asynchronous or self.own.flight is not None:
            return False
        works = ((log, log.round.working) for log in map(self.logs.look_at, range(self.rules.shards)))
        return any(isinstance(work, Apply) and log.incoming.reaches(work.commit.version) for log, work in works)

    @property
    def loads_by(self) -> float:
        """The latest time to answer the trainer's Merge; inf if no Merge waits."""
        return float("inf") if self.merging is None else self.merging + self.rules.even_within
