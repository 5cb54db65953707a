"""The settings of a simulated run, and the rules that its peers agree on."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.core.rules import Rules

AS_RULES = (
    "mode", "successors", "dn_buffer_size", "async_grace", "max_staleness", "min_peers", "start_peers", "round_timeout",
    "pause_timeout", "carry_rounds", "history", "forgotten", "stop_after_epochs",
)  # fmt: skip
"""The names of settings that are also rules of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a simulated run. Probabilities are per message; times in simulated seconds."""

    peers: int = 4
    mode: str = "sync"
    successors: int = 1  # this setting and the next three are for asynchronous mode only
    dn_buffer_size: int = 0
    async_grace: float = 0.0
    max_staleness: int | None = None
    fragments: int = 1
    slices_per_fragment: int = 1
    interval: int = 3  # inner steps between contributions
    overlap: int = 0  # inner steps between a contribution and its merge
    min_peers: int = 1
    start_peers: int = 1
    stop_after_epochs: int | None = None
    drop: float = 0.05
    duplicate: float = 0.05
    delay_mean: float = 0.1
    step_times: tuple[float, float] = (0.3, 1.0)
    bandwidths: tuple[float, float] | None = None  # range of the bandwidths that peers measure, again at intervals
    measured_every: tuple[float, float] = (2.0, 20.0)
    work_time: float = 0.05
    clock_skew: float = 100.0
    fault_every: tuple[float, float] = (1.0, 6.0)
    faults: tuple[str, ...] = ("crash", "restart", "cut", "heal", "freeze", "stall")
    deaths_at_once: int | None = None  # the most peers that may fail before the last failures are repaired
    # whether dead peers return when faults end; otherwise only links, frozen processes and stuck trainers recover
    dead_return: bool = True
    hesitation: float = 0.0  # longest time between a Load and its Contribute, in which bases may change
    carry_rounds: int = 2
    history: int = 256  # ancestors remembered per unit
    forgotten: int = 60  # heartbeat_timeouts until a peer that is gone is forgotten
    state_lag: float = 0.0  # usual transfer time of a State, in addition to the delay of any message
    revisions: int = 0  # how often the founder asks for other settings, at random times before the faults end
    revised_min_peers: int = 1  # the highest min_peers that the founder asks for
    # whether peers that know a revision renew its record; otherwise only the founder writes it, unless it dies first
    record_kept: bool = True
    round_timeout: float = 12.0
    pause_timeout: float = 6.0
    # all peers but two start in this range, and are slow; None: all start within 3 s
    late: tuple[float, float] | None = None
    # messages go through relays where two peers have no direct link; the next two settings need this
    relays: bool = False
    private: int = 0  # peers that are private at the start
    bootstrap: bool = True  # whether there is a bootstrap node, which serves as a relay
    hostile: bool = False  # a member sends anything well-formed until the faults end
    samples: int = 0  # length of the data set; 0: the run has no data
    data_epochs: int = 0  # how often each sample is used; 0: any number of times
    blame_after: float = 16.0  # within this time live peers must notice that a peer is dead, cut off or stuck

    def rules(self) -> Rules:
        """Return the rules that the peers of this simulated run agree on."""
        f, n = self.fragments, self.slices_per_fragment
        return Rules(
            run="sim",
            fragments=tuple(tuple(range(i * n, (i + 1) * n)) for i in range(f)),
            sync_every=self.interval * self.fragments,
            heartbeat_interval=1.0,
            heartbeat_timeout=4.0,
            weight_max=2.0**20,
            samples_max=2**20,
            commits_kept=64,  # so few that some newcomers miss commits between a fetched state and the kept commits
            **{name: getattr(self, name) for name in AS_RULES},
        )


PLAIN = Settings()
"""The default settings."""
