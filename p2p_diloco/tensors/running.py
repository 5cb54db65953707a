"""The outer step of buffers, such as BatchNorm's running statistics: of the kinds "mean" and "greatest".

Law: pure functions of the values that the peers sent; each operation is element-wise, in fp64, and rounded by itself,
and the result is rounded to fp32 once. So all replicas get the same bits, equal values stay as they are, and no result
is outside of the values that it is made from: a variance never becomes negative.

A contribution to buffers has the values themselves (xᵢ, fp32), because the last values replace the ones before. They
have no gradient: there is no momentum, no clipping, and no limit of the step.

    mean         x ← Σ wᵢ·xᵢ / Σ wᵢ, in the order of the peers' ids        θ' ← (1 − s)·θ + s·x
    greatest     x ← max xᵢ                                                θ' ← max(θ, x)

s is 1 in the synchronous mode, and then θ' is x. In the asynchronous mode a commit counts k submissions of n peers that
train, and s = k/n: one submission moves the statistics by one peer's share. wᵢ are the weights of `mean.weighed`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.layout import MEAN, Kind
from p2p_diloco.tensors.limits import Aggregation
from p2p_diloco.tensors.mean import Given, weighed

CODEC = "fp32"
"""The codec of buffers, in both directions."""


def together(kind: Kind, contributions: Sequence[Given], numel: int, aggregation: Aggregation) -> Tensor:
    """Return x [numel] fp32 of these contributions. Raises ValueError as `mean.weighted_mean` does."""
    ordered = weighed(contributions, aggregation)
    values = [codecs.decode(buffer, CODEC, numel).numpy() for _, _, buffer in ordered]
    if kind != MEAN:
        return torch.from_numpy(np.maximum.reduce(values))
    total, sums = np.float64(0.0), np.zeros(numel, np.float64)
    for (_, weight, _), one in zip(ordered, values, strict=True):
        total = total + np.float64(weight)
        np.add(sums, np.multiply(one, np.float64(weight), dtype=np.float64), out=sums)
    return torch.from_numpy(np.divide(sums, total).astype(np.float32))


def stepped(kind: Kind, theta: Tensor, values: Tensor, share: float) -> Tensor:
    """Return θ' [numel] fp32 for θ, x (`values`) and s (`share`). The inputs stay unchanged."""
    if share >= 1:
        return values.clone()
    if kind != MEAN:
        return torch.maximum(theta, values)
    kept = np.multiply(theta.numpy(), np.float64(1 - share), dtype=np.float64)
    moved = np.multiply(values.numpy(), np.float64(share), dtype=np.float64)
    return torch.from_numpy(np.add(kept, moved).astype(np.float32))
