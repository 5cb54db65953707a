"""What a simulated world is made of, and the rules that its peers agree on."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.core.rules import Rules

AS_RULES = (
    "mode", "successors", "dn_buffer_size", "async_grace", "max_staleness", "min_peers", "start_peers", "round_timeout",
    "pause_timeout", "carry_rounds", "history", "forgotten", "stop_after_epochs",
)  # fmt: skip
"""The settings that are rules of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a world is made of. Probabilities per message; times in simulated seconds."""

    peers: int = 4
    mode: str = "sync"
    successors: int = 1  # this and the next three: of the asynchronous mode
    dn_buffer_size: int = 0
    async_grace: float = 0.0
    max_staleness: int | None = None
    fragments: int = 1
    shards_per_fragment: int = 1
    interval: int = 3  # inner steps between sendings
    overlap: int = 0  # inner steps that go on between sending and merging
    min_peers: int = 1
    start_peers: int = 1
    stop_after_epochs: int | None = None
    drop: float = 0.05
    duplicate: float = 0.05
    delay_mean: float = 0.1
    step_times: tuple[float, float] = (0.3, 1.0)
    bandwidths: tuple[float, float] | None = None  # what peers find that their links carry, anew now and then
    measured_every: tuple[float, float] = (2.0, 20.0)
    work_time: float = 0.05
    clock_skew: float = 100.0
    fault_every: tuple[float, float] = (1.0, 6.0)
    faults: tuple[str, ...] = ("crash", "restart", "cut", "heal", "freeze", "stall")
    deaths_at_once: int | None = None  # that may strike before what the last ones left has been repaired
    dead_return: bool = True  # when the faults end; else only links, frozen processes and stuck trainers recover
    hesitation: float = 0.0  # at most so long between a Load and its Contribute, in which bases may change
    carry_rounds: int = 2
    history: int = 256  # ancestors remembered per shard
    forgotten: int = 60  # heartbeat_timeouts until a peer that is gone is forgotten
    state_lag: float = 0.0  # a State takes about so long, beside the delay of any message
    revisions: int = 0  # how often the founder asks for other rates, at random times before the faults end
    record_kept: bool = True  # by who knows of one; else only the asker writes it, and may die before
    round_timeout: float = 12.0
    pause_timeout: float = 6.0
    late: tuple[float, float] | None = None  # all but the first two start between these, and are slow; else within 3 s
    blame_after: float = 16.0  # a peer that is dead, cut off or stuck for this long is known to be so by the living

    def rules(self) -> Rules:
        """The rules that the peers of such a world agree on."""
        f, n = self.fragments, self.shards_per_fragment
        return Rules(
            run="sim",
            fragments=tuple(tuple(range(i * n, (i + 1) * n)) for i in range(f)),
            heartbeat_interval=1.0,
            heartbeat_timeout=4.0,
            commits_kept=64,  # so few that some newcomers find a hole between a state and the commits that they kept
            **{name: getattr(self, name) for name in AS_RULES},
        )


PLAIN = Settings()
"""A world of the defaults."""
