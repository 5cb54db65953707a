"""A peer's counters at one moment, and its trainer's position in the run.

Law: values with their units in their names; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


def _total(zero: float = 0) -> Any:
    """A field for a counter that goes on after a restart."""
    return field(default=zero, metadata={"total": True})


@dataclass(frozen=True, slots=True)
class Metrics:
    """A peer's counters since it entered the run. `load_state_dict` adds the counters from before a restart."""

    sync_count: int = _total()
    """Exchanges of this peer that were counted: commits have counted every fragment that was sent."""
    sent_count: int = _total()
    """Exchanges that this peer made. Progress that no commit has counted is sent again with the next exchange."""
    local_step: int = _total()
    """Inner steps."""
    sync_every: int = 0
    """H of the run; with `dylu` or `pace="time"` this peer's own."""
    last_sync_time_s: float = 0.0
    """Duration of the last exchange, its merge included."""
    total_sync_time_s: float = _total(0.0)
    """Duration of all exchanges together."""
    waiting_time_s: float = _total(0.0)
    """How long training stood still: the sum of the pseudo-gradient, codec, group, transfer, outer step and merge times
    below."""
    hidden_time_s: float = _total(0.0)
    """How long training went on while an exchange was under way: the sum of the four hidden times below."""
    inner_time_s: float = _total(0.0)
    """Time in inner steps, data loading, logging: all time that is neither waiting time nor a pause."""
    pseudo_gradient_time_s: float = _total(0.0)
    """Computing base − local, and checking that it may be sent."""
    codec_time_s: float = _total(0.0)
    """Encoding values for the wire, and checking received ones."""
    group_time_s: float = _total(0.0)
    """Waiting for the averaging group, which is all waiting time that is in no other part."""
    transfer_time_s: float = _total(0.0)
    """Sending payloads until they are accepted, and receiving them."""
    outer_step_time_s: float = _total(0.0)
    """Computing means, outer steps and digests."""
    merge_time_s: float = _total(0.0)
    """Merging newer global values into the model."""
    paused_time_s: float = _total(0.0)
    """Time in `pause()`, and while this peer's own state was saved."""
    hidden_codec_time_s: float = _total(0.0)
    hidden_group_time_s: float = _total(0.0)
    hidden_transfer_time_s: float = _total(0.0)
    hidden_outer_step_time_s: float = _total(0.0)
    bytes_sent: int = 0
    bytes_received: int = 0
    revision: int = 0
    """The lowest revision (`p2p-diloco set`) over the fragments; 0: all settings are as founded."""
    outer_lr: float = 0.0
    """The outer learning rate of that revision; 0 until this peer has the run's state."""
    outer_momentum: float = 0.0
    """The outer momentum of that revision."""
    steps_per_second: float = 0.0
    """Inner steps a second while training; 0 until known."""
    peers: int = 1
    """Live peers, this one included."""
    staleness: int = 0
    """Epochs between the last contribution's base and the commit that counts it; 0 in synchronous mode."""
    refused_submissions: int = 0
    """Submissions that were not fully counted: too stale, or of a lineage that lost."""
    retries: int = 0
    """Messages that could not be delivered at once."""
    reconnections: int = 0
    """Links that broke."""
    dropped_samples: int = _total()
    """Samples whose progress was dropped or mixed away. The log says why."""

    @property
    def encode_time_s(self) -> float:
        """Seconds for which training stood still to compute and encode pseudo-gradients."""
        return self.pseudo_gradient_time_s + self.codec_time_s

    @property
    def hidden_share(self) -> float:
        """The fraction of all exchanges' time that was hidden behind training. 0 before the first exchange."""
        return self.hidden_time_s / self.total_sync_time_s if self.total_sync_time_s else 0.0

    def totals(self) -> dict[str, float]:
        """The counters that go on after a restart."""
        return {name: getattr(self, name) for name in TOTALS}


TOTALS = tuple(counter.name for counter in fields(Metrics) if counter.metadata.get("total"))
OF_NODE = (
    "peers", "bytes_sent", "bytes_received", "retries", "reconnections", "revision", "outer_lr", "outer_momentum",
)  # fmt: skip
"""The counters that the node writes into the shared memory, under the same names."""


def of_node(memory: object) -> dict[str, Any]:
    """Read the counters that the node writes into the shared memory."""
    return {name: getattr(memory, name) for name in OF_NODE}


@dataclass(frozen=True, slots=True)
class Standing:
    """A trainer's position in the run between two of its steps; the same on all ranks of a peer."""

    epoch: int = 0
    digest: str = ""
    finished: bool = False
    global_step: int = 0
    metrics: Metrics = Metrics()

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Standing:
        """Read a position from the result of `dataclasses.asdict`."""
        return cls(**{**wire, "metrics": Metrics(**wire["metrics"])})
