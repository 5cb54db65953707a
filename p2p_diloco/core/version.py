"""Versions of a fragment and of the whole model, and ids of contributions: plain data, ordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

SALT_BITS = 20
"""An incarnation is a clock in milliseconds, and so many random bits."""


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """The name of one state of a fragment: peers that hold the same version hold the same outer state.

    ``generation``: how often the run was set back by ``--new-generation``. ``epoch``: the number of commits from the
    start of the lineage to this state. ``samples``: the training samples that these commits counted. ``chain``: that
    of these commits, a hash of the version before and of what the last one says (`state.append`). It is known
    without touching tensors.
    """

    generation: int
    samples: int
    epoch: int
    chain: str

    @property
    def is_first(self) -> bool:
        """Whether no commit led to this state: its outer optimizer's state is the initial one, zeros. That of a new
        generation is a checkpoint's."""
        return not self.generation and not self.epoch


@dataclass(frozen=True, slots=True, order=True)
class ModelVersion:
    """The version of a whole model: totals over its fragments. In a fork the lineage with the higher model version
    wins, with all its fragments."""

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
    """Return the version of the whole model: the highest generation of its fragments, the sums of their samples
    and epochs, and a hash of their chains, given in the order of the fragments. Of no fragment: that of no state."""
    if not versions:
        return ModelVersion()
    return ModelVersion(
        max(v.generation for v in versions),
        sum(v.samples for v in versions),
        sum(v.epoch for v in versions),
        blake2b("".join(v.chain for v in versions).encode(), digest_size=16).hexdigest(),
    )


def incarnation(clock_ms: int, salt: int) -> int:
    """Return an incarnation number that grows with the clock. Two incarnations that start at the same clock time differ
    by their random ``salt`` (below 2**20)."""
    return clock_ms << SALT_BITS | salt


def incarnation_after(counted: int, own: int) -> int:
    """Return an incarnation number above ``counted``, with the salt of ``own``. A peer needs it if its clock shows an
    earlier time than during its earlier incarnation."""
    return ((counted >> SALT_BITS) + 1) << SALT_BITS | own & (1 << SALT_BITS) - 1


def life_of(incarnation: int) -> int:
    """Return the random bits of an incarnation, which stay when the incarnation is raised."""
    return incarnation & (1 << SALT_BITS) - 1
