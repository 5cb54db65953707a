"""The positions of a trainer's data follow its progress, and what it may train on follows the tables of the state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from p2p_diloco.core.leases import DataSet, Lease, Table, Tables
from p2p_diloco.core.spans import Spans
from p2p_diloco.errors import ConfigError
from p2p_diloco.peer.progress import Blend
from p2p_diloco.peer.shard import Shard, data_set
from p2p_diloco.peer.supply import Supply

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
