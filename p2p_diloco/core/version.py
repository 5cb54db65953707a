"""Names of states: versions of shards and of the whole model, and ids of contributions. Plain ordered data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """One shard's outer state. ``samples`` counts the whole lineage; the digest covers all outer state."""

    generation: int
    samples: int
    epoch: int
    digest: str


def descends(newer: Version, history: Mapping[int, str], older: Version) -> bool:
    """Whether ``newer`` is ``older`` or descends from it, as far as its remembered ancestors (epoch → digest) tell.

    Along a lineage samples never fall; for versions older than the memory that alone decides.
    """
    if newer == older:
        return True
    if newer.generation != older.generation or newer.epoch < older.epoch or newer.samples < older.samples:
        return False
    if not history or older.epoch < min(history):
        return bool(history)
    return history.get(older.epoch) == older.digest


@dataclass(frozen=True, slots=True, order=True)
class ModelVersion:
    """A whole model's outer state, comparable across lineages: the greater one wins a fork, with all its shards."""

    generation: int = -1  # -1: holds no state, less than any state
    samples: int = 0
    epochs: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True, order=True)
class ContributionId:
    """One peer's contribution: ordered, so that "the last one counted" says which earlier ones can't count again."""

    incarnation: int
    sequence: int


SALT_BITS = 20


def incarnation(clock_ms: int, salt: int) -> int:
    """An incarnation number: it grows with the clock; the random salt (below 2**20) separates lives if the clock
    repeats."""
    return clock_ms << SALT_BITS | salt


def incarnation_after(counted: int, own: int) -> int:
    """The least number above ``counted`` with the same salt: for a life whose clock is behind an earlier one's."""
    return ((counted >> SALT_BITS) + 1) << SALT_BITS | own & (1 << SALT_BITS) - 1


def model_version(versions: Sequence[Version]) -> ModelVersion:
    """The version of the whole model: sums over the shards, and a digest of their digests."""
    return ModelVersion(
        max(v.generation for v in versions),
        sum(v.samples for v in versions),
        sum(v.epoch for v in versions),
        digest_of(v.digest for v in versions),
    )


def digest_of(digests: Iterable[str]) -> str:
    """The digest of a vector of versions with these digests, by shard."""
    return blake2b("".join(digests).encode(), digest_size=16).hexdigest()
