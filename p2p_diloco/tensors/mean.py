"""The weighted mean of what an averaging group contributes to one shard.

Law: the result depends on who contributed what, and on nothing else: not on who came first, nor on the number
of threads, nor on the machine. The order of operations below is the reference; each is rounded to fp32 by
itself.

    for peers in the order of their ids, as strings compare:
        rᵢ ← wᵢ / w₀                   each weight beside the first
        acc ← x₀                       the first
        acc ← acc + (xᵢ · rᵢ)          each other: a product, then a sum, never fused
        total ← total + rᵢ             in fp32, the same order
    mean ← acc / total

Weights that are equal, as they are as a rule, so multiply by 1: that is left out.
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
"""The largest element of a contribution. A power of two, so that no codec rounds what is within over it."""
WEIGHT_MIN, WEIGHT_MAX = 2.0**-40, 2.0**40
"""What a contribution may weigh. With the limit above, any product and any sum of them stays finite in fp32;
beside a weight of 1 the least one vanishes."""


@unheeded
def weighted_mean(
    contributions: Sequence[tuple[str, float, Buffer]], codec: str, numel: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Mean [numel], in fp32 and then rounded to `dtype`, of contributions (peer id, weight, encoded pseudo-gradient).

    Raises ValueError for no contribution, a peer twice, a weight that isn't positive and finite in fp32, or a
    buffer of another length. Values that aren't finite are the caller's to refuse (`codec.finite`).
    """
    ordered = sorted(contributions, key=lambda contribution: contribution[0])
    if not ordered or len({peer for peer, _, _ in ordered}) != len(ordered):
        raise ValueError("a mean needs one contribution or more, and one of each peer")
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
    """Each weight, as fp32 rounds it, divided by the first."""
    rounded = [np.float32(weight) for weight in weights]
    for weight, value in zip(weights, rounded, strict=True):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"a weight must be positive and finite, found {weight}")
    return [value / rounded[0] for value in rounded]
