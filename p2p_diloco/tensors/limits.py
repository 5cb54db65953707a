"""Limits on what one contribution can do to a mean, whatever its sender puts into it.

Law: pure functions of the contributions of one slice. Nothing here depends on the order of arrival, the number of
threads or the machine: sums of products have the order that `products` describes, all that follows from them is
computed in fp64 by single operations, and sums of a few numbers are exact (`math.fsum`).

Limits compare contributions with each other. So they need at least three contributions, and they work only while more
than half of the senders are honest. Each contribution counts once in a median, whatever weight its sender claims.

A method gives each contribution i a factor fᵢ; the mean is Σ rᵢ·fᵢ·xᵢ / Σ rᵢ, where rᵢ is its weight relative to the
first contribution's. Factors of 1 are the plain mean.

    clip             fᵢ = min(1, NORM_TIMES · M / ‖xᵢ‖), M the median of all ‖xᵢ‖
    centered_clip    yᵢ = xᵢ clipped as above. v begins as the mean of the yᵢ. CENTERED_ROUNDS times:
                     dᵢ = ‖yᵢ − v‖, τ = DISTANCE_TIMES · median of all dᵢ, tᵢ = min(1, τ / dᵢ),
                     v ← v + Σ rᵢ·tᵢ·(yᵢ − v) / Σ rᵢ

The second is the centred clipping of Karimireddy et al. 2021, arXiv 2012.10333. v is always a sum of contributions, so
their inner products are enough to compute the factors; no vector is made before the mean itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Aggregation = Literal["clip", "mean", "centered_clip"]

MEMBERS_MIN = 3
"""Limits apply to this many contributions or more: if two differ, neither is known to be wrong."""
WEIGHT_TIMES = 1.5
"""A weight is lowered to at most this many times the median weight."""
NORM_TIMES = 1.0
"""A contribution is shortened to at most this many times the median L2 norm."""
DISTANCE_TIMES = 1.0
"""A contribution's distance from the centre is shortened to at most this many times the median distance."""
CENTERED_ROUNDS = 3
LANES = 1024
"""The number of running sums of an inner product (`products`)."""


def bounded(weights: Sequence[float]) -> list[float]:
    """The weights, none above WEIGHT_TIMES times their median."""
    most = WEIGHT_TIMES * statistics.median(weights)
    return [min(weight, most) for weight in weights]


def factors(aggregation: Aggregation, parts: Sequence[Iterator[Tensor]], weights: Sequence[float]) -> list[float]:
    """The factor fᵢ of each contribution in the mean (see above). `parts`: the contributions' values, fp32, in blocks
    as `codec.decode_blocks` gives them; `weights`: the contributions' weights."""
    if aggregation == "mean":
        return [1.0] * len(weights)
    if aggregation == "clip":
        room = Room()
        return _clip([math.sqrt(square(part, room)) for part in parts])
    return _centered(products(parts), weights)


def square(part: Iterable[Tensor], room: Room) -> float:
    """⟨x, x⟩ of one contribution, as `products` computes it."""
    lanes = np.zeros(LANES)
    for block in part:
        room.add(block, block, lanes)
    return math.fsum(lanes.tolist())  # a list is read three times as fast


def products(parts: Sequence[Iterator[Tensor]]) -> list[list[float]]:
    """⟨xᵢ, xⱼ⟩ of all contributions.

    A product of two vectors has LANES running sums; element k of a block belongs to lane k mod LANES. Within a block
    each product, and each sum of a lane, from the first element to the last, is rounded to fp32. Over the blocks each
    lane is summed in fp64, and in the end all lanes are summed exactly.
    """
    count, room = range(len(parts)), Room()
    lanes = {(i, j): np.zeros(LANES) for i in count for j in count if i <= j}
    for blocks in zip(*parts, strict=True):
        for (i, j), sums in lanes.items():
            room.add(blocks[i], blocks[j], sums)
    found = {pair: math.fsum(sums) for pair, sums in lanes.items()}
    return [[found[min(i, j), max(i, j)] for j in count] for i in count]


class Room:
    """Reused memory for the elements' products of two blocks. It is as long as the longest block so far."""

    def __init__(self) -> None:
        self._product, self._sums = np.empty(0, np.float32), np.empty(LANES, np.float32)

    def add(self, left: Tensor, right: Tensor, lanes: NDArray[np.float64]) -> None:
        """Add the elements' products of two blocks to the sums `lanes`, in the order that `products` describes."""
        numel, sums = left.numel(), self._sums
        if numel > len(self._product):
            self._product = np.empty(numel, np.float32)
        product = np.multiply(left.numpy(), right.numpy(), out=self._product[:numel])
        whole, rest = numel - numel % LANES, numel % LANES
        np.add.reduce(product[:whole].reshape(-1, LANES), axis=0, out=sums)  # row after row
        np.add(sums[:rest], product[whole:], out=sums[:rest])
        np.add(lanes, sums, out=lanes)


def _clip(norms: Sequence[float]) -> list[float]:
    """For each norm the factor that lowers it to NORM_TIMES the median norm; 1 if it isn't above that."""
    return _at_most(NORM_TIMES * statistics.median(norms), norms)


def _centered(products: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """The factors of centred clipping, from the inner products of all pairs."""
    count = range(len(weights))
    clipped = _clip([math.sqrt(products[i][i]) for i in count])
    near = [[clipped[i] * clipped[j] * products[i][j] for j in count] for i in count]  # ⟨yᵢ, yⱼ⟩
    ratios = [weight / weights[0] for weight in weights]
    total = math.fsum(ratios)
    shares = [1.0] * len(weights)  # v = Σ rᵢ·sharesᵢ·yᵢ / Σ rᵢ
    for _ in range(CENTERED_ROUNDS):
        parts = [ratios[i] * shares[i] / total for i in count]
        to_centre = [math.fsum(parts[j] * near[i][j] for j in count) for i in count]  # ⟨yᵢ, v⟩
        length = math.fsum(parts[i] * to_centre[i] for i in count)  # ⟨v, v⟩
        distances = [math.sqrt(max(0.0, near[i][i] - 2 * to_centre[i] + length)) for i in count]
        taken = _at_most(DISTANCE_TIMES * statistics.median(distances), distances)
        moved = math.fsum(ratios[i] * taken[i] for i in count) / total
        shares = [shares[i] * (1 - moved) + taken[i] for i in count]
    return [shares[i] * clipped[i] for i in count]


def _at_most(limit: float, lengths: Sequence[float]) -> list[float]:
    """For each length the greatest factor, at most 1, with which it doesn't exceed the limit."""
    return [1.0 if length <= limit else limit / length for length in lengths]
