"""A peer's counters at one moment.

Law: values with their units in their names; nothing is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metrics:
    """Since this peer entered the run (or since what `load_state_dict` brought back)."""

    sync_count: int = 0
    """Exchanges that this peer contributed to."""
    local_step: int = 0
    """Inner steps."""
    sync_every: int = 0
    """H of the run."""
    last_sync_time_s: float = 0.0
    """What the last exchange took, merge included."""
    total_sync_time_s: float = 0.0
    """What all of them took."""
    waiting_time_s: float = 0.0
    """How much of that training stood still for."""
    hidden_time_s: float = 0.0
    """How much of that training went on meanwhile."""
    bytes_sent: int = 0
    bytes_received: int = 0
    steps_per_second: float = 0.0
    """Inner steps a second while training; 0 until known."""
    peers: int = 1
    """Live peers, this one included."""
    staleness: int = 0
    """Epochs between the last contribution's base and the commit that counts it; 0 in synchronous mode."""
    retries: int = 0
    """Messages that could not be delivered at once."""
    reconnections: int = 0
    """Links that broke."""
    dropped_samples: int = 0
    """Samples whose progress was given up: it could not be told from what is counted, or was carried too
    long."""
