"""The weighted mean of the contributions to one shard.

Law: the result depends on the contributions alone, not on the order of arrival, the number of threads or the machine.
The order of operations below is the reference; each is rounded to fp32 by itself.

    for peers in the order of their ids, as strings compare:
        rᵢ ← wᵢ / w₀                   weight relative to the first one
        acc ← x₀                       the first
        acc ← acc + (xᵢ · rᵢ)          the others: a product, then a sum, never fused
        total ← total + rᵢ             in fp32, the same order
    mean ← acc / total

Products with rᵢ = 1, the usual case, are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.flat import unheeded
from p2p_diloco.tensors.raw import Buffer

MAGNITUDE_MAX = 2.0**30
"""The largest magnitude in a contribution. A power of two, so that no codec rounds a valid element beyond it."""
WEIGHT_MIN, WEIGHT_MAX = 2.0**-40, 2.0**40
"""Bounds of a contribution's weight. With the limit above, all products and sums stay finite in fp32; the least weight
vanishes beside a weight of 1."""


@unheeded
def weighted_mean(
    contributions: Sequence[tuple[str, float, Buffer]], codec: str, numel: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Mean [numel] of contributions (peer id, weight, encoded pseudo-gradient), in fp32, then rounded to `dtype`.

    Raises ValueError for no contribution, a peer twice, a weight that isn't positive and finite in fp32, or a buffer of
    the wrong length. The caller refuses values that aren't finite (`codec.peak`).
    """
    ordered = sorted(contributions, key=lambda contribution: contribution[0])
    if not ordered or len({peer for peer, _, _ in ordered}) != len(ordered):
        raise ValueError("a mean needs at least one contribution, and no two from one peer")
    parts = [codecs.decode_blocks(buffer, codec, numel) for _, _, buffer in ordered]
    ratios = _beside_the_first([weight for _, weight, _ in ordered])
    total = np.float32(0.0)
    for ratio in ratios:
        total = np.float32(total + ratio)
    if not math.isfinite(total):
        raise ValueError("the sum of the weights is not finite")
    mean = torch.empty(numel, dtype=dtype)
    sums, products = torch.empty(2, min(numel, flats.BLOCK))
    for part, *values in zip(torch.split(mean, flats.BLOCK), *parts, strict=True):
        acc, product = sums.numpy()[: len(part)], products.numpy()[: len(part)]
        summed = values[0].numpy()
        for value, ratio in zip(values[1:], ratios[1:], strict=True):
            term = value.numpy() if ratio == 1 else np.multiply(value.numpy(), ratio, out=product)
            summed = np.add(summed, term, out=acc)
        np.divide(summed, total, out=acc)
        part.copy_(sums[: len(part)])
    return mean


@unheeded
def _beside_the_first(weights: Sequence[float]) -> list[np.float32]:
    """Each weight, rounded to fp32, divided by the first one."""
    rounded = [np.float32(weight) for weight in weights]
    for weight, value in zip(weights, rounded, strict=True):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"a weight must be positive and finite, found {weight}")
    return [value / rounded[0] for value in rounded]
