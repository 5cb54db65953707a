"""One hash over all of a shard's outer state.

Law: two replicas whose digests are equal hold the same bits: θ, every tensor of the outer optimizer's state,
and whatever the layer above counts as state (`meta`: counts, tables, revisions). It guards against faults,
not against forgers: xxh3 is fast, not cryptographic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import xxhash
from torch import Tensor

from p2p_diloco.tensors.flat import Array, blocks


class Look:
    """What there is to know of an outer state, from one look at each block of it: most of all while it is in a cache.

    finite: whether all values seen so far are.
    """

    def __init__(self) -> None:
        self.finite = True
        self._hashers: dict[str, xxhash.xxh3_128] = {}
        self._lengths: dict[str, int] = {}

    def __call__(self, name: str, block: Array, *, follows: bool = False) -> None:
        """The next block of a tensor: contiguous, and read in place. `follows`: were any of its values not finite, one
        that was shown before would not be either."""
        self.hash(name, block)
        if block.size and not follows:
            self.finite &= math.isfinite(block.max()) and math.isfinite(block.min())

    def hash(self, name: str, block: Array) -> None:
        """The same without a look at whether it is finite."""
        if name not in self._hashers:
            self._hashers[name], self._lengths[name] = xxhash.xxh3_128(), 0
        self._lengths[name] += block.nbytes
        self._hashers[name].update(block.data)

    def of(self, name: str) -> str:
        """The xxh3-128 of a tensor as far as it was shown, 32 hexadecimal digits."""
        return self._hashers[name].hexdigest()

    def digest(self, meta: bytes) -> str:
        """xxh3-128, 32 hexadecimal digits: of each tensor's name, length and own xxh3-128, in the order of names, then
        of `meta` and its length, so that different states give different streams of bytes."""
        whole = xxhash.xxh3_128()
        for name, hasher in sorted(self._hashers.items()):
            whole.update(f"{name}:{self._lengths[name]};".encode() + hasher.digest())
        whole.update(f"meta:{len(meta)};".encode() + meta)
        return whole.hexdigest()


def look(theta: Tensor, state: Mapping[str, Tensor]) -> Look:
    """A look at all of an outer state."""
    seen = Look()
    for name, values in _named(theta, state):
        for (block,) in blocks(values):
            seen(name, block.numpy())
    return seen


def digest(theta: Tensor, state: Mapping[str, Tensor], meta: bytes) -> str:
    """The digest of θ, the outer optimizer's state and `meta`."""
    seen = Look()
    for name, values in _named(theta, state):
        seen.hash(name, values.numpy())
    return seen.digest(meta)


def _named(theta: Tensor, state: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [("theta", theta), *((f"state.{name}", values) for name, values in state.items())]
