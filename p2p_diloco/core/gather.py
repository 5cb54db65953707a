"""Fetching a whole state from several donors at once: which shard is asked of which donor, and when again.

Law: `catchup` judges whether a state may be taken. This module asks each donor for few shards at a time: a donor's
death costs only those, no donor uploads much at once, and donors that appear later are used too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .rules import Rules
from .version import ModelVersion, Version


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for one shard."""

    donor: str
    when: float
    had: Version | None


@dataclass(slots=True)
class Gathering:
    """A state that is being gathered. ``target``: the least model version of a donor. ``vector``: the shard versions
    that the first donor told; every state taken must descend from them, so that two lineages never mix."""

    rules: Rules
    first: str
    target: ModelVersion
    began: float
    vector: tuple[Version, ...] | None = None
    told_by: str | None = None  # the donor that told the vector and so holds all of it; None once it may be gone
    left: list[int] = field(default_factory=list)
    asked: dict[int, Asked] = field(default_factory=dict)
    behind: set[tuple[str, int]] = field(default_factory=set)  # (donor, shard): the donor sent less than the vector

    def begin(self, vector: tuple[Version, ...]) -> None:
        """The first donor has told its versions."""
        self.vector, self.told_by, self.left = vector, self.first, list(range(len(vector)))

    def ask(
        self, donors: Mapping[str, Collection[int]], have: Sequence[Version | None], now: float
    ) -> list[tuple[str, tuple[int, ...]]]:
        """Which shards to ask of which donor now. ``donors``: donor → shards that it is known to hold. A shard is asked
        of a donor known to hold it, else of any donor that has not yet sent less than the vector."""
        requests: dict[str, tuple[int, ...]] = {}
        for likely in (True, False):
            for donor, holds in donors.items():
                room = max(0, self.rules.fetch_window - len(self.of(donor)))
                shards = [s for s in self.left if s in holds or not (likely or (donor, s) in self.behind)][:room]
                self.left = [s for s in self.left if s not in shards]
                self.asked |= {shard: Asked(donor, now, have[shard]) for shard in shards}
                requests[donor] = (*requests.get(donor, ()), *shards)
        return [(donor, shards) for donor, shards in requests.items() if shards]

    def told_to_hold(self, donor: str, epochs: Sequence[int]) -> set[int]:
        """The shards of which a donor holds what the first one told, by its own word: ``epochs``, the lowest of each
        fragment, so it may hold others, too."""
        vector = self.vector
        if vector is None or not epochs:
            return set()
        all_of_it, shards = donor == self.told_by, enumerate(self.rules.fragments)
        return {s for fragment, of in shards for s in of if all_of_it or epochs[fragment] >= vector[s].epoch}

    def hopeless(self, donors: Mapping[str, Collection[int]]) -> bool:
        """Whether no request is under way and no donor may hold the remaining shards."""
        tried = all((p, s) in self.behind for p, holds in donors.items() for s in self.left if s not in holds)
        return not self.asked and tried and not any(s in holds for holds in donors.values() for s in self.left)

    def lacks(self, donor: str, shard: int) -> None:
        """The donor sent less of this shard than the vector names."""
        self.behind.add((donor, shard))
        self.again([shard])

    def came(self, shards: Collection[int]) -> None:
        """These shards need not be waited for any more."""
        for shard in shards:
            self.asked.pop(shard, None)

    def again(self, shards: Collection[int]) -> None:
        """These shards must be asked for again."""
        self.left += sorted(shards)
        self.came(shards)

    def of(self, donor: str) -> list[int]:
        """The shards asked of this donor."""
        return [shard for shard, asked in self.asked.items() if asked.donor == donor]

    def overdue(self, now: float) -> list[int]:
        """The shards asked for longer than ``fetch_again`` ago."""
        return [shard for shard, asked in self.asked.items() if now - asked.when >= self.rules.fetch_again]

    def moved(self, versions: Sequence[Version | None]) -> list[int]:
        """The shards whose version changed since they were asked for."""
        return [shard for shard, asked in self.asked.items() if versions[shard] != asked.had]

    @property
    def done(self) -> bool:
        """Whether nothing is left to ask for or to wait for."""
        return self.vector is not None and not self.left and not self.asked
