"""Messages between replicas: frozen data.

``payload`` is an opaque reference to bytes; the core never reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .revision import FOUNDED, Revision
from .version import ContributionId, ModelVersion, Version


@dataclass(frozen=True, slots=True)
class Plan:
    """The peers that take part in a shard's next epoch; written into the commit before it, or into the founding state.

    The round waits for the ``group``. The ``succession`` may aggregate: its first member does, the others follow in
    order.
    """

    group: tuple[str, ...]
    succession: tuple[str, ...]

    def names(self, peer: str) -> bool:
        """Whether the peer takes part; others need not have the commit soon."""
        return peer in self.group or peer in self.succession


@dataclass(frozen=True, slots=True)
class Summary:
    """What a peer tells about itself with every probe."""

    incarnation: int
    role: str  # "worker" contributes and aggregates, "aggregator" only aggregates
    eligible: bool  # may aggregate: others can reach it
    model: ModelVersion
    epochs: tuple[int, ...]  # lowest epoch per fragment; empty while it holds no state
    idle: bool  # makes no inner steps: paused for long, or its trainer is stuck
    bandwidth: float = 0.0  # of its link, the slower direction, in bytes a second; 0: not measured
    # its outer steps give other digests: it is sent states instead of commits, and is elected last
    unlike: bool = False
    revision: Revision = FOUNDED  # the highest revision that it knows
    speed: float = 0.0  # inner steps a second while it trains; 0: unknown
    paused: bool = False  # its trainer has announced a pause; idle or not


# -- liveness


@dataclass(frozen=True, slots=True)
class Probe:
    summary: Summary


@dataclass(frozen=True, slots=True)
class ProbeAck:
    summary: Summary


@dataclass(frozen=True, slots=True)
class Leave:
    """The sender leaves the run on purpose: no peer need wait for it or for a timeout. ``incarnation``: the life that
    leaves, because the message may arrive after a restart."""

    incarnation: int


# -- a round of one shard


@dataclass(frozen=True, slots=True)
class Contribution:
    """A pseudo-gradient for one shard, sent to the peer that the sender takes for the aggregator. payload: encoded
    bytes."""

    shard: int
    base: Version
    id: ContributionId
    oldest: ContributionId  # the oldest contribution whose uncounted progress this one carries
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
    """One outer step: apply the payload (the encoded mean) to ``base`` with ``revision`` to reach ``version``."""

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
    """The sender aggregates the epoch after ``base`` and lacks the receiver's contribution. A receiver that has
    delivered one already sends it again, because it may have been lost."""

    shard: int
    base: Version


# -- asynchronous mode


@dataclass(frozen=True, slots=True)
class Held:
    """The sender holds this version, whose commit named it: the commit's author may count it as a holder."""

    shard: int
    version: Version


@dataclass(frozen=True, slots=True)
class Stale:
    """Refusal: at ``version`` the contribution is more than max_staleness epochs behind. The newer commits or state
    follow."""

    shard: int
    id: ContributionId
    version: Version


# -- failover


@dataclass(frozen=True, slots=True)
class TakeOver:
    """The sender claims the right to aggregate the epoch after ``base``, because the peers before it in the succession
    died."""

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
    """Request for all that is newer than ``have``, of these ``shards`` (None: all); without any, for the versions held.

    ``whole``: the sender knows of the fork and wants every shard that differs, or these ``shards`` even if they do not.
    """

    have: tuple[Version | None, ...]
    whole: bool = False
    shards: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Versions:
    """The sender's shard versions, sent where lineages differ (``forked``) or may: compare whole models before taking
    any."""

    versions: tuple[Version, ...]
    forked: bool


@dataclass(frozen=True, slots=True)
class State:
    """One shard's whole replicated state. payload: θ and the outer optimizer's state, filled in on sending.

    ``term``: of the commit that made this version. ``revision``: the rates that it was applied with. ``buffered``:
    submissions in the Delayed Nesterov buffer.
    """

    shard: int
    version: Version
    term: int
    plan: Plan
    counted: Mapping[str, ContributionId]  # peer → its last counted contribution
    history: Mapping[int, str]  # epoch → digest, of this version and its newest ancestors
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
