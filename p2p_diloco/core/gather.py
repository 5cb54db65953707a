"""Fetching a whole model's state from several donors at once: which shard to request from which donor, and when to
repeat a request.

Law: `catchup` judges whether a state may be taken. This module requests few shards at a time from each donor. So a
donor's death costs only those shards, no donor uploads much at once, and donors that appear later are used, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from .messages import Summary
from .rules import Rules
from .version import ModelVersion, Version


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for one shard that has no answer yet: the donor that was asked, when the request was sent, and the
    version that this replica held at that time."""

    donor: str
    when: float
    had: Version | None


@dataclass(slots=True)
class Gathering:
    """A fetch of the whole model's state, shard by shard, from every peer whose model version is at least ``target``.

    ``first``: the donor whose versions are asked for at the beginning. ``vector``: the versions that this donor
    reported, by shard; None until it has. Only states of the lineage of these versions are taken, so that two lineages
    never mix.
    """

    rules: Rules
    first: str
    target: ModelVersion
    began: float
    vector: tuple[Version, ...] | None = None
    told_by: str | None = None  # the donor that reported the vector and so holds all of it; None once it may be gone
    left: list[int] = field(default_factory=list)  # shards still to be requested
    asked: dict[int, Asked] = field(default_factory=dict)  # requests under way, by shard
    behind: set[tuple[str, int]] = field(default_factory=set)  # (donor, shard): the donor holds an older state

    def begin(self, vector: tuple[Version, ...]) -> None:
        """Record the versions that the first donor reported. From now on every shard can be requested."""
        self.vector, self.told_by, self.left = vector, self.first, list(range(len(vector)))

    def ask(
        self, donors: Mapping[str, Collection[int]], have: Sequence[Version | None], now: float
    ) -> list[tuple[str, tuple[int, ...]]]:
        """Return the requests to send now, each as (donor, shards), and record them as sent.

        ``donors``: donor → shards that it is known to hold. ``have``: this replica's versions. A shard is requested
        from a donor known to hold it, else from any donor that is not known to hold an older state of it.
        """
        requests: dict[str, tuple[int, ...]] = {}
        for likely in (True, False):
            for donor, holds in donors.items():
                room = max(0, self.rules.fetch_window - len(self.of(donor)))
                shards = [s for s in self.left if s in holds or not (likely or (donor, s) in self.behind)][:room]
                self.left = [s for s in self.left if s not in shards]
                self.asked |= {shard: Asked(donor, now, have[shard]) for shard in shards}
                requests[donor] = (*requests.get(donor, ()), *shards)
        return [(donor, shards) for donor, shards in requests.items() if shards]

    def told_to_hold(self, donor: str, summary: Summary | None) -> set[int]:
        """Return the shards of which the donor is known to hold the version in ``vector`` or a newer one, by its
        ``summary``. The donor may hold more shards than are returned, because a Summary tells only the lowest epoch of
        each fragment."""
        vector = self.vector
        if vector is None or summary is None or not summary.epochs:
            return set()
        all_of_it, shards = donor == self.told_by, enumerate(self.rules.fragments)
        return {s for fragment, of in shards for s in of if all_of_it or summary.epochs[fragment] >= vector[s].epoch}

    def hopeless(self, donors: Mapping[str, Collection[int]]) -> bool:
        """Whether the gathering can't go on: no request is under way, and every donor is known to lack the shards that
        remain."""
        tried = all((p, s) in self.behind for p, holds in donors.items() for s in self.left if s not in holds)
        return not self.asked and tried and not any(s in holds for holds in donors.values() for s in self.left)

    def lacks(self, donor: str, shard: int) -> None:
        """Record that the donor's state of this shard is older than the version in ``vector``, so that the shard is
        requested again."""
        self.behind.add((donor, shard))
        self.again([shard])

    def nothing_newer(self, donor: str, shard: int, held: Version | None, holds: Collection[int]) -> None:
        """Record the donor's answer that it holds nothing newer of this shard than the version ``held`` here. If
        ``held`` is older than the version in ``vector``, and the shard is not in ``holds`` (the shards that the donor
        is known to hold), the shard is requested again, from another donor. Otherwise the request is over."""
        older = self.vector is not None and held is not None and held.epoch < self.vector[shard].epoch
        if older and shard not in holds:
            self.lacks(donor, shard)
        else:
            self.came([shard])

    def came(self, shards: Collection[int]) -> None:
        """Record that these shards have arrived or are not needed: their requests are over."""
        for shard in shards:
            self.asked.pop(shard, None)

    def again(self, shards: Collection[int]) -> None:
        """Record that these shards must be requested again."""
        self.left += sorted(shards)
        self.came(shards)

    def of(self, donor: str) -> list[int]:
        """Return the shards for which a request to this donor is under way."""
        return [shard for shard, asked in self.asked.items() if asked.donor == donor]

    def overdue(self, now: float) -> list[int]:
        """Return the shards whose requests have been under way for ``fetch_again`` or longer."""
        return [shard for shard, asked in self.asked.items() if now - asked.when >= self.rules.fetch_again]

    def moved(self, versions: Sequence[Version | None]) -> list[int]:
        """Return the requested shards whose version here has changed since the request."""
        return [shard for shard, asked in self.asked.items() if versions[shard] != asked.had]

    @property
    def done(self) -> bool:
        """Whether every shard was requested and no request is under way."""
        return self.vector is not None and not self.left and not self.asked
