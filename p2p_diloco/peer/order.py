"""In which order the samples of a data set come: a permutation for each epoch, the same on all peers; or a stream's
own order: position k of an epoch is sample k of the stream.

Law: computes with whole numbers only, so all machines agree. Takes no memory that grows with the data set. The
permutation is a Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

A process reads a stream forward, and passes over the samples that other peers or other workers of its DataLoader have.
It begins anew only to go back, for a new epoch, or where the stream can begin at any sample. Which sample is at a
position depends on nothing but the stream, so all peers see the same.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from p2p_diloco.errors import UsageError

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


# -- streams

log = logging.getLogger("p2p_diloco")

END = object()
ANEW = "give an object whose `__iter__` begins anew each time, or the function that makes the iterator"


class Stream(Ordered):
    """The samples of a stream by position. Positions behind the stream's end hold no sample."""

    fingerprint = ""

    def __init__(self, source: Any, length: int, name: str) -> None:
        """`source`: an iterable, or a function that returns one. If the function needs an argument, it is the number of
        the sample with which to begin. `length`: how many samples of the stream an epoch has."""
        self._source, self._length, self._name = source, length, name
        self._seeks = _takes_a_start(source)
        self._samples: Iterator[Any] = iter(())
        self._owner = 0  # the process that reads `_samples`; 0: nobody can
        self._epoch = self._next = 0  # where `_samples` is
        self._most = 0  # this many samples of the epoch were there
        self._begin_s = self._pass_s = 0.0  # how long it took to begin, and to pass over a sample
        self._told = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Stream, (self._source, self._length, self._name)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: Any) -> Any:
        for sample in self.__getitems__([position]):
            return sample
        raise IndexError(position)

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """The samples at these positions, without those behind the stream's end. A DataLoader calls this for a batch.

        Raises:
            UsageError: the stream can't be read again.
        """
        try:
            return [sample for position in positions for sample in self._at(*divmod(position, self._length))]
        except BaseException:
            self._owner = 0  # a generator that has raised an error looks as if it had ended
            raise

    def order(self, seed: str, positions: Numbers) -> Numbers:
        """A stream comes in its own order: any other one would have to begin anew for each sample."""
        return positions

    def _at(self, epoch: int, index: int) -> list[Any]:
        began = time.monotonic()
        if begins := self._must_begin(epoch, index):
            self._begin(epoch, index)
        passed = index - self._next
        for _ in islice(self._samples, passed):
            self._next += 1
        sample = next(self._samples, END)
        took_s = time.monotonic() - began
        if sample is END:
            self._ends()
            return []
        if begins:
            self._begin_s = took_s
        elif passed:
            self._pass_s = took_s / (passed + 1)
        self._next = index + 1
        self._most = max(self._most, self._next)
        if self._next == self._length and not self._told:
            self._look_behind()
        return [sample]

    def _must_begin(self, epoch: int, index: int) -> bool:
        """Whether to begin anew: `_samples` was read in the process that forked this one, or is too far; or to begin
        there is faster than to pass over what lies between."""
        if self._owner != os.getpid() or epoch != self._epoch or index < self._next:
            return True
        return self._seeks and (index - self._next) * self._pass_s > self._begin_s

    def _begin(self, epoch: int, index: int) -> None:
        # A stream that knows in which worker of a DataLoader it is would give this worker a part, or another order.
        torch.utils.data._utils.worker._worker_info = None
        if epoch != self._epoch:
            self._epoch, self._most = epoch, 0
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        if index and not self._seeks:  # this may take long, and training stands still meanwhile
            log.info("the stream %r is read from its beginning to sample %d", self._name, index)
        self._next = index if self._seeks else 0
        self._samples, self._owner = _begun(self._source, self._next, seeks=self._seeks), os.getpid()

    def _ends(self) -> None:
        if self._next < max(1, self._most):
            what = (
                f"ends before sample {self._next} in this pass: it is empty, or can't be read again in the same order"
            )
            raise UsageError(what, key="dataset", value=self._name, mend=ANEW)
        if not self._told:
            text = "the stream %r has no sample %d, though length=%d: what lies behind counts as used and holds nothing"
            log.warning(text, self._name, self._next, self._length)
        self._told = True

    def _look_behind(self) -> None:
        if next(self._samples, END) is not END:
            log.warning("the stream %r goes on after length=%d: the rest is not used", self._name, self._length)
            self._told = True


class Collated:
    """A collate function that returns None for no samples: all positions of the batch lie behind the stream's end."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(samples) if samples else None


def stream(dataset: Any, length: int | None, name: str) -> Stream:
    """Make a stream of what is no sequence.

    Raises:
        UsageError: `dataset` is no stream, can't be read again, or has no length and none is given.
    """
    if isinstance(dataset, DataLoader) or not (isinstance(dataset, Iterable) or callable(dataset)):
        mend = "give a data set with a length and samples by number, the number of samples, or a stream"
        raise UsageError("is no data set", key="dataset", value=type(dataset).__name__, mend=mend)
    seeks = _takes_a_start(dataset)
    if _begun(dataset, 0, seeks=seeks) is _begun(dataset, 0, seeks=seeks):
        mend = f"{ANEW}: a peer must read again what another one has left"
        raise UsageError("can be read only once", key="dataset", value=type(dataset).__name__, mend=mend)
    if length is None and not hasattr(dataset, "__len__"):
        mend = "give length, the number of samples that an epoch has"
        raise UsageError("is a stream without a length", key="dataset", value=type(dataset).__name__, mend=mend)
    return Stream(dataset, len(dataset) if length is None else length, name)


def _takes_a_start(source: Any) -> bool:
    if isinstance(source, Iterable) or not callable(source):
        return False
    return any(one.default is one.empty for one in inspect.signature(source).parameters.values())


def _begun(source: Any, index: int, *, seeks: bool) -> Iterator[Any]:
    """An iterator over the stream; from sample `index` on, if the stream `seeks`."""
    if isinstance(source, Iterable):
        return iter(source)
    return iter(source(index) if seeks else source())
