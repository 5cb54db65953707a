"""Versions of a shard and of the whole model, and ids of contributions: plain data that can be compared and sorted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """The name of one state of a shard: peers that hold the same version hold the same outer state.

    ``generation``: how often the run was set back by ``--new-generation``. ``epoch``: the number of commits from the
    start of the lineage to this state. ``samples``: the training samples that these commits counted. ``digest``: a hash
    of the whole outer state of the shard, tensors and protocol tables.
    """

    generation: int
    samples: int
    epoch: int
    digest: str


def descends(newer: Version, history: Mapping[int, str], older: Version) -> bool:
    """Whether the version ``newer`` is the version ``older`` or descends from it. ``history``: digests of ``newer`` and
    its last ancestors, by epoch.

    Along a lineage neither epochs nor samples fall. If ``history`` does not go back as far as ``older``, epochs and
    samples alone decide; if it is empty, the answer is False.
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
    """The version of a whole model: totals over its shards. In a fork the lineage with the higher model version wins,
    with all its shards."""

    generation: int = -1  # -1: no state is held; lower than the version of any state
    samples: int = 0
    epochs: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True, order=True)
class ContributionId:
    """The id of one contribution of a peer. Once a contribution is counted, none of its author's contributions with a
    lower id can be counted any more."""

    incarnation: int
    sequence: int

    def __str__(self) -> str:
        """Return a short form for logs; its first number usually differs between a peer's incarnations."""
        return f"#{self.incarnation % 10000:04d}.{self.sequence}"


def model_version(versions: Sequence[Version]) -> ModelVersion:
    """Return the version of the whole model: the highest generation of its shards, the sums of their samples and
    epochs, and a digest of their digests."""
    return ModelVersion(
        max(v.generation for v in versions),
        sum(v.samples for v in versions),
        sum(v.epoch for v in versions),
        digest_of(v.digest for v in versions),
    )


def digest_of(digests: Iterable[str]) -> str:
    """Return one digest that covers the digests of all shards. They must be given in shard order."""
    return blake2b("".join(digests).encode(), digest_size=16).hexdigest()
