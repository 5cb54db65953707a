"""A peer's counters at one moment, its trainer's position in the run, and sums of the trainer's time by part.

Law: values with their units in their names. Reads the clock and adds; decides nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any

from p2p_diloco.node.ledger import GROUP, INNER, OF_EXCHANGE, OF_TRAINING, PAUSED, Ledger, last_round, told
from p2p_diloco.node.shared import SharedMemory


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
    """Waiting for the other peers: all waiting time that is in no other part."""
    transfer_time_s: float = _total(0.0)
    """Sending payloads until they are accepted, and receiving them."""
    outer_step_time_s: float = _total(0.0)
    """Computing means and outer steps."""
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
        """Read a position that was sent as a map of its fields."""
        return cls(**{**wire, "metrics": Metrics(**wire["metrics"])})


# -- times

TOLD_EVERY_S = 60.0
"""Seconds between two log lines with the shares of a round's time."""

log = logging.getLogger("p2p_diloco")


class Times:
    """The times of one trainer since its start. The times of the last round are written into the shared memory."""

    def __init__(self, memory: SharedMemory, clock: Callable[[], float]) -> None:
        """`clock` returns the seconds since some fixed moment."""
        self._memory, self._clock = memory, clock
        self._ledger = Ledger(OF_TRAINING, clock)
        self._hidden = dict.fromkeys(OF_EXCHANGE, 0.0)
        self.exchanges = 0
        """The number of exchanges that were merged."""
        self.last_sync_time_s = self._total_s = 0.0
        self._round_began, self._told_at = self._ledger.stood, -math.inf

    def part(self, name: str) -> AbstractContextManager[None]:
        """A block whose time is counted for the part `name`."""
        return self._ledger.part(name)

    @property
    def waiting_s(self) -> float:
        """Seconds for which training has stood still. These are all seconds except inner steps and pauses."""
        return sum(seconds for part, seconds in self._ledger.stood.items() if part not in (INNER, PAUSED))

    @property
    def group_s(self) -> float:
        """Seconds for which training has waited for other peers, so far."""
        return self._ledger.stood[GROUP]

    def exchanged(self, waited_since: float, stood: Mapping[str, float], hidden: Mapping[str, float]) -> float:
        """Divide the time for which training waited for an exchange among the parts. `waited_since`: the value of
        `group_s` before the wait; the time to divide is the increase since then. `stood`, `hidden`: the node's seconds
        by part, while training stood still and while training went on. Returns the sum of `hidden`."""
        self._ledger.split(GROUP, waited_since, stood)
        for part, seconds in hidden.items():
            self._hidden[part] += seconds
        return float(sum(hidden.values()))

    def landed(self, took_s: float, hidden_s: float) -> None:
        """Record that the result of an exchange is merged, which ends the round. `took_s`: the duration of the
        exchange, its hidden time included."""
        self.exchanges += 1
        self.last_sync_time_s = took_s
        self._total_s += took_s
        self._memory.waiting_s = self.waiting_s
        before, now = self._round_began, self._clock()
        self._round_began = self._ledger.stood
        spent = {part: seconds - before[part] for part, seconds in self._round_began.items()}
        self._memory.last_round = last = last_round(spent, hidden_s, time.time())
        if now - self._told_at >= TOLD_EVERY_S:
            self._told_at, all_s = now, sum(spent.values()) - spent[PAUSED]
            log.info("round %d took %.2f s: %s", self.exchanges, all_s, told(last))

    def totals(self) -> dict[str, float]:
        """Total seconds by part, under their names in `Metrics`."""
        return {
            "total_sync_time_s": self._total_s,
            "waiting_time_s": self.waiting_s,
            "hidden_time_s": sum(self._hidden.values()),
            **{f"{part}_time_s": seconds for part, seconds in self._ledger.stood.items()},
            **{f"hidden_{part}_time_s": seconds for part, seconds in self._hidden.items()},
        }
