"""In which order the samples of a data set come: a permutation for each epoch, the same on all peers.

Law: computes with whole numbers only, so all machines agree. Takes no memory that grows with the data set. The
permutation is a Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Bits = NDArray[np.uint64]
ROUNDS = 6


class Ordered(Sequence[Any]):
    """A data set that is told ahead which samples come next, and may choose an order of its own."""

    fingerprint: str
    """Equal for two data sets if their samples are equal."""

    def order(self, seed: str, positions: Numbers) -> Numbers:
        """The numbers of the samples at these positions, [n]. Each epoch has an order of its own, which follows from
        `seed` and the epoch."""
        return indices(seed, len(self), positions)

    def soon(self, seed: str, positions: Numbers) -> None:
        """Called with the positions that come next, in this order, whenever they may have changed."""


def indices(seed: str, length: int, positions: Numbers) -> Numbers:
    """Return the numbers of the samples at these positions, [n], each below `length`. `seed`: names the run and the
    data set."""
    epochs, within = np.divmod(positions, length)
    found = np.empty_like(within)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        found[here] = _permuted(_keys(seed, int(epoch)), length, within[here])
    return found


def _keys(seed: str, epoch: int) -> list[np.uint64]:
    drawn = blake2b(f"{seed}\0{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return [np.uint64(int.from_bytes(drawn[8 * i : 8 * i + 8], "little")) for i in range(ROUNDS)]


def _permuted(keys: list[np.uint64], length: int, values: Numbers) -> Numbers:
    half = max(1, ((length - 1).bit_length() + 1) // 2)  # the network permutes 2^(2·half) values, fewer than 4·length
    found = values.astype(np.uint64)
    beyond = np.ones(len(found), dtype=bool)
    while beyond.any():
        found[beyond] = _network(keys, half, found[beyond])
        beyond = found >= np.uint64(length)
    return found.astype(np.int64)


def _network(keys: list[np.uint64], half: int, values: Bits) -> Bits:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    joined: Bits = (left << bits) | right
    return joined


def _mixed(values: Bits) -> Bits:
    """The finisher of splitmix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Bits = values ^ (values >> np.uint64(31))
    return mixed
