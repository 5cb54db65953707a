"""A peer's counters at one moment, and where its trainer stands.

Law: values with their units in their names; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


def _total(zero: float = 0) -> Any:
    """A counter that goes on after a restart."""
    return field(default=zero, metadata={"total": True})


@dataclass(frozen=True, slots=True)
class Metrics:
    """Since this peer entered the run (or since what `load_state_dict` brought back)."""

    sync_count: int = _total()
    """Exchanges of this peer that were counted: every shard that it sent is in a commit."""
    sent_count: int = _total()
    """Exchanges that this peer made. What was not counted in one is sent again with the next."""
    local_step: int = _total()
    """Inner steps."""
    sync_every: int = 0
    """H of the run; with `dylu` or `pace="time"` this peer's own."""
    last_sync_time_s: float = 0.0
    """What the last exchange took, merge included."""
    total_sync_time_s: float = _total(0.0)
    """What all of them took."""
    waiting_time_s: float = _total(0.0)
    """How long training stood still: pseudo-gradient, codec, group, transfer, outer step and merge, below."""
    hidden_time_s: float = _total(0.0)
    """How long training went on while an exchange was under way: the four hidden times, below."""
    inner_time_s: float = _total(0.0)
    """Everything between exchanges: inner steps, data, logs. This, the waiting time and the pauses are all there is."""
    pseudo_gradient_time_s: float = _total(0.0)
    """Base − local, and the look at whether it may be sent."""
    codec_time_s: float = _total(0.0)
    """Writing values in the wire's precision, and checking those that come."""
    group_time_s: float = _total(0.0)
    """None of the other parts: waiting for the averaging group."""
    transfer_time_s: float = _total(0.0)
    """Payloads on their way out, until they are taken, or on their way in."""
    outer_step_time_s: float = _total(0.0)
    """Means, outer steps, digests."""
    merge_time_s: float = _total(0.0)
    """Newer global values into the model."""
    paused_time_s: float = _total(0.0)
    """In `pause()`, and while this peer's own state was saved."""
    hidden_codec_time_s: float = _total(0.0)
    hidden_group_time_s: float = _total(0.0)
    hidden_transfer_time_s: float = _total(0.0)
    hidden_outer_step_time_s: float = _total(0.0)
    bytes_sent: int = 0
    bytes_received: int = 0
    revision: int = 0
    """The lowest over the shards of what `p2p-diloco set` has changed the outer rates to; 0: as the run was founded."""
    outer_lr: float = 0.0
    """The outer learning rate of that revision; 0 before the state is there."""
    outer_momentum: float = 0.0
    """Its outer momentum."""
    steps_per_second: float = 0.0
    """Inner steps a second while training; 0 until known."""
    peers: int = 1
    """Live peers, this one included."""
    staleness: int = 0
    """Epochs between the last contribution's base and the commit that counts it; 0 in synchronous mode."""
    refused_submissions: int = 0
    """Submissions that were not counted, in part or in whole: too stale, or of a lineage that was left."""
    retries: int = 0
    """Messages that could not be delivered at once."""
    reconnections: int = 0
    """Links that broke."""
    dropped_samples: int = _total()
    """Samples whose progress was given up: it could not be told from what is counted, or was sent again for too
    long."""

    @property
    def encode_time_s(self) -> float:
        """Pseudo-gradient and codec, while training stood still."""
        return self.pseudo_gradient_time_s + self.codec_time_s

    @property
    def hidden_share(self) -> float:
        """The share of all exchanges' time that was hidden behind training; 0 before the first one."""
        return self.hidden_time_s / self.total_sync_time_s if self.total_sync_time_s else 0.0

    def totals(self) -> dict[str, float]:
        """The counters that go on after a restart."""
        return {name: getattr(self, name) for name in TOTALS}


TOTALS = tuple(counter.name for counter in fields(Metrics) if counter.metadata.get("total"))
OF_NODE = (
    "peers", "bytes_sent", "bytes_received", "retries", "reconnections", "revision", "outer_lr", "outer_momentum",
)  # fmt: skip
"""What the node writes into the shared memory, under the same names."""


def of_node(memory: object) -> dict[str, Any]:
    """The counters in the memory that is shared with the node."""
    return {name: getattr(memory, name) for name in OF_NODE}


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a trainer stands between two of its steps; the same on all ranks of a peer."""

    epoch: int = 0
    digest: str = ""
    finished: bool = False
    global_step: int = 0
    metrics: Metrics = Metrics()

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Standing:
        """What `dataclasses.asdict` made of one."""
        return cls(**{**wire, "metrics": Metrics(**wire["metrics"])})
