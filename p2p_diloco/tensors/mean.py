"""The weighted mean of what an averaging group contributes to one shard.

Law: the result depends on who contributed what, and on nothing else: not on who came first, nor on the number
of threads, nor on the machine. The order of operations below is the reference; each is rounded to fp32 by
itself.

    for peers in the order of their ids, as strings compare:
        acc ← x₀ · w₀                  the first
        acc ← acc + (xᵢ · wᵢ)          each other: a product, then a sum, never fused
        total ← total + wᵢ             in fp32, the same order
    mean ← acc / total
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
    weights = [_fp32(weight) for _, weight, _ in ordered]
    total = np.float32(0.0)
    for weight in weights:
        total = np.float32(total + np.float32(weight))
    if not math.isfinite(total):
        raise ValueError("the sum of the weights is not finite")
    mean = torch.empty(numel, dtype=dtype)
    sums, products = torch.empty(2, min(numel, flats.BLOCK))
    for part, *values in zip(torch.split(mean, flats.BLOCK), *parts, strict=True):
        acc, product = sums.numpy()[: len(part)], products.numpy()[: len(part)]
        np.multiply(values[0].numpy(), weights[0], out=acc)
        for value, weight in zip(values[1:], weights[1:], strict=True):
            np.multiply(value.numpy(), weight, out=product)
            np.add(acc, product, out=acc)
        np.divide(acc, total, out=acc)
        part.copy_(sums[: len(part)])
    return mean


@unheeded
def _fp32(weight: float) -> float:
    """The weight as fp32 rounds it."""
    rounded = float(np.float32(weight))
    if not (math.isfinite(rounded) and rounded > 0):
        raise ValueError(f"a weight must be positive and finite, found {weight}")
    return rounded
