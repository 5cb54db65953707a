"""What an experiment can vary: one `Setting` for each of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from p2p_diloco import RunConfig

HEARTBEAT_S, DEAD_S = 0.5, 2.0
"""`heartbeat_interval` and `heartbeat_timeout`, short so that a death delays a round by less than a few inner steps."""
SLICE_ELEMENTS = 16384

LIES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "sign flipped": lambda honest, _: -honest,
    "sign flipped, × 10": lambda honest, _: -10 * honest,
    "× 1000": lambda honest, _: 1000 * honest,
    "zeros": lambda honest, _: torch.zeros_like(honest),
    "noise, × 10": lambda honest, drawn: _as_long(torch.randn(len(honest), generator=drawn), 10 * honest.norm()),
}
"""What a liar makes of its pseudo-gradient, [elements of a slice]."""


def _as_long(values: Tensor, length: Tensor) -> Tensor:
    return values * (length / values.norm())


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of an experiment."""

    run: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the defaults of `RunConfig`, from H = 20, and from 0.7/0.9 as rates of the outer step."""
    peers: int = 2
    step_s: tuple[float, ...] = (1.0,)
    """The virtual seconds of an inner step, of each peer in turn."""
    batch: int = 8
    """Windows in an inner step of each peer."""
    steps: float = 1.0
    """Inner steps of each peer, as a share of the experiment's; if peers' speeds differ, in the mean."""
    warm: float = 1.0
    """Steps of the warm start, as a share of the experiment's; 0: from random weights."""
    inner: str = "adamw"
    """The inner optimizer: "adamw" or "muon"."""
    drop: float = 0.0
    """The probability that a peer's links are cut for `2 * DEAD_S` when it sends a contribution."""
    kill_every_s: float = 0.0
    """The mean virtual seconds between two kills of a peer, each followed by a newcomer; 0: none."""
    lie: str = ""
    """What the last peer sends in place of its pseudo-gradient, by its name in `LIES`."""
    lie_weight: float = 1.0
    """Times its honest weight."""
    wrong_mean: float = 1.0
    """What the last peer multiplies each mean by that it aggregates, from the fourth epoch on."""
    joins: tuple[float, ...] = ()
    """When newcomers join, as shares of the run's samples."""

    @property
    def config(self) -> RunConfig:
        """The run's settings."""
        fixed = {"sync_every": 20, "outer": "fixed", "heartbeat_interval": HEARTBEAT_S, "heartbeat_timeout": DEAD_S}
        return RunConfig(**{**fixed, "slice_elements": SLICE_ELEMENTS, "start_peers": self.peers, **self.run})


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to. Losses are in nats a byte, infinite if the run has diverged; times in virtual seconds."""

    loss: float
    time_s: float
    payload_bytes: int
    """Of all contributions and means that were sent from one peer to another."""
    curve: tuple[tuple[float, int, float], ...]
    """(time, samples counted, held-out loss of the global parameters) during the run."""
