"""Changing to another lineage: every shard that differs is fetched and staged, and all are taken at once, or none."""

from __future__ import annotations

from .events import Send
from .logs import Logs
from .messages import Fetch, State
from .roster import Roster
from .rules import Rules
from .version import Version, descends, model_version


def came_late(state: State, told: Version) -> bool:
    """Whether the donor sent this state before it reported the version ``told``. If so, the state does not show that
    the donor has changed lineage since that report."""
    v = state.version
    return v.generation == told.generation and v.epoch < told.epoch and v.samples <= told.samples


class Switching:
    """One change to another lineage. ``vector``: the donor's version of each shard. The logs are frozen until the
    change is over, because it would discard all commits that they append meanwhile."""

    def __init__(
        self, rules: Rules, logs: Logs, roster: Roster, donor: str, vector: tuple[Version, ...], now: float
    ) -> None:
        self.rules, self.logs, self.roster = rules, logs, roster
        self.donor, self.vector, self.target = donor, vector, model_version(vector)
        self.staged: dict[int, State] = {}
        self.progress = now  # when a state last arrived
        self.repeats = 0  # requests repeated since then
        self.before = set[str]()  # earlier donors, whose states may arrive late

    def ask(self) -> Send:
        """Return a request to the donor for its states of all shards that differ."""
        return Send(self.donor, Fetch(self.logs.versions(), whole=True))

    def ask_again(self, now: float) -> Send | None:
        """Return a request for the missing shards to the next donor. Called when nothing has arrived for
        ``fetch_again``. Return None if the change must be given up: no peer's model version reaches the target, or
        ``fetch_repeats`` requests were in vain."""
        able = {p for p, s in self.roster.summaries().items() if s.model >= self.target > self.logs.model()}
        if not able or self.repeats >= self.rules.fetch_repeats:
            return None
        self.repeats, self.progress = self.repeats + 1, now
        self.before.add(self.donor)
        self.donor = min((p for p in able if p > self.donor), default=min(able))
        return Send(self.donor, Fetch(self.logs.versions(), whole=True, shards=tuple(sorted(self.missing()))))

    def differing(self) -> set[int]:
        """Return the shards to take from the donor: those whose versions differ. In asynchronous mode, leave out shards
        of which this replica holds a newer version on the same lineage."""
        behind = ("fork", "ahead") if self.rules.asynchronous else ("fork", "ahead", "ancestor")
        return {log.shard for log, v in zip(self.logs, self.vector, strict=True) if log.relation(v) in behind}

    def missing(self) -> set[int]:
        """Return the shards that must be taken and have not arrived yet."""
        return self.differing() - set(self.staged)

    def takes(self, peer: str, state: State) -> bool | None:
        """Whether a state that this peer sent belongs to the lineage that this replica changes to. None if the state
        shows that the donor itself has left that lineage: it holds another one, perhaps this replica's own."""
        told = self.vector[state.shard]
        if peer not in (self.donor, *self.before):
            return False
        if state.version == self.logs[state.shard].version and state.shard in self.differing():
            return None
        if came_late(state, told):
            return False
        if self.rules.asynchronous and state.shard not in self.differing():
            return False
        return True if descends(state.version, state.history, told) else None

    def is_in_vain(self, peer: str, state: State) -> bool:
        """Whether a request was in vain: this state came from a peer that was asked because the first donor sent
        nothing, and the peer lacks the version that is missing, too."""
        return self.repeats > 0 and peer == self.donor and state.shard in self.missing()

    def touch(self, peer: str, now: float) -> None:
        """Record that a donor sent a new state."""
        if peer in (self.donor, *self.before):
            self.progress, self.repeats = now, 0

    def is_greater(self) -> bool:
        """Whether the model version with all staged shards would be higher than the present one."""
        staged = (self.staged.get(log.shard, log.state) for log in self.logs)
        return model_version([state.version for state in staged if state is not None]) > self.logs.model()
