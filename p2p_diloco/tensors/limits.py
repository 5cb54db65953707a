"""Limits on what one contribution can do to a mean, and one wrong mean to a slice, whatever a sender puts into it.

Law: pure functions of the contributions to one slice and of the lengths of its last means, a part of the outer state
that all replicas share. Nothing here depends on the order of arrival, the number of
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

The limit on each step, with `times` above 0, cuts the mean ḡ before the outer step:

    n ← ‖ḡ‖                        the L2 norm of the mean, as it is decoded
    M ← median(lengths)            if there are LENGTHS_MIN or more; else ∞
    f ← min(1, times · M / n)      rounded to fp32 at the end
    ḡ ← f · ḡ                      skipped for f = 1
    lengths ← the last LENGTHS_MAX of (lengths, min(n, max(times, GROWTH) · M))    rounded to fp32

A length is remembered as it was before the cut, up to max(times, GROWTH) times the median. So if honest means become
longer, the median rises once they are the majority; a few wrong means can't raise it. A mean of length 0, to which no
peer has contributed progress, is neither cut nor remembered: it says nothing of the length of a step. Squares of
elements above 1.8·10¹⁹ exceed fp32: then n = ∞ and f = 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2p_diloco.tensors.flat import Array, unheeded

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


# -- a limit on each step

LENGTHS = "lengths"
"""The name of the state tensor: fp32 [LENGTHS_MAX], the newest length last; 0 in a place without a length."""
LENGTHS_MAX = 9
LENGTHS_MIN = 3
"""The limit applies once there are this many lengths: with fewer, one wrong length could be the median."""
GROWTH = 3.0
"""A mean's length is remembered as at most max(times, GROWTH) times the median length."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The effect of the limit on a mean. `factor`: for the mean's elements; `lengths`: the new state tensor; `norm`:
    the mean's length, infinite or NaN if it is beyond fp32."""

    factor: float
    lengths: Tensor
    norm: float

    def of(self, mean: Iterable[Tensor]) -> Iterable[Tensor]:
        """The mean's blocks, each multiplied by the factor."""
        return mean if self.factor == 1 else _scaled(mean, np.float32(self.factor))


def restored(state: Mapping[str, Tensor], times: float, *, forget: bool) -> Mapping[str, Tensor]:
    """A slice's state tensors from a checkpoint, for a run with the limit `times`. Without a limit (0), the lengths are
    removed. With `forget`, or if the checkpoint has no lengths, they are all 0, which means that none is known."""
    if not times:
        return {name: values for name, values in state.items() if name != LENGTHS} if LENGTHS in state else state
    if LENGTHS in state and not forget:
        return state
    return {**state, LENGTHS: torch.zeros(LENGTHS_MAX, device="cpu")}


@unheeded
def cut(mean: Iterable[Tensor], lengths: Tensor, times: float, room: Room) -> Cut:
    """Compute what the limit does to a mean. `mean`: its blocks. `lengths`: the state tensor before this mean. `times`:
    the limit, in multiples of the median length. `room`: memory for the squares, kept by the caller because allocating
    it takes as long as computing them."""
    kept = [length for length in lengths.tolist() if length > 0]
    median = statistics.median(kept) if len(kept) >= LENGTHS_MIN else math.inf
    norm = math.sqrt(square(mean, room))
    factor = float(np.float32(times * median / norm)) if norm > times * median else 1.0
    length = min(norm, max(times, GROWTH) * median)
    if length == 0 or not math.isfinite(length):  # NaN also: then the factor is 1, and the caller refuses the result
        return Cut(factor, lengths, norm)
    newest = torch.tensor([length], dtype=torch.float32, device="cpu")
    return Cut(factor, torch.cat([lengths[1:], newest]), norm)


def _scaled(mean: Iterable[Tensor], factor: np.float32) -> Iterator[Tensor]:
    """Multiply each block by the factor. A block is valid until the next one is drawn."""
    room: Array = np.empty(0, np.float32)
    for block in mean:
        if len(room) < block.numel():
            room = np.empty(block.numel(), np.float32)
        yield torch.from_numpy(np.multiply(block.numpy(), factor, out=room[: block.numel()]))
