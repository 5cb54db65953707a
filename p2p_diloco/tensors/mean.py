"""The weighted mean of the contributions to one slice, with limits on what each of them can do to it.

Law: the result depends on the contributions alone, not on the order of arrival, the number of threads or the machine.
The order of operations below is the reference; each is rounded to fp32 by itself.

    for peers in the order of their ids, as strings compare:
        rᵢ ← wᵢ / w₀                   weight relative to the first one
        cᵢ ← rᵢ · fᵢ                   fᵢ is 1, or less if a limit applies (`limits`)
        acc ← x₀ · c₀                  the first
        acc ← acc + (xᵢ · cᵢ)          the others: a product, then a sum, never fused
        total ← total + rᵢ             in fp32, the same order
    mean ← acc / total

Products with cᵢ = 1 are skipped.

Unless the aggregation is "mean", the contributions of peers that have trained nothing, which have the weight
`WEIGHT_MIN`, are left out if there is any other contribution. If three or more remain, their weights are bounded
(`limits.bounded`), and they get the factors of `limits`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from p2p_diloco.core.leases import WEIGHT_MIN as WEIGHT_MIN
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors import limits
from p2p_diloco.tensors.flat import ALONE, Buffer, Threads, unheeded
from p2p_diloco.tensors.limits import Aggregation

MAGNITUDE_MAX = 2.0**30
"""The largest magnitude in a contribution. A power of two, so that no codec rounds a valid element beyond it."""
WEIGHT_MAX = 2.0**40
"""The greatest weight of a contribution; the least one is `WEIGHT_MIN`. With these and MAGNITUDE_MAX, all products and
sums stay finite in fp32; a contribution of the least weight has no effect beside one of weight 1."""

Given = tuple[str, float, Buffer]
"""A contribution: peer id, weight, encoded pseudo-gradient."""


@unheeded
def weighted_mean(
    contributions: Sequence[Given],
    codec: str,
    numel: int,
    dtype: torch.dtype = torch.float32,
    aggregation: Aggregation = "mean",
    threads: Threads = ALONE,
) -> Tensor:
    """Mean [numel] of contributions in fp32, then rounded to `dtype`; `threads` compute it.

    Raises ValueError for no contribution, a peer twice, a weight that isn't positive and finite in fp32, or a buffer of
    the wrong length. The caller refuses values that aren't finite (`codec.peak`).
    """
    ordered, factors = weighed(contributions, aggregation), None
    if aggregation != "mean" and len(ordered) >= limits.MEMBERS_MIN:
        weights = [weight for _, weight, _ in ordered]
        factors = limits.factors(aggregation, _decoded(ordered, codec, numel), weights)
    return _mean(ordered, factors, codec, numel, dtype, threads)


def weighed(contributions: Sequence[Given], aggregation: Aggregation) -> list[Given]:
    """Return the contributions that are averaged, in the order of the peers' ids, with the weights that count. Raises
    ValueError as `weighted_mean` does."""
    ordered = sorted(contributions, key=lambda contribution: contribution[0])
    if not ordered or len({peer for peer, _, _ in ordered}) != len(ordered):
        raise ValueError("a mean needs at least one contribution, and no two from one peer")
    for _, weight, _ in ordered:
        if not (math.isfinite(rounded := np.float32(weight)) and rounded > 0):
            raise ValueError(f"a weight must be positive and finite, found {weight}")
    if aggregation == "mean":
        return ordered
    ordered = [given for given in ordered if given[1] > WEIGHT_MIN] or ordered
    if len(ordered) < limits.MEMBERS_MIN:
        return ordered
    weights = limits.bounded([weight for _, weight, _ in ordered])
    return [(peer, weight, buffer) for (peer, _, buffer), weight in zip(ordered, weights, strict=True)]


def _mean(
    ordered: Sequence[Given],
    factors: Sequence[float] | None,
    codec: str,
    numel: int,
    dtype: torch.dtype,
    threads: Threads,
) -> Tensor:
    """The mean of contributions in this order, each multiplied by its factor; `factors` None: all are 1."""
    first = np.float32(ordered[0][1])
    ratios = [np.float32(weight) / first for _, weight, _ in ordered]
    counted = ratios if factors is None else [r * np.float32(f) for r, f in zip(ratios, factors, strict=True)]
    total = np.float32(0.0)
    for ratio in ratios:
        total = np.float32(total + ratio)
    if not math.isfinite(total):
        raise ValueError("the sum of the weights is not finite")
    mean = torch.empty(numel, dtype=dtype, device="cpu")
    if threads.count == 1 or not codecs.is_cast(codec):
        _average(_decoded(ordered, codec, numel), counted, total, mean)
        return mean

    def average(place: slice) -> None:
        parts = [(peer, weight, codecs.part(buffer, codec, place)) for peer, weight, buffer in ordered]
        _average(_decoded(parts, codec, place.stop - place.start), counted, total, mean[place])

    threads.over(numel, average)
    return mean


@unheeded
def _average(
    decoded: Sequence[Iterator[Tensor]], ratios: Sequence[np.float32], total: np.float32, mean: Tensor
) -> None:
    """Write the sum of the contributions, each multiplied by its ratio, over `total` into `mean`."""
    # dividing by a power of two and multiplying by its inverse round the same, and the second takes half the time
    halves, inverse = math.frexp(total)[0] == 0.5, np.float32(1.0) / total
    sums, products = torch.empty(2, min(mean.numel(), flats.BLOCK), device="cpu")
    for part, *values in zip(torch.split(mean, flats.BLOCK), *decoded, strict=True):
        acc, product = sums.numpy()[: len(part)], products.numpy()[: len(part)]
        summed = _times(values[0], ratios[0], acc)
        for value, ratio in zip(values[1:], ratios[1:], strict=True):
            summed = np.add(summed, _times(value, ratio, product), out=acc)
        if halves:
            np.multiply(summed, inverse, out=acc)
        else:
            np.divide(summed, total, out=acc)
        part.copy_(sums[: len(part)])


def _times(values: Tensor, ratio: np.float32, out: flats.Array) -> flats.Array:
    """The product, in `out`; the values themselves if the ratio is 1."""
    return values.numpy() if ratio == 1 else np.multiply(values.numpy(), ratio, out=out)


def _decoded(ordered: Sequence[Given], codec: str, numel: int) -> list[Iterator[Tensor]]:
    return [codecs.decode_blocks(buffer, codec, numel) for _, _, buffer in ordered]
