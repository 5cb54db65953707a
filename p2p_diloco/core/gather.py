"""Fetching a state shard by shard from several donors at once: which shard is asked of which donor, and asked again.

Law: whether a state may be taken is `catchup`'s to judge. This keeps every donor busy with few shards at a time, so
that a death costs those few, no donor uploads much at once, and donors that come later take their part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .rules import Rules
from .version import ModelVersion, Version


@dataclass(frozen=True, slots=True)
class Asked:
    """A shard that was asked for."""

    donor: str
    when: float
    had: Version | None


@dataclass(slots=True)
class Gathering:
    """A state under way. ``target``: what donors hold at least; ``vector``: what the first of them told of its shards,
    from which all that is taken must descend, so that no two lineages mix."""

    rules: Rules
    first: str
    target: ModelVersion
    began: float
    vector: tuple[Version, ...] | None = None
    told_by: str | None = None  # the donor that told the vector, and so holds all of it; None once it may not
    left: list[int] = field(default_factory=list)
    asked: dict[int, Asked] = field(default_factory=dict)
    behind: set[tuple[str, int]] = field(default_factory=set)  # (donor, shard): it has sent less than was told

    def begin(self, vector: tuple[Version, ...]) -> None:
        """The first donor has told what it holds."""
        self.vector, self.told_by, self.left = vector, self.first, list(range(len(vector)))

    def ask(
        self, donors: Mapping[str, Collection[int]], have: Sequence[Version | None], now: float
    ) -> list[tuple[str, tuple[int, ...]]]:
        """Which shards to ask of which donor now. ``donors``: each with the shards that it is known to hold as told;
        these are asked of it first. Then it is tried with others, unless it was found to be behind there."""
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
        """Nothing is to come, and no donor may have what is left."""
        tried = all((p, s) in self.behind for p, holds in donors.items() for s in self.left if s not in holds)
        return not self.asked and tried and not any(s in holds for holds in donors.values() for s in self.left)

    def lacks(self, donor: str, shard: int) -> None:
        """What the donor has sent of a shard that was asked of it is less than what was told."""
        self.behind.add((donor, shard))
        self.again([shard])

    def came(self, shards: Collection[int]) -> None:
        """These need not come any more."""
        for shard in shards:
            self.asked.pop(shard, None)

    def again(self, shards: Collection[int]) -> None:
        """These are to be asked for once more."""
        self.left += sorted(shards)
        self.came(shards)

    def of(self, donor: str) -> list[int]:
        """The shards that were asked of a donor."""
        return [shard for shard, asked in self.asked.items() if asked.donor == donor]

    def overdue(self, now: float) -> list[int]:
        """The shards that were asked for too long ago."""
        return [shard for shard, asked in self.asked.items() if now - asked.when >= self.rules.fetch_again]

    def moved(self, versions: Sequence[Version | None]) -> list[int]:
        """The shards that have another version than when they were asked for."""
        return [shard for shard, asked in self.asked.items() if versions[shard] != asked.had]

    @property
    def done(self) -> bool:
        """Nothing is left to ask for, or to come."""
        return self.vector is not None and not self.left and not self.asked
