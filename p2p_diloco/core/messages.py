"""Messages between replicas: frozen data.

``payload`` is an opaque reference to bytes; the core never reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .leases import UNWRITTEN, Tables, Use
from .revision import FOUNDED, Revision
from .version import ContributionId, ModelVersion, Version


@dataclass(frozen=True, slots=True)
class Plan:
    """The peers that take part in a shard's next outer step. Each commit has a plan for the outer step after it; the
    founding state has one for the first step.

    The round waits for the peers of ``group``. The first peer of ``succession`` aggregates; the others follow in order:
    reachable peers first, private peers after them.
    """

    group: tuple[str, ...]
    succession: tuple[str, ...]

    def names(self, peer: str) -> bool:
        """Whether the plan names the peer. A peer that is named needs the commit with this plan soon."""
        return peer in self.group or peer in self.succession


@dataclass(frozen=True, slots=True)
class Summary:
    """What a peer tells other peers about itself with every probe."""

    incarnation: int
    role: str  # "worker" contributes and aggregates, "aggregator" only aggregates
    eligible: bool  # reachable: other peers can dial it, so it aggregates before private peers do
    model: ModelVersion
    epochs: tuple[int, ...]  # lowest epoch per fragment; empty while the peer holds no state
    idle: bool  # the peer makes no inner steps: it is paused for long, or its trainer is stuck
    bandwidth: float = 0.0  # of the peer's link in its slower direction, in bytes a second; 0: not measured
    # its outer steps lead to other digests: other peers send it states, not commits, and elect it last
    unlike: bool = False
    revision: Revision = FOUNDED  # the highest revision that the peer knows
    speed: float = 0.0  # inner steps a second while the peer trains; 0: unknown
    paused: bool = False  # the trainer has announced a pause, and need not be idle yet


# -- liveness


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks the receiver to answer with a ProbeAck, which shows that the receiver is alive."""

    summary: Summary


@dataclass(frozen=True, slots=True)
class ProbeAck:
    """The answer to a Probe."""

    summary: Summary


@dataclass(frozen=True, slots=True)
class Leave:
    """The sender leaves the run, so no peer needs to wait for it; ``died``: not on purpose, its trainer has ended.
    ``incarnation`` says which one leaves, because the message may arrive after the sender has restarted."""

    incarnation: int
    died: bool = field(default=False, metadata=UNWRITTEN)


# -- a round of one shard


@dataclass(frozen=True, slots=True)
class Contribution:
    """A pseudo-gradient for one shard, sent to the peer that should aggregate it. ``base``: the version that it was
    made on. ``weight``: its weight in the mean. ``samples``: the number of training samples. ``payload``: encoded
    bytes. ``seal``: its author's proof of all this, opaque to the core. ``uses``: the data that it was made from, if
    the shard is the ledger."""

    shard: int
    base: Version
    id: ContributionId
    oldest: ContributionId  # the oldest contribution whose uncounted progress this one carries
    weight: float
    samples: int
    payload: Any = field(compare=False, repr=False, default=None)
    seal: bytes = field(repr=False, default=b"")
    uses: tuple[Use, ...] = field(default=(), metadata=UNWRITTEN)


@dataclass(frozen=True, slots=True)
class Counted:
    """One contribution, as listed in the commit that counts it; ``peer`` is its author."""

    peer: str
    id: ContributionId
    weight: float
    samples: int
    uses: tuple[Use, ...] = field(default=(), metadata=UNWRITTEN)


@dataclass(frozen=True, slots=True)
class Commit:
    """One outer step of a shard. The payload is the encoded mean: applied to ``base`` with the rates of ``revision``,
    it gives ``version``. ``plan`` is the plan of the next round. ``seal``: the proofs of the contributions, and the
    aggregator's proof of the commit; opaque to the core. ``gone``: peers whose leases the ledger's commit frees."""

    shard: int
    base: Version
    version: Version
    term: int
    aggregator: str
    contributions: tuple[Counted, ...]
    plan: Plan
    payload: Any = field(compare=False, repr=False, default=None)
    revision: Revision = FOUNDED
    seal: bytes = field(repr=False, default=b"")
    gone: tuple[str, ...] = field(default=(), metadata=UNWRITTEN)


@dataclass(frozen=True, slots=True)
class Want:
    """The sender aggregates the round on ``base`` and asks for the receiver's contribution. The receiver sends it even
    if it was delivered before, because the aggregator may have lost it."""

    shard: int
    base: Version


# -- asynchronous mode


@dataclass(frozen=True, slots=True)
class Held:
    """The sender holds this version. The author of a proposed commit waits for this confirmation before it publishes
    the commit."""

    shard: int
    version: Version


@dataclass(frozen=True, slots=True)
class Stale:
    """Refusal of a submission: its base is more than ``max_staleness`` epochs behind ``version``, or its data is now
    used or leased to another peer. The refusing peer also sends the commits since that base, or the newest state."""

    shard: int
    id: ContributionId
    version: Version


# -- failover


@dataclass(frozen=True, slots=True)
class TakeOver:
    """The sender claims the right to write the commit that follows ``base``, because the peers before it in the
    succession are gone."""

    shard: int
    base: Version
    term: int


@dataclass(frozen=True, slots=True)
class Promise:
    """The sender holds nothing newer than ``base`` and will accept no commit on ``base`` with a term lower than
    ``term``."""

    shard: int
    base: Version
    term: int


@dataclass(frozen=True, slots=True)
class Outdated:
    """Refusal of a contribution, commit or claim. As far as the sender knows, ``holder`` holds ``term`` for the commit
    that follows ``base``."""

    shard: int
    base: Version
    term: int
    holder: str


# -- catching up


@dataclass(frozen=True, slots=True)
class Fetch:
    """Asks the receiver for the commits or states that are newer than the versions in ``have``: of ``shards`` or, if
    this is None, of all shards. If ``shards`` is empty, the message asks only for the receiver's versions.

    ``whole``: the sender knows that the lineages differ and asks for whole states: of ``shards`` or, if that is None,
    of all shards that differ.
    """

    have: tuple[Version | None, ...]
    whole: bool = False
    shards: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Versions:
    """The sender's version of each shard. ``forked``: the two peers are on different lineages, so the receiver compares
    the model versions before it takes a state."""

    versions: tuple[Version, ...]
    forked: bool


@dataclass(frozen=True, slots=True)
class State:
    """One shard's whole replicated state. ``payload``: θ and the outer optimizer's state, added when the message is
    sent.

    ``term`` and ``revision``: those of the commit that made this version. ``plan``: for the next round. ``buffered``:
    number of submissions in the Delayed Nesterov buffer. ``paced``: when H last changed: the shard's epoch at that
    time, and the inner steps that each peer had made up to then; (0, 0): never. ``tables``: which data is used and
    which is leased; only the ledger has them.
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
    paced: tuple[int, int] = (0, 0)
    tables: Tables = field(default=(), metadata=UNWRITTEN)


Message = (
    Probe | ProbeAck | Leave | Contribution | Commit | Want | Held | Stale | TakeOver | Promise | Outdated | Fetch
    | Versions | State
)  # fmt: skip
