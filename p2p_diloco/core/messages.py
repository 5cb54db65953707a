"""What replicas say to each other: frozen data.

``payload`` is an opaque reference to bytes; the core never looks inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .revision import FOUNDED, Revision
from .version import ContributionId, ModelVersion, Version


@dataclass(frozen=True, slots=True)
class Plan:
    """The peers that take part in a shard's next epoch; written into the commit before it (or the founding state).

    ``group`` is waited for, ``succession`` may aggregate: its first member does, the others follow in that order.
    """

    group: tuple[str, ...]
    succession: tuple[str, ...]

    def names(self, peer: str) -> bool:
        """Whether the peer takes part; others need not have the commit soon."""
        return peer in self.group or peer in self.succession


@dataclass(frozen=True, slots=True)
class Summary:
    """What a peer says of itself with every probe."""

    incarnation: int
    role: str  # "worker" contributes and aggregates, "aggregator" only aggregates
    eligible: bool  # may aggregate: reachable by others
    model: ModelVersion
    epochs: tuple[int, ...]  # lowest epoch per fragment; empty while it holds no state
    idle: bool  # makes no progress of its own: paused, or its trainer is stuck
    bandwidth: float = 0.0  # of its link, the slower direction, in bytes a second; 0: not measured yet
    unlike: bool = False  # it computes other outer steps: it gets states in place of commits, and is elected last
    revision: Revision = FOUNDED  # the highest that it has heard of
    speed: float = 0.0  # inner steps a second while it trains; 0: not known yet
    paused: bool = False  # its trainer has announced that it makes no steps for a while; idle or not


# -- liveness


@dataclass(frozen=True, slots=True)
class Probe:
    summary: Summary


@dataclass(frozen=True, slots=True)
class ProbeAck:
    summary: Summary


@dataclass(frozen=True, slots=True)
class Leave:
    """The sender leaves the run on purpose: no peer need wait for it, or for a timeout. ``incarnation``: the life that
    leaves, for the message may come late."""

    incarnation: int


# -- a round of one shard


@dataclass(frozen=True, slots=True)
class Contribution:
    """A pseudo-gradient for one shard, sent to the peer that the sender takes for the aggregator. payload: encoded
    bytes."""

    shard: int
    base: Version
    id: ContributionId
    oldest: ContributionId  # the oldest contribution whose uncounted progress rides in this one
    weight: float
    samples: int
    payload: Any = field(compare=False, repr=False, default=None)


@dataclass(frozen=True, slots=True)
class Counted:
    """One contribution as a commit lists it."""

    peer: str
    id: ContributionId
    weight: float
    samples: int


@dataclass(frozen=True, slots=True)
class Commit:
    """One outer step: apply the payload (the encoded mean) to ``base`` with ``revision`` and reach ``version``."""

    shard: int
    base: Version
    version: Version
    term: int
    aggregator: str
    contributions: tuple[Counted, ...]
    plan: Plan
    payload: Any = field(compare=False, repr=False, default=None)
    revision: Revision = FOUNDED


@dataclass(frozen=True, slots=True)
class Want:
    """The sender aggregates the epoch after ``base`` and lacks the receiver's contribution: there is none yet, or it
    was lost. A receiver that has handed it over already does so again."""

    shard: int
    base: Version


# -- asynchronous mode


@dataclass(frozen=True, slots=True)
class Held:
    """The sender holds this version: its commit named the sender, and its author may answer for it now."""

    shard: int
    version: Version


@dataclass(frozen=True, slots=True)
class Stale:
    """Refusal: at ``version`` the contribution is further behind than the run allows. What is newer comes beside."""

    shard: int
    id: ContributionId
    version: Version


# -- failover


@dataclass(frozen=True, slots=True)
class TakeOver:
    """The sender wants to aggregate the epoch after ``base``, its predecessors in the succession being dead."""

    shard: int
    base: Version
    term: int


@dataclass(frozen=True, slots=True)
class Promise:
    """The sender holds nothing newer than ``base`` and will accept no commit on it of a lower term."""

    shard: int
    base: Version
    term: int


@dataclass(frozen=True, slots=True)
class Outdated:
    """Refusal: for the epoch after ``base``, ``holder`` holds ``term`` and is alive, as the sender sees it."""

    shard: int
    base: Version
    term: int
    holder: str


# -- catching up


@dataclass(frozen=True, slots=True)
class Fetch:
    """Send me what you have that is newer, of these ``shards`` (None: of all), or say what you have where nothing is.
    ``whole``: I know that we are forked and want all that differs; or these ``shards``, even if they don't any more."""

    have: tuple[Version | None, ...]
    whole: bool = False
    shards: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Versions:
    """What the sender holds, where lineages differ (``forked``) or may: compare whole models before taking anything."""

    versions: tuple[Version, ...]
    forked: bool


@dataclass(frozen=True, slots=True)
class State:
    """One shard's whole replicated state, a value. payload: θ and the outer optimizer's state, filled in on sending.

    ``term``: the one under which the commit that made this version was written, and ``revision`` the one that it was
    applied with. ``buffered``: submissions in the Delayed Nesterov buffer.
    """

    shard: int
    version: Version
    term: int
    plan: Plan
    counted: Mapping[str, ContributionId]  # by peer: its last contribution that is counted
    history: Mapping[int, str]  # epoch → digest of the version and its newest ancestors
    buffered: int = 0
    payload: Any = field(compare=False, repr=False, default=None)
    revision: Revision = FOUNDED


Message = (
    Probe
    | ProbeAck
    | Leave
    | Contribution
    | Commit
    | Want
    | Held
    | Stale
    | TakeOver
    | Promise
    | Outdated
    | Fetch
    | Versions
    | State
)
