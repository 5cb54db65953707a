"""A peer's part of a shared data set, against a run that grants what the test says: nothing is trained on twice, and
nothing that was drawn is forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import Dataset

from p2p_diloco.core.leases import DataSet, Lease, Table, Tables
from p2p_diloco.core.spans import Spans, joined, length, minus, union
from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.peer.absent import AbsentPeer
from p2p_diloco.peer.order import Numbers, Ordered
from p2p_diloco.peer.progress import Blend
from p2p_diloco.peer.shard import Shard, Supply, data_set

LENGTH, EPOCHS = 100, 2


class Samples(Dataset[int]):
    """Each sample is its number; one of them can't be read."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if index == self.broken:
            raise RuntimeError("unreadable")
        return index


class Run:
    """A run of this peer alone: it grants `each` positions at a time, and counts all that was trained on."""

    def __init__(self, each: int = 30, broken: int = -1) -> None:
        self.each, self.next = each, 0
        self.leased: Spans = ()
        self.used: Spans = ()
        self.shard = Shard(DataSet("train", LENGTH, EPOCHS), Samples(broken), "run/train", self.refill)

    @property
    def left(self) -> int:
        return LENGTH * EPOCHS - self.next

    def merge(self) -> None:
        spans, _ = self.shard.say(1)
        assert not minus(spans, self.leased), "trained on what it does not hold"
        assert length(union(self.used, spans)) == length(self.used) + length(spans), "trained on it twice"
        self.used, self.leased = union(self.used, spans), minus(self.leased, spans)
        self.tell()

    def tell(self) -> None:
        held = tuple(Lease("a", 1, start, stop, 0) for start, stop in self.leased)
        self.shard.hear(Table(self.shard.data, self.next, held), self.leased)

    def refill(self, shard: Shard) -> bool:
        self.merge()
        if self.shard.complete:
            return False
        if not self.left and self.shard.unstepped:
            self.shard.rest()
            return False
        stop = min(LENGTH * EPOCHS, self.next + self.each)
        self.leased, self.next = union(self.leased, joined([(self.next, stop)])), stop
        self.tell()
        return True


@pytest.mark.parametrize(("workers", "size"), [(0, 1), (2, 7), (0, 32)])
def test_each_sample_comes_once_an_epoch(workers: int, size: int) -> None:
    """The loader ends after all epochs, whatever the batches and the workers."""
    run, seen = Run(), list[int]()
    for batch in run.shard.loader(size, num_workers=workers):
        seen += batch.tolist()
        run.shard.stepped()
    assert sorted(seen) == sorted([*range(LENGTH)] * EPOCHS)
    assert run.shard.complete
    assert run.shard.epoch == EPOCHS


def test_a_loop_loses_and_repeats_nothing() -> None:
    # An unreadable sample is reported and nothing else is lost. The error reaches the loop; what was drawn with
    # the sample stays in the stock.
    run = Run(broken=17)

    def train() -> None:
        for _ in run.shard.loader(10):
            run.shard.stepped()

    with pytest.raises(RuntimeError, match="unreadable"):
        train()
    run.merge()
    run.shard.begin(0)
    assert not minus(run.leased, run.shard.free)

    # A wrapper that fetches ahead. With `ahead=1` the last delivered batch belongs to the next step. A loop that
    # is left gives it back.
    run = Run(each=50)
    loader = run.shard.loader(5, ahead=1)
    batches = iter(loader)
    next(batches), next(batches)
    run.shard.stepped()
    run.merge()
    assert run.used == ((0, 5),)
    assert next(iter(loader)).tolist() == run.shard.indices(((5, 10),))

    # A loop ends before its last step. If no data is left but batches that are in no step yet, the loop ends, so
    # that the step can be made; a second loop without that step is an error.
    run, loops = Run(), 0
    while not run.shard.complete:
        loops += 1
        number = 0
        for number, _ in enumerate(run.shard.loader(7), 1):
            if number % 4 == 0:
                run.shard.stepped()
        if number % 4:
            run.shard.stepped()
    assert loops == 2
    run = Run(each=LENGTH * EPOCHS)
    assert len([*run.shard.loader(20)]) == 10
    with pytest.raises(UsageError, match="in no step"):
        next(iter(run.shard.loader(20)))

    # A newer loop ends an older one. Two loops at a time over one shard would take each other's batches, so the
    # older one is refused.
    run = Run()
    older, newer = iter(run.shard.loader(5)), iter(run.shard.loader(5))
    next(older), next(newer)
    with pytest.raises(UsageError, match="newer loop"):
        next(older)
    assert next(newer).tolist() == run.shard.indices(((10, 15),))


@pytest.mark.parametrize(
    "arguments",
    [
        {"shuffle": True},
        {"in_order": False},
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"batch_size": None},
        {"ahead": -1},
    ],
)
def test_a_wrong_argument_of_the_loader_is_named(arguments: dict[str, Any]) -> None:
    """What would lose samples, or make batches of nothing."""
    with pytest.raises((ConfigError, UsageError), match=next(iter(arguments))):
        Run().shard.loader(**arguments)


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("dataset", (0, "train", None, "")),
        ("dataset", (iter([1]), "train", None, "")),
        ("epochs", (Samples(), "train", 0, "")),
        ("epochs", (Samples(), "train", 1.5, "")),
        ("name", (Samples(), 7, None, "")),
        ("name", (Samples(), "x" * 300, None, "")),
        ("fingerprint", (Samples(), "train", None, 7)),
    ],
)
def test_a_wrong_data_set_is_named(key: str, arguments: tuple[Any, ...]) -> None:
    """What other peers could not read would stop the run without a word."""
    with pytest.raises((ConfigError, UsageError), match=key):
        data_set(*arguments)


class Turned(Ordered):
    """A data set that comes backwards."""

    fingerprint = "abc"

    def __init__(self) -> None:
        self.told: list[list[int]] = []

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: Any) -> Any:
        return index

    def order(self, seed: str, positions: Numbers) -> Numbers:
        return LENGTH - 1 - positions % LENGTH

    def soon(self, seed: str, positions: Numbers) -> None:
        self.told.append(self.order(seed, positions).tolist())


def test_outside_a_run_one_peer_has_all() -> None:
    """A script that `join` didn't start trains on every sample of each epoch, and its loader ends. A data set may
    choose its order, and is told before its samples are read."""
    dataset, seen = Turned(), list[int]()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    peer = AbsentPeer(None, optimizer)
    shard = peer.shard(dataset, epochs=2)
    for batch in shard.loader(7):
        assert {*batch.tolist()} <= {sample for told in dataset.told for sample in told}
        seen += batch.tolist()
        optimizer.step()
    assert seen == 2 * list(range(LENGTH))[::-1]
    assert shard.complete
    assert peer.shard(dataset, epochs=2) is shard
    with pytest.raises(ConfigError, match="name"):
        peer.shard(dataset, epochs=3)
    assert len([*zip(range(50), peer.shard(LENGTH, name="endless").loader(), strict=False)]) == 50


def test_a_data_sets_own_fingerprint_is_what_peers_must_agree_on() -> None:
    dataset = Turned()
    assert data_set(dataset, "train", 1, "")[0].fingerprint == "abc"
    assert data_set(dataset, "train", 1, "other")[0].fingerprint == "other"


# -- supply

DATA = DataSet("train", 100, 1)
LEDGER, OTHER = 0, 1
"""The fragment that has the tables, and another one."""


def table(peer: str = "a", life: int = 7) -> Tables:
    """Of which a peer holds the first 20 positions."""
    return (Table(DATA, 20, (Lease(peer, life, 0, 20, 1),)),)


class Trainer:
    """Holds positions 0 to 20; has sent the first 4 that it trained on, and trained on 4 more."""

    def __init__(self, share: float = 0.5) -> None:
        self.supply = Supply(share)
        refill: Any = lambda shard: False  # noqa: E731
        self.shard = Shard(DATA, data_set(100, "train", 1, "")[1], "run/train", refill)
        told = {"me": "a", "life": 7, "tables": msgspec.to_builtins(table()), "ended": False}
        self.supply.add(self.shard, told)
        self.batches = iter(self.shard.loader(4))
        self.trains()
        assert self.sent() == ((0, 4),)
        self.trains()

    def trains(self) -> None:
        next(self.batches)
        self.supply.stepped()
        assert self.supply.gather(1)
        self.supply.hear(table(), ended=False)

    def sent(self, fragment: int = LEDGER) -> Spans:
        """What a contribution to this fragment says of the positions."""
        (use,) = self.supply.send(fragment)
        assert (use.data, use.wants) == (DATA, 8)
        return use.used


@pytest.mark.parametrize(
    ("blend", "share", "pending"),
    [
        (None, 0.5, ((0, 8),)),
        (Blend.ALL, 0.5, ((0, 8),)),
        (Blend.SINCE, 0.5, ((4, 8),)),
        (Blend.MIX, 0.5, ((4, 8),)),
        (Blend.MIX, 0.0, ()),
        (Blend.SENT, 0.5, ((0, 4),)),
        (Blend.NONE, 0.5, ()),
    ],
)
def test_positions_follow_the_progress(blend: Blend | None, share: float, pending: Spans) -> None:
    """What stays of the progress is sent again; what is left out of it is in the stock again, unless it is used."""
    trainer = Trainer(share)
    trainer.supply.merge(blend)
    trainer.supply.hear(table(), ended=False)
    first = pending[0] if pending else (0, 0)
    assert trainer.shard.stock == tuple(span for span in ((0, first[0]), (first[1], 20)) if span[0] < span[1])
    assert trainer.sent() == pending


@pytest.mark.parametrize(("tables", "conflict"), [(table(), False), (table("b"), True), (table(life=6), True)])
def test_data_that_others_have_got_is_a_conflict(tables: Tables, *, conflict: bool) -> None:
    """No commit would count it: neither what another peer holds, nor what another life of this peer does."""
    trainer = Trainer()
    assert trainer.supply.conflicts(tables) is conflict


def test_another_data_set_of_the_run_is_named() -> None:
    """The run's own values, or the names of the data sets that it has."""
    trainer = Trainer()
    with pytest.raises(ConfigError, match="length"):
        trainer.supply.hear((Table(replace(DATA, length=7)),), ended=False)
    with pytest.raises(ConfigError, match="'a', 'b', 'c', 'd'"):
        trainer.supply.hear(tuple(Table(replace(DATA, name=name)) for name in "abcd"), ended=False)
