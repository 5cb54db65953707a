"""The rules of a run as far as the core needs them, and all timeouts that follow from its settings alone. Those that
follow from measured rounds, such as the grace, are in `fragment`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .revision import FOUNDED, Revision, in_force
from .schedule import fragment_interval
from .version import ModelVersion

LOADS_S_MAX = 10.0
"""The most of `Rules.loads_within`, in seconds."""

RECALL, RECALL_ASYNC = 6, 50
"""The parts of `Rules.recall`. RECALL: commits beyond ``carry_rounds``. RECALL_ASYNC: commits for each lease holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of a run, which are the same for all replicas. Times are in seconds."""

    run: str
    fragments: tuple[tuple[int, ...], ...]  # fragment → its slices, numbered over the whole model
    mode: str = "sync"  # or "async": each submission becomes a commit by itself
    sync_every: int = 1
    min_peers: int = 1
    start_peers: int = 1
    round_timeout: float = 600.0
    pause_timeout: float = 60.0  # a trainer that pauses for longer is not waited for
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 10.0
    carry_rounds: int = 2
    successors: int = 1  # async: peers that must hold each commit before its submitter is answered
    dn_buffer_size: int = 0  # async: submissions in the Delayed Nesterov buffer; 0 or 1: no buffer
    async_grace: float = 0.0  # async: how long a submission waits to be averaged with other submissions
    max_staleness: int | None = None  # async: the most epochs that a submission may be behind; None: no limit
    stop_after_epochs: int | None = None
    stop_after_samples: int | None = None
    history: int = 256  # ancestors remembered per fragment
    forgotten: int = 60  # a peer that is gone is forgotten after this many heartbeat_timeouts
    fetch_window: int = 2  # slices requested from one donor at a time
    commits_kept: int = 256  # per fragment, the most rounds kept on versions not reached yet
    weight_max: float = math.inf  # the largest weight of a contribution
    samples_max: int = 2**40  # the most samples of a contribution

    @property
    def asynchronous(self) -> bool:
        """Whether the run is in asynchronous mode."""
        return self.mode == "async"

    @property
    def recall(self) -> int:
        """A peer's lease is freed after this many commits that used no part of it. In asynchronous mode the number is
        multiplied by the number of lease holders."""
        return RECALL_ASYNC if self.asynchronous else self.carry_rounds + RECALL

    @property
    def slices(self) -> int:
        """The number of slices of the whole model."""
        return sum(map(len, self.fragments))

    def fits(self, weight: float, samples: int, revision: Revision = FOUNDED) -> bool:
        """Whether a contribution may have this weight and this many samples. The limits grow with H."""
        longer = max(1.0, (revision.sync_every or 0) / self.sync_every)
        return 0 < weight <= self.weight_max * longer and 0 <= samples <= self.samples_max * longer

    def stops(self, revision: Revision) -> tuple[int | None, int | None]:
        """The epochs and the samples after which a fragment at this revision is final; None: never."""
        epochs = in_force(self.stop_after_epochs, revision.stop_after_epochs)
        return epochs, in_force(self.stop_after_samples, revision.stop_after_samples)

    def needed(self, revision: Revision, *, first: bool) -> int:
        """The lowest number of contributions that an outer step needs. ``first``: it is the run's first outer step."""
        least = revision.min_peers or self.min_peers
        return max(least, self.start_peers) if first else least

    def steps_between(self, revision: Revision, fragment: int = 0) -> int:
        """The inner steps from the exchange before to that of this fragment, by the H of this revision."""
        return fragment_interval(revision.sync_every or self.sync_every, len(self.fragments), fragment)

    def fragment_of(self, index: int) -> int:
        """The fragment of a slice, which is given by its index in the whole model."""
        return next(number for number, slices in enumerate(self.fragments) if index in slices)

    def ended(self, model: ModelVersion, revision: Revision) -> bool:
        """Whether the run has ended, judging by this version of the whole model and the revision of its fragments."""
        epochs, samples = self.stops(revision)
        return (epochs is not None and model.epochs >= epochs * len(self.fragments)) or (
            samples is not None and model.samples >= samples * len(self.fragments)
        )

    # -- timeouts: every wait of the protocol is one of these, or bounded by them (`FragmentLog.grace` and others)

    @property
    def probe_every(self) -> float:
        """The time between two probes of a peer that this peer waits for. In each such interval a few of the other
        peers are probed, too."""
        return self.heartbeat_interval

    @property
    def settle(self) -> float:
        """How long another peer's model may be ahead of this peer's before this peer asks for it. Usually the missing
        commit is on its way. Also: the least grace and the least usual round, and how long an answer may take before
        something is asked for again."""
        return 2 * self.heartbeat_interval

    @property
    def loads_within(self) -> float:
        """How long a trainer that asks for newer states waits for one that is near: its contribution to the present one
        would be too late."""
        return min(self.settle, LOADS_S_MAX)

    @property
    def fetch_again(self) -> float:
        """How long a slice that was asked for may take, while nothing of it comes; then another donor is asked."""
        return 3 * self.heartbeat_timeout

    @property
    def mended_within(self) -> float:
        """The longest time that a peer waits for an intact copy of a slice that is damaged here. It waits so long only
        while transfers make progress, else for ``fetch_again``."""
        return 2 * self.fetch_again

    @property
    def answered_within(self) -> float:
        """How long a peer may take to answer a question, if no transfer between the two makes progress."""
        return 6 * self.heartbeat_timeout

    @property
    def confirms_within(self) -> float:
        """The longest time that an asynchronous commit waits for a live peer to hold it. Then that peer is passed
        over."""
        return self.round_timeout + 2 * self.heartbeat_timeout

    @property
    def promises_within(self) -> float:
        """In asynchronous mode: how long a peer that has claimed a term waits for the promise of a live peer, and at
        least how long the others wait for a leader. Then they go on without this peer."""
        return min(4 * self.heartbeat_timeout, self.confirms_within)

    @property
    def dead_after(self) -> float:
        """How long, in seconds, a peer may leave a probe unanswered. Then it counts as dead until a message from it
        arrives."""
        return self.heartbeat_timeout

    @property
    def deaf_after(self) -> int:
        """A peer that no probe reaches in this many intervals in a row counts as dead, even if its messages arrive."""
        return math.ceil(2 * self.heartbeat_timeout / self.heartbeat_interval)

    @property
    def answers_within(self) -> float:
        """A transfer that makes no progress for this long has failed. So has a request whose answer takes longer than
        this."""
        return self.heartbeat_timeout

    @property
    def dials_within(self) -> float:
        """A dial that takes longer than this has failed."""
        return self.heartbeat_timeout / 2

    @property
    def forgotten_after(self) -> float:
        """A peer that has been gone for this long is forgotten and no longer probed."""
        return self.forgotten * self.heartbeat_timeout

    @property
    def costs_for(self) -> float:
        """How long it is remembered what a peer of a grant has cost the others: ten times the longest deadline, so that
        the grant can't cost one after the other."""
        return max(self.forgotten_after, 10 * (self.confirms_within + self.heartbeat_timeout))

    @property
    def assigned_for(self) -> float:
        """In asynchronous mode, the shortest time that a fragment stays with its leader before it moves to a newly
        elected peer."""
        return self.heartbeat_timeout

    @property
    def frozen_after(self) -> float:
        """If a wakeup is late by this much, this process was suspended. Silence during that time does not prove that a
        peer is dead."""
        return 2 * self.heartbeat_interval

    @property
    def say_again(self) -> float:
        """The time between two log lines about a fault that goes on. In asynchronous mode, it is also the longest time
        until an unanswered submission is sent again."""
        return 6 * self.heartbeat_timeout

    def idle_after(self, step_time_s: float) -> float:
        """How long a trainer may make no inner step before it counts as idle. ``step_time_s``: the usual time of a
        step."""
        return max(self.heartbeat_timeout, 3 * step_time_s)
