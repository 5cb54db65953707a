"""The order of a shared data set: each epoch a permutation of its own, the same on every machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.peer import order as module
from p2p_diloco.peer.absent import AbsentPeer
from p2p_diloco.peer.order import Stream, indices, stream
from p2p_diloco.peer.shard import data_set
from tests.peer.test_shard import Run


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    """Every sample comes once in each epoch, also when the positions are asked for in pieces. Another epoch, run or
    data set has another order. A run may be continued by a later version on another machine, so orders never change."""
    for length in (1, 2, 3, 7, 64, 1000, 100_003):
        for epoch in (0, 5):
            positions = np.arange(epoch * length, (epoch + 1) * length, dtype=np.int64)
            whole = indices("run/train", length, positions)
            assert sorted(whole.tolist()) == list(range(length))
            pieces = [indices("run/train", length, part) for part in np.split(positions, [length // 3])]
            assert np.concatenate(pieces).tolist() == whole.tolist()
    first = np.arange(1000, dtype=np.int64)
    drawn = [("run/train", first), ("run/train", first + 1000), ("other/train", first), ("run/valid", first)]
    assert len({tuple(indices(seed, 1000, positions).tolist()) for seed, positions in drawn}) == 4
    positions = np.array([0, 1, 2, 9, 10, 10**12], dtype=np.int64)
    assert indices("run/train", 10, positions).tolist() == [3, 7, 5, 1, 4, 3]


# -- stream


class Counting(IterableDataset[int]):
    """`size` numbers, which rise by 1000 with the epoch. A worker of a DataLoader would get a part of them, as from
    many data sets. Counts the passes and the samples that were read."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.passes, self.read = size, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        worker = get_worker_info()
        for number in range(self.size)[slice(None) if worker is None else slice(worker.id, None, worker.num_workers)]:
            self.read += 1
            yield 1000 * self.epoch + number


class Once:
    """A stream whose passes all go on where the last one was."""

    def __init__(self) -> None:
        self.numbers = iter(range(10))

    def __iter__(self) -> Iterator[int]:
        return self.numbers


def numbers(start: int) -> Iterator[int]:
    """A stream that can begin anywhere."""
    yield from range(start, 100)


def read(source: Any, positions: list[int], length: int = 10) -> list[Any]:
    return Stream(source, length, "train").__getitems__(positions)


def alone(source: Any, size: int, workers: int = 0, **of: Any) -> list[int]:
    """What a peer outside of a run trains on."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    shard, seen = AbsentPeer(None, optimizer).shard(source, **of), list[int]()
    for batch in shard.loader(size, num_workers=workers):
        seen += batch.tolist()
        optimizer.step()
    assert shard.complete
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_comes_once_an_epoch_in_the_streams_order(workers: int) -> None:
    """Also from workers, which would else read a part of the stream each, and behind its end."""
    whole = [*range(100), *range(1000, 1100)]
    assert alone(Counting(100), 7, workers, epochs=2, length=100) == whole
    assert alone(Counting(100), 7, workers, epochs=2, length=150) == whole
    assert alone(Counting(100), 7, epochs=1, length=40) == whole[:40]


def own_process() -> Iterator[int]:
    mine = os.getpid()
    for _ in range(10):
        yield mine


def test_a_worker_begins_anew() -> None:
    """It would share the open files of the process that forked it."""
    one = Stream(own_process, 10, "train")
    assert one[0] == os.getpid()
    assert [*DataLoader(one, batch_size=None, sampler=[1], num_workers=1)] != [os.getpid()]


def test_a_stream_that_begins_anywhere_does_so_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """To begin takes as long as 20 samples here."""
    clock, begun = SimpleNamespace(now=0.0), list[int]()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def costly(start: int) -> Iterator[int]:
        begun.append(start)
        clock.now += 20.0
        for number in range(start, 1000):
            clock.now += 1.0
            yield number

    one = Stream(costly, 1000, "train")
    assert one.__getitems__([30, 32, 45, 90, 91, 40]) == [30, 32, 45, 90, 91, 40]
    assert begun == [30, 90, 40]


def test_an_early_end_and_a_late_one_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Positions behind the end hold nothing; what is behind the length is not used."""
    with caplog.at_level(logging.WARNING):
        assert read(Counting(7), [5, 6, 7, 8, 9, 13, 17, 18], 10) == [5, 6, 1003]
    assert caplog.messages == [
        "the stream 'train' has no sample 7, though length=10: what lies behind counts as used and holds nothing"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert read(Counting(12), [8, 9, 18, 19], 10) == [8, 9, 1008, 1009]
    assert caplog.messages == ["the stream 'train' goes on after length=10: the rest is not used"]
    assert Stream(Counting(7), 10, "train")[6] == 6
    with pytest.raises(IndexError):
        Stream(Counting(7), 10, "train")[7]


def test_passes_of_a_stream_must_agree() -> None:
    # A stream that raises has not ended. The generator is over, and the samples are not: they are read again.
    faults = [True]

    def faulty() -> Iterator[int]:
        for number in range(10):
            if number == 4 and faults and faults.pop():
                raise OSError("the network is away")
            yield number

    one = Stream(faulty, 10, "train")
    with pytest.raises(OSError, match="away"):
        one.__getitems__([4])
    assert one.__getitems__([4, 5]) == [4, 5]

    # A second pass that has less is an error. Else all that is left would count as used without a word. Once a
    # pass had a sample, each later pass of the epoch must have it, and each epoch needs one. Epochs may be of
    # different lengths.
    source = Counting(8)
    one = Stream(source, 10, "train")
    assert one.__getitems__([7]) == [7]
    source.size = 5
    assert one.__getitems__([14, 15]) == [1004]
    rest = iter(range(10))
    one = Stream(lambda: (number for number in rest), 10, "train")
    assert one.__getitems__([8]) == [8]
    with pytest.raises(UsageError, match="dataset=train ends before sample 1 in this pass"):
        one.__getitems__([4])
    with pytest.raises(UsageError, match="ends before sample 0 in this pass"):
        one.__getitems__([10])


@pytest.mark.parametrize("source", [iter(range(10)), (n for n in range(10)), Once(), Once().__iter__])
def test_what_can_be_read_only_once_is_refused(source: Any) -> None:
    """A peer must be able to read what another one has left. No sample of it is taken."""
    with pytest.raises(UsageError, match="can be read only once; give an object whose `__iter__` begins anew"):
        data_set(source, "train", 1, "", 10)
    if isinstance(source, Iterator):
        assert len([*source]) == 10


@pytest.mark.parametrize(
    ("key", "source", "length"),
    [
        ("dataset=Counting is a stream without a length; give length", Counting(9), None),
        ("dataset=DataLoader is no data set", DataLoader(range(9)), None),  # type: ignore[arg-type]
        ("dataset=NoneType is no data set", None, 9),
        ("length=0", Counting(9), 0),
        ("length=1.5", Counting(9), 1.5),
        ("length=9 can be given for a stream only", range(9), 9),
    ],
)
def test_a_wrong_stream_is_named(key: str, source: Any, length: Any) -> None:
    """In one sentence, before the run hears of it."""
    with pytest.raises((ConfigError, UsageError), match=key):
        data_set(source, "train", 1, "", length)


def run_of(source: Any, each: int) -> Run:
    """A run that shares a stream of 100 samples, twice."""
    run = Run(each=each)
    run.shard.dataset = stream(source, 100, "train")
    return run


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_loop_that_is_left_comes_back_to_what_it_left(workers: int, ahead: int) -> None:
    """Samples that were read and not delivered, or not used, come again."""
    run, seen = run_of(Counting(80), 30), list[int]()
    while not run.shard.complete:
        loader = run.shard.loader(4, num_workers=workers, ahead=ahead)
        batches, held = iter(loader), list[Any]()
        for batch in batches:
            held.append(batch)
            if len(held) > ahead:
                seen += held.pop(0).tolist()
                run.shard.stepped()
                if len(seen) % 48 == 0:
                    break
        else:
            seen += [number for batch in held for number in batch.tolist()]
            run.shard.stepped()
    assert sorted(seen) == [*range(80), *range(1000, 1080)]
