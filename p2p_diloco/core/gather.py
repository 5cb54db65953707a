"""Fetching a state shard by shard from several donors at once: which shard is asked of whom, and asked again.

Law: whether a state may be taken is `catchup`'s to judge; this only keeps every donor busy with few shards at a time,
so that a death costs those few, nobody uploads much at once, and donors that come later take their part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    left: list[int] = field(default_factory=list)
    asked: dict[int, Asked] = field(default_factory=dict)

    def begin(self, vector: tuple[Version, ...]) -> None:
        """The first donor has told what it holds."""
        self.vector, self.left = vector, list(range(len(vector)))

    def ask(
        self, donors: Sequence[str], have: Sequence[Version | None], now: float
    ) -> list[tuple[str, tuple[int, ...]]]:
        """What to ask of whom now."""
        requests = []
        for donor in donors:
            room = max(0, self.rules.fetch_window - len(self.of(donor)))
            shards, self.left = self.left[:room], self.left[room:]
            self.asked |= {shard: Asked(donor, now, have[shard]) for shard in shards}
            if shards:
                requests.append((donor, tuple(shards)))
        return requests

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
