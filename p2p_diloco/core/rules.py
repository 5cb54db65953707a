"""The rules of a run as far as the core needs them, and all timeouts, derived from a few settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .version import ModelVersion

EVEN_S_MAX = 10.0
"""The longest time, in seconds, that a trainer waits for its node to answer with shards of one epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules that all replicas agree on. Times in seconds."""

    run: str
    fragments: tuple[tuple[int, ...], ...]  # fragment → its shards
    mode: str = "sync"  # or "async": each submission becomes a commit by itself
    min_peers: int = 1
    start_peers: int = 1
    round_timeout: float = 600.0
    pause_timeout: float = 60.0  # a trainer that pauses for longer is not waited for
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 10.0
    carry_rounds: int = 2
    successors: int = 1  # async: peers that must hold each commit before its submitter is answered
    dn_buffer_size: int = 0  # async: submissions in the Delayed Nesterov buffer; 0 or 1: no buffer
    async_grace: float = 0.0  # async: how long a submission waits to be averaged with others
    max_staleness: int | None = None  # async: the most epochs that a submission may be behind
    stop_after_epochs: int | None = None
    stop_after_samples: int | None = None
    history: int = 256  # ancestors remembered per shard
    forgotten: int = 60  # in heartbeat_timeouts: when a peer that is gone is forgotten
    fetch_window: int = 2  # shards asked of one donor at a time
    commits_kept: int = 256  # per shard, commits on versions not reached yet
    fetch_repeats: int = 5  # requests to donors of another lineage while nothing arrives
    astray_max: int = 6  # commits in a row that lead to other digests, until this replica asks for states instead
    answered_with: int = 4  # most commits sent in place of a state: as many bytes as a state, or fewer
    resends: int = 2  # of a commit or a state to a live peer that did not get it; after that the peer must ask

    @property
    def asynchronous(self) -> bool:
        return self.mode == "async"

    @property
    def shards(self) -> int:
        return sum(len(shards) for shards in self.fragments)

    def ended(self, model: ModelVersion) -> bool:
        """Whether the run has ended at this version of the whole model, as far as that version shows."""
        epochs, samples = self.stop_after_epochs, self.stop_after_samples
        return (epochs is not None and model.epochs >= epochs * self.shards) or (
            samples is not None and model.samples >= samples * self.shards
        )

    @property
    def payloads_kept(self) -> int:
        """The most payloads of others that a replica keeps, over all shards: contributions first, then commits that
        peers may lack. Half the number of shards, because each of two peers collects half of one contribution."""
        return max(1, self.shards // 2)

    # -- the ladder: every wait of the protocol is one of these

    @property
    def probe_every(self) -> float:
        """The time between two probes of a peer that is waited for, and between two rounds of probes to others."""
        return self.heartbeat_interval

    @property
    def settle(self) -> float:
        """How long a peer may be ahead before its state is fetched: usually a commit is on its way."""
        return 2 * self.heartbeat_interval

    @property
    def even_within(self) -> float:
        """How long a trainer waits for the shards of a fragment to reach one epoch: commits are on their way."""
        return min(2 * self.heartbeat_interval, EVEN_S_MAX)

    @property
    def fetch_again(self) -> float:
        """How long a fetch may stand still before it is given up and begun again. A fetch of another lineage instead
        asks its donors again, ``fetch_repeats`` times. (A donor's death is noticed sooner.)"""
        return 3 * self.heartbeat_timeout

    @property
    def dead_after(self) -> float:
        """A peer that leaves a probe unanswered for this long is dead until it is heard again."""
        return self.heartbeat_timeout

    @property
    def deaf_after(self) -> int:
        """A peer at which no probe arrives in so many intervals in a row is dead, though it is heard."""
        return math.ceil(2 * self.heartbeat_timeout / self.heartbeat_interval)

    @property
    def answers_within(self) -> float:
        """A transfer that stands still for this long, or an answer that takes longer, has failed."""
        return self.heartbeat_timeout

    @property
    def room_within(self) -> float:
        """The longest that a contribution waits for room while no round under way makes any."""
        return self.heartbeat_timeout / 4

    @property
    def dials_within(self) -> float:
        """A dial that takes longer has failed."""
        return self.heartbeat_timeout / 2

    @property
    def forgotten_after(self) -> float:
        """A peer that has been gone for this long is forgotten and no longer probed."""
        return self.forgotten * self.heartbeat_timeout

    @property
    def assigned_for(self) -> float:
        """Async: the least time that a shard stays with its aggregator before it moves to a newly elected peer."""
        return self.heartbeat_timeout

    @property
    def frozen_after(self) -> float:
        """A wakeup this late means that this process stood still, so that silence proves no peer's death."""
        return 2 * self.heartbeat_interval

    @property
    def say_again(self) -> float:
        """The time between two log lines on a fault that lasts."""
        return 6 * self.heartbeat_timeout

    def idle_after(self, step_time_s: float) -> float:
        """A trainer without an inner step for this long is idle."""
        return max(self.heartbeat_timeout, 3 * step_time_s)
