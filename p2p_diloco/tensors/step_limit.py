"""A limit on the length of a commit's mean, so that one wrong commit can't take a slice far away.

Law: pure functions of the mean and of the slice's lengths: the lengths of its last means, a part of the outer state
that all replicas share. `limits.square` gives the order of a sum; all that follows is in fp64, by single operations,
and fp32 only where the formula says so. So all replicas get the same bits.

    n ← ‖ḡ‖                        the L2 norm of the mean, as it is decoded
    M ← median(lengths)            if there are LENGTHS_MIN or more; else ∞
    f ← min(1, times · M / n)      rounded to fp32 at the end
    ḡ ← f · ḡ                      skipped for f = 1
    lengths ← the last LENGTHS_MAX of (lengths, min(n, max(times, GROWTH) · M))    rounded to fp32

A length is remembered as it was before the cut, up to max(times, GROWTH) times the median. So if honest means become
longer, the median rises once they are the majority; a few wrong means can't raise it.

A mean of length 0, to which no peer has contributed progress, is neither cut nor remembered: it says nothing of the
length of a step. Squares of elements above 1.8·10¹⁹ exceed fp32: then n = ∞ and f = 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from p2p_diloco.tensors.flat import Array, unheeded
from p2p_diloco.tensors.limits import Room, square

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


def state_lengths(outer: Mapping[str, int], times: float) -> dict[str, int]:
    """The number of elements of each state tensor of a slice, by name, in the order of storage: those of the outer
    optimizer (`outer`), then the lengths, if there is a limit (`times` above 0)."""
    return {**outer, LENGTHS: LENGTHS_MAX} if times else dict(outer)


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
