"""The digest of a shard's outer state.

Law: replicas with equal digests hold the same bits: θ, every tensor of the outer optimizer's state, and `meta`, the
state that the layer above keeps (counts, tables, revisions). It detects faults, not forgery: xxh3 is fast, not
cryptographic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import xxhash
from torch import Tensor

from p2p_diloco.tensors.flat import Array, blocks, unheeded


class Look:
    """Computes the digest of an outer state, and whether its values are finite, in one pass over its blocks, while each
    block is still in the cache.

    finite: whether all values seen so far are finite.
    """

    def __init__(self) -> None:
        self.finite = True
        self._hashers: dict[str, xxhash.xxh3_128] = {}
        self._lengths: dict[str, int] = {}

    @unheeded
    def __call__(self, name: str, block: Array, *, follows: bool = False) -> None:
        """Add the next block of a tensor. The block must be contiguous, and is read in place. With `follows` the check
        for finite values is skipped, because the block can have infinite or NaN values only if an earlier block had
        them."""
        self.hash(name, block)
        if follows:
            return
        # the sum takes one pass; it isn't finite if a value isn't, or if it is too large itself
        if not math.isfinite(np.add.reduce(block)):
            self.finite &= math.isfinite(block.max()) and math.isfinite(block.min())

    def hash(self, name: str, block: Array) -> None:
        """Add the next block of a tensor, without the check for finite values."""
        if name not in self._hashers:
            self._hashers[name], self._lengths[name] = xxhash.xxh3_128(), 0
        self._lengths[name] += block.nbytes
        self._hashers[name].update(block.data)

    def of(self, name: str) -> str:
        """Return the xxh3-128, 32 hexadecimal digits, of the blocks of a tensor that were added so far."""
        return self._hashers[name].hexdigest()

    def digest(self, meta: bytes) -> str:
        """Return one xxh3-128, 32 hexadecimal digits, over each tensor's name, length and own xxh3-128, in the order of
        names, and over the length and content of `meta`. The lengths make sure that different states give different
        byte streams."""
        whole = xxhash.xxh3_128()
        for name, hasher in sorted(self._hashers.items()):
            whole.update(f"{name}:{self._lengths[name]};".encode() + hasher.digest())
        whole.update(f"meta:{len(meta)};".encode() + meta)
        return whole.hexdigest()


def look(theta: Tensor, state: Mapping[str, Tensor]) -> Look:
    """Compute the digest of a whole outer state, and whether its values are finite, in one pass."""
    seen = Look()
    for name, values in _named(theta, state):
        for (block,) in blocks(values):
            seen(name, block.numpy())
    return seen


def digest(theta: Tensor, state: Mapping[str, Tensor], meta: bytes) -> str:
    """Return the digest of θ, the outer optimizer's state and `meta`."""
    seen = Look()
    for name, values in _named(theta, state):
        seen.hash(name, values.numpy())
    return seen.digest(meta)


def _named(theta: Tensor, state: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [("theta", theta), *((f"state.{name}", values) for name, values in state.items())]
