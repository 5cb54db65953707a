"""Changing over to another lineage: every shard that differs is staged, and all are taken at once, or none."""

from __future__ import annotations

from .events import Send
from .logs import Logs
from .messages import Fetch, State
from .roster import Roster
from .rules import Rules
from .version import Version, descends, model_version


def came_late(state: State, told: Version) -> bool:
    """Whether it was asked for before its donor told of ``told``: no sign that a lineage was left."""
    v = state.version
    return v.generation == told.generation and v.epoch < told.epoch and v.samples <= told.samples


class Switching:
    """One change of lineage. ``vector``: what the donor held when it told of it, by shard. While it goes on the logs
    are frozen, for whatever is appended would be left behind."""

    def __init__(
        self, rules: Rules, logs: Logs, roster: Roster, donor: str, vector: tuple[Version, ...], now: float
    ) -> None:
        self.rules, self.logs, self.roster = rules, logs, roster
        self.donor, self.vector, self.target = donor, vector, model_version(vector)
        self.staged: dict[int, State] = {}
        self.progress = now  # when something came last
        self.repeats = 0  # how often it was asked again since then
        self.before = set[str]()  # donors that were asked before this one: what they send may be late

    def ask(self) -> Send:
        """Ask for all that differs."""
        return Send(self.donor, Fetch(self.logs.versions(), whole=True))

    def ask_again(self, now: float) -> Send | None:
        """Nothing has come for long: ask for what is missing, of each peer in turn that holds as much, for a link may
        be slow, a donor unable. None: it was asked often enough, or no peer holds so much; give up."""
        able = {p for p, s in self.roster.summaries().items() if s.model >= self.target > self.logs.model()}
        if not able or self.repeats >= self.rules.fetch_repeats:
            return None
        self.repeats, self.progress = self.repeats + 1, now
        self.before.add(self.donor)
        self.donor = min((p for p in able if p > self.donor), default=min(able))
        return Send(self.donor, Fetch(self.logs.versions(), whole=True, shards=tuple(sorted(self.missing()))))

    def differing(self) -> set[int]:
        """What is to be taken. Asynchronous: where this replica is ahead on the same lineage, nothing."""
        behind = ("fork", "ahead") if self.rules.asynchronous else ("fork", "ahead", "ancestor")
        return {log.shard for log, v in zip(self.logs, self.vector, strict=True) if log.relation(v) in behind}

    def missing(self) -> set[int]:
        """What is to be taken and has not come."""
        return self.differing() - set(self.staged)

    def takes(self, peer: str, state: State) -> bool | None:
        """Whether a state belongs to what is being taken. None: it shows that its donor has changed lineage itself."""
        told = self.vector[state.shard]
        if peer not in (self.donor, *self.before) or came_late(state, told):
            return False
        if self.rules.asynchronous and state.shard not in self.differing():
            return False
        return True if descends(state.version, state.history, told) else None

    def touch(self, peer: str, now: float) -> None:
        """A donor has sent something new."""
        if peer in (self.donor, *self.before):
            self.progress, self.repeats = now, 0

    def is_greater(self) -> bool:
        """Whether the model with all that is staged is greater than the present one."""
        staged = (self.staged.get(log.shard, log.state) for log in self.logs)
        return model_version([state.version for state in staged if state is not None]) > self.logs.model()
