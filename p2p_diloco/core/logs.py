"""The logs of all shards, and totals over them.

Law: a log that was handed out (by index or in a loop) may change until the event ends. The totals are updated only for
logs that were handed out, so an event on one shard costs the same for any number of shards. In a loop over all logs,
every log counts as handed out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar, overload

from .leases import Tables
from .messages import State
from .revision import FOUNDED, Revision
from .rules import Rules
from .shard import ShardLog
from .state import final
from .version import ModelVersion, Version, digest_of

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Logs(Sequence[ShardLog]):
    """The logs of all shards, and totals over them that are kept up to date."""

    def __init__(self, rules: Rules, logs: Iterable[ShardLog]) -> None:
        self._rules, self._logs = rules, tuple(logs)
        self._taken, self._watches = set(range(len(self._logs))), list[set[int]]()
        self._told: list[Version | None] = [None for _ in self._logs]  # the versions at the last call of `moved`
        # each shard's part in the totals
        self._states: list[State | None] = [None for _ in self._logs]
        self._versions: list[Version | None] = [None for _ in self._logs]
        self._digests = ["" for _ in self._logs]
        self._collected = [0 for _ in self._logs]
        # totals over the states that `_count` has added
        self._empty = len(self._logs)
        self._epochs = [Counter[int]() for _ in rules.fragments]  # by fragment: epoch → number of shards
        self._open = [Counter[int]() for _ in rules.fragments]  # the same, without shards for which the run has ended
        self._generations, self._revisions = Counter[int](), Counter({FOUNDED: len(self._logs)})
        self._samples_sum = self._epochs_sum = self._collected_sum = 0
        self._model: ModelVersion | None = None

    # -- one by one

    @overload
    def __getitem__(self, shard: int) -> ShardLog: ...
    @overload
    def __getitem__(self, shard: slice) -> Sequence[ShardLog]: ...
    def __getitem__(self, shard: int | slice) -> ShardLog | Sequence[ShardLog]:
        if isinstance(shard, slice):
            return list(self)[shard]
        log = self._logs[shard]
        self._taken.add(log.shard)
        for taken in self._watches:
            taken.add(log.shard)
        return log

    def __iter__(self) -> Iterator[ShardLog]:
        for taken in (self._taken, *self._watches):
            taken.update(range(len(self._logs)))
        return iter(self._logs)

    def __len__(self) -> int:
        return len(self._logs)

    def moved(self) -> list[int]:
        """Return the shards whose version changed since the last call. Call this at the end of each event: afterwards
        no log counts as handed out."""
        moved = [shard for shard in sorted(self._taken) if self._logs[shard].version != self._told[shard]]
        self._look()
        self._taken.clear()
        for shard in moved:
            self._told[shard] = self._versions[shard]
        return moved

    # -- all together

    @property
    def tables(self) -> Tables:
        """The tables of the data that the run's peers share, as far as this replica knows them."""
        state = self.look_at(self._rules.ledger).state
        return () if state is None else state.tables

    def versions(self) -> tuple[Version | None, ...]:
        """Return the version of each shard; None where this replica holds no state."""
        self._look()
        return tuple(self._versions)

    @property
    def whole(self) -> bool:
        """Whether this replica holds a state of every shard."""
        self._look()
        return not self._empty

    @property
    def ended(self) -> bool:
        """Whether the run has ended for every shard."""
        return self.whole and not any(self._open)

    @property
    def even(self) -> bool:
        """Whether this replica holds all shards and, in each fragment, all shards are at the same epoch. Shards for
        which the run has ended do not matter."""
        return self.whole and not self.uneven()

    def uneven(self) -> dict[int, tuple[int, ...]]:
        """Return the fragments whose shards are at different epochs, each with these epochs, lowest first. Shards that
        have reached the end of the run are left out."""
        self._look()
        return {f: tuple(sorted(epochs)) for f, epochs in enumerate(self._open) if len(epochs) > 1}

    def epochs(self) -> tuple[int, ...]:
        """Return the lowest epoch of each fragment. Call this only while this replica holds all shards."""
        self._look()
        return tuple(map(min, self._epochs))

    def open_epochs(self) -> list[int | None]:
        """Return the lowest epoch of each fragment, over the shards that this replica holds and for which the run goes
        on. None for a fragment without such shards."""
        self._look()
        return [min(epochs, default=None) for epochs in self._open]

    @property
    def revision(self) -> Revision:
        """The lowest revision of any shard."""
        self._look()
        return min(self._revisions)

    @property
    def collected(self) -> int:
        """The number of other peers' payloads that this replica stores, over all shards."""
        self._look()
        return self._collected_sum

    def model(self) -> ModelVersion:
        """Return the version of the whole model. While a shard is missing here, this is the lowest version,
        `ModelVersion()`."""
        if not self.whole:
            return ModelVersion()
        if self._model is None:
            digest = digest_of(self._digests)
            self._model = ModelVersion(max(self._generations), self._samples_sum, self._epochs_sum, digest)
        return self._model

    def _look(self) -> None:
        """Update the totals for the logs that were handed out during this event. Each call until the event ends does so
        again, because these logs may still change."""
        for shard in self._taken:
            log = self._logs[shard]
            if (collected := log.collected) != self._collected[shard]:
                self._collected_sum += collected - self._collected[shard]
                self._collected[shard] = collected
            if log.state is not self._states[shard]:
                self._count(log, self._states[shard], -1)
                self._states[shard], self._versions[shard], self._model = log.state, log.version, None
                self._count(log, log.state, 1)

    def _count(self, log: ShardLog, state: State | None, by: int) -> None:
        """Add a shard's state to the totals (``by`` = 1), or subtract it (``by`` = -1)."""
        _add(self._revisions, FOUNDED if state is None else state.revision, by)
        if state is None:
            self._empty += by
            return
        version = state.version
        self._digests[log.shard] = version.digest
        _add(self._generations, version.generation, by)
        _add(self._epochs[log.fragment], version.epoch, by)
        if not final(state, self._rules):
            _add(self._open[log.fragment], version.epoch, by)
        self._samples_sum += by * version.samples
        self._epochs_sum += by * version.epoch

    # -- for derived values

    def watch(self) -> set[int]:
        """Return a new set, which at first contains all shards. Whenever a log is handed out, its shard is added to the
        set. The caller empties the set."""
        self._watches.append(set(range(len(self._logs))))
        return self._watches[-1]

    def look_at(self, shard: int) -> ShardLog:
        """Return a shard's log for reading only. The log does not count as handed out."""
        return self._logs[shard]


class PerShard(Generic[T]):
    """Values that are computed from the logs, one for each shard. A value is computed again only if its log was handed
    out since the last time. Read the values only between events: during an event, a log that was handed out may still
    change."""

    def __init__(self, logs: Logs, of: Callable[[ShardLog], T | None]) -> None:
        self._logs, self._of, self._taken = logs, of, logs.watch()
        self._kept: dict[int, T] = {}

    def forget(self) -> None:
        """Let the next call of `now` compute all values again, because something besides the logs has changed."""
        self._taken.update(range(len(self._logs)))

    def now(self) -> Mapping[int, T]:
        """Return the present values by shard. Shards whose value is None are left out."""
        kept = self._kept
        for shard in self._taken:
            said = self._of(self._logs.look_at(shard))
            if said is not None:
                kept[shard] = said
            else:
                kept.pop(shard, None)
        self._taken.clear()
        return kept


def _add(counts: Counter[K], key: K, by: int) -> None:
    """Add ``by`` to the count of ``key``. Remove the key if its count is now zero."""
    counts[key] += by
    if not counts[key]:
        del counts[key]
