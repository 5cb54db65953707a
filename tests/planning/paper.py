"""The model with which the papers on DiLoCo computed utilisation, and their published figures to check it against.

Law: a check of how the papers' figures are read; forecasts for users come from `planning.exchange`, which describes how
this package really exchanges.

Sources: Streaming DiLoCo (arXiv 2501.18512), table 4, and Scaling Laws for DiLoCo (arXiv 2503.09799), table 7. Their
assumptions: two replicas; a payload of bits · N · 2(1 − 1/M); no latency; a step of T seconds is T/3 of forward pass
and 2T/3 of backward pass. The payload is cut into K equal buckets, which are ready at even intervals in the backward
pass of the step that sends them and follow one another on the link. They must have arrived at the end of that step, or
τ steps later with overlap. Training stands still for what is late:
    stall = max(0, finish − (τ + 1) T),   utilisation = compute / (compute + stall)
Data-parallel training and DiLoCo have one bucket for each layer, streaming DiLoCo has 12 for each fragment. A published
value is the first of 50 bandwidths, from 0.1 to 1000 Gbit/s in equal ratios, that reaches the utilisation.

The published values fit if only the fraction 0.80 of the payload is sent. The papers don't explain this factor. Only
this model uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID_GBIT = tuple(10 ** (-1 + 4 * index / 49) for index in range(50))
PAYLOAD_FACTOR = 0.80
STREAMING_BUCKETS = 12
LAYERS_OF_A_FRAGMENT = 3
SYNC_EVERY = 100
TOLERANCE = 1
"""Steps of the grid by which a computed value may differ from the published one."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is trained. `step_s`: T; `steps`: inner steps from one transfer to the next; `buckets`: K, of one
    transfer; `bits`: of a parameter; `parts`: how many transfers the model is divided into; `overlap`: τ."""

    params: float
    step_s: float
    steps: float
    buckets: int
    bits: int = 16
    parts: int = 1
    overlap: int = 0

    def utilisation(self, gbit: float) -> float:
        """The utilisation if the link carries `gbit` Gbit/s."""
        each_s = PAYLOAD_FACTOR * self.bits * self.params / self.parts / self.buckets / (gbit * 1e9)
        finished = 0.0
        for bucket in range(1, self.buckets + 1):
            ready = self.step_s / 3 + 2 * self.step_s / 3 * bucket / self.buckets
            finished = max(finished, ready) + each_s
        compute_s = self.steps * self.step_s
        return compute_s / (compute_s + max(0.0, finished - (self.overlap + 1) * self.step_s))

    def needed_gbit(self, wanted: float) -> float:
        """The first bandwidth of the grid that reaches the utilisation; infinite if none does."""
        return next((gbit for gbit in GRID_GBIT if self.utilisation(gbit) >= wanted), float("inf"))


@dataclass(frozen=True, slots=True)
class Cell:
    """A published bandwidth in Gbit/s beside the computed one."""

    method: str
    name: str
    utilisation: float
    published: float
    ours: float

    @property
    def apart(self) -> int:
        """Steps of the grid from the published value to ours. Positive: ours is higher."""
        return _nearest(self.ours) - _nearest(self.published)

    @property
    def fits(self) -> bool:
        """Whether both values are the same point of the grid, or neighbours."""
        return abs(self.apart) <= TOLERANCE


class Size(NamedTuple):
    """A model size of table 4."""

    name: str
    params: float
    step_s: float
    fragments: int

    def setting(self, method: str, steps: int = SYNC_EVERY) -> Setting:
        """This model trained by a method of table 4."""
        if not method.startswith("streaming"):
            layers = LAYERS_OF_A_FRAGMENT * self.fragments
            return Setting(self.params, self.step_s, 1 if method == "data-parallel" else steps, layers)
        bits, overlap = 4 if "4 bits" in method else 16, int("overlap" in method)
        between = steps / self.fragments
        return Setting(self.params, self.step_s, between, STREAMING_BUCKETS, bits, self.fragments, overlap)


SIZES = (Size("1B", 1e9, 0.1, 8), Size("10B", 1e10, 0.8, 16), Size("100B", 1e11, 4.9, 36))

TABLE_4: dict[str, tuple[tuple[float, ...], ...]] = {
    "data-parallel": (
        (86.8, 152.6, 184.2, 222.3, 569),
        (104.8, 222.3, 222.3, 268.3, 471.5),
        (184.2, 323.8, 390.7, 390.7, 471.5),
    ),
    "DiLoCo": ((1.4, 6.2, 13.3, 23.3, 86.8), (1.7, 7.5, 16.0, 33.9, 104.8), (3.0, 11.0, 23.3, 49.4, 184.2)),
    "streaming": ((1.4, 5.2, 9.1, 16.0, 28.1), (1.7, 5.2, 9.1, 13.3, 19.3), (2.4, 6.2, 9.1, 11.0, 19.3)),
    "streaming, overlap 1": ((1.4, 4.3, 6.2, 9.1, 11.0), (1.7, 3.6, 5.2, 6.2, 7.5), (1.7, 3.6, 4.3, 5.2, 5.2)),
    "streaming, overlap 1, 4 bits": ((0.4, 0.9, 1.7, 2.0, 3.0), (0.4, 0.9, 1.4, 1.4, 1.7), (0.5, 0.9, 1.1, 1.1, 1.4)),
}
"""Streaming DiLoCo, table 4: Gbit/s for each of `UTILISATIONS`, one row for each of `SIZES`."""

TABLE_7: dict[int, tuple[float, ...]] = {
    1: (104.8, 184.2, 222.3, 222.3, 390.7),
    10: (16.0, 49.4, 86.8, 152.6, 222.3),
    50: (3.0, 11.0, 23.3, 41.0, 126.5),
    100: (1.4, 6.2, 13.3, 23.3, 86.8),
    300: (0.5, 2.0, 4.3, 9.1, 41.0),
}
"""Scaling Laws for DiLoCo, table 7: Gbit/s for each of `UTILISATIONS` by H, for 10 billion parameters."""


def cells() -> Iterator[Cell]:
    """All cells of both tables."""
    rows = [
        (method, size.name, size.setting(method), row)
        for method, of_sizes in TABLE_4.items()
        for size, row in zip(SIZES, of_sizes, strict=True)
    ]
    rows += [
        ("DiLoCo, 10B (2503.09799)", f"H={steps}", SIZES[1].setting("DiLoCo", steps), row)
        for steps, row in TABLE_7.items()
    ]
    for method, name, setting, row in rows:
        for wanted, told in zip(UTILISATIONS, row, strict=True):
            yield Cell(method, name, wanted, told, setting.needed_gbit(wanted))


def _nearest(gbit: float) -> int:
    """The index of the grid's point that is closest to a value; one past the end for an infinite one."""
    if gbit > GRID_GBIT[-1]:
        return len(GRID_GBIT)
    return min(range(len(GRID_GBIT)), key=lambda index: abs(GRID_GBIT[index] - gbit))
