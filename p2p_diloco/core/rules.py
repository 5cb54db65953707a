"""The rules of a run as the core needs them, and the one ladder of timeouts derived from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .version import ModelVersion

EVEN_S_MAX = 10.0
"""A trainer that waits for an answer of its node waits no longer than this for a state of one epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What all replicas agree on. Times in seconds."""

    run: str
    fragments: tuple[tuple[int, ...], ...]  # the shards of each fragment
    mode: str = "sync"  # or "async": an outer step waits for no contribution
    min_peers: int = 1
    start_peers: int = 1
    round_timeout: float = 600.0
    pause_timeout: float = 60.0  # a trainer that pauses for longer is not waited for
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 10.0
    carry_rounds: int = 2
    successors: int = 1  # async: hold each commit before its submitter is answered
    dn_buffer_size: int = 0  # async: submissions in the Delayed Nesterov buffer; 0 or 1: there is none
    async_grace: float = 0.0  # async: how long a submission waits to be averaged with others
    max_staleness: int | None = None  # async: epochs that a submission may be behind
    stop_after_epochs: int | None = None
    stop_after_samples: int | None = None
    history: int = 256  # ancestors remembered per shard
    forgotten: int = 60  # heartbeat_timeouts after which a peer that is gone is not remembered
    fetch_window: int = 2  # shards that are asked of one donor at a time
    commits_kept: int = 256  # per shard, on bases that are still being fetched
    fetch_repeats: int = 5  # of the question for what is missing of another lineage, while nothing comes
    astray_max: int = 6  # commits in a row that lead a replica to other digests; then it computes unlike the others
    answered_with: int = 4  # commits at most in place of a state: of as many bytes as a state, or fewer
    resends: int = 2  # of a commit or a state that did not reach a living peer; then it has to ask

    @property
    def asynchronous(self) -> bool:
        return self.mode == "async"

    @property
    def shards(self) -> int:
        return sum(len(shards) for shards in self.fragments)

    def ended(self, model: ModelVersion) -> bool:
        """Whether the run has ended with this model, for all that can be seen of a whole model's version."""
        epochs, samples = self.stop_after_epochs, self.stop_after_samples
        return (epochs is not None and model.epochs >= epochs * self.shards) or (
            samples is not None and model.samples >= samples * self.shards
        )

    @property
    def payloads_kept(self) -> int:
        """Others' payloads that a replica keeps, of all shards: contributions that are collected, and, as far as these
        leave room, commits for those that may lack them. Half of what one contribution to every shard is: of two peers
        each collects as much."""
        return max(1, self.shards // 2)

    # -- the ladder: every wait of the protocol is one of these

    @property
    def probe_every(self) -> float:
        """Between two probes of a peer that one waits for, and between two rounds of probing others."""
        return self.heartbeat_interval

    @property
    def settle(self) -> float:
        """How long a peer may be seen ahead before its state is fetched: usually a commit is on its way."""
        return 2 * self.heartbeat_interval

    @property
    def even_within(self) -> float:
        """How long a trainer waits for the shards of a fragment to come to one epoch: commits are on their way."""
        return min(2 * self.heartbeat_interval, EVEN_S_MAX)

    @property
    def fetch_again(self) -> float:
        """Without a shard's state for this long, a fetch is given up and begun again; of a whole lineage, its donor
        is asked again for what is missing, ``fetch_repeats`` times. (A dead donor shows sooner.)"""
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
        """A transfer that stands still, or an answer that stays out, for this long has failed."""
        return self.heartbeat_timeout

    @property
    def room_within(self) -> float:
        """A contribution waits no longer for room that is made by none of the rounds under way."""
        return self.heartbeat_timeout / 4

    @property
    def dials_within(self) -> float:
        """A dial that takes longer has failed."""
        return self.heartbeat_timeout / 2

    @property
    def forgotten_after(self) -> float:
        """A peer that has been gone for this long is not probed any more, nor remembered."""
        return self.forgotten * self.heartbeat_timeout

    @property
    def assigned_for(self) -> float:
        """Async: a shard stays with its aggregator for this long at least before a newcomer is elected for it."""
        return self.heartbeat_timeout

    @property
    def frozen_after(self) -> float:
        """A wakeup this late means that this very process stood still: others' silence proves nothing."""
        return 2 * self.heartbeat_interval

    @property
    def say_again(self) -> float:
        """How often a fault that lasts is said."""
        return 6 * self.heartbeat_timeout

    def idle_after(self, step_time_s: float) -> float:
        """A trainer without an inner step for this long is idle."""
        return max(self.heartbeat_timeout, 3 * step_time_s)
