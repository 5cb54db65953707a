"""How a trainer without data gets more, against a run that brings what the test says: it ends when nothing will come,
and each shard of a trainer knows all of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2p_diloco.config import RunConfig
from p2p_diloco.core import leases
from p2p_diloco.core.leases import DataSet, Lease, Table, Tables
from p2p_diloco.errors import ConfigError
from p2p_diloco.peer import refill
from p2p_diloco.peer.hook import Hook
from p2p_diloco.peer.refill import Refill, open_shard
from p2p_diloco.peer.shard import Shard, Supply, data_set

DATA = DataSet("train", 10, 1)
CLOCK = SimpleNamespace(now=0.0)


class Run:
    """A run that answers each exchange with the next of `answers`; the last one again and again."""

    def __init__(self, *answers: Table) -> None:
        self.answers = answers
        self.exchanges, self.reports = 0, list[str]()
        self.done, self.waits = list[str](), list[float]()
        self.supply, self.over, self.epoch, self.commits, self.is_due = Supply(0.0), False, 1, 1, False
        refill: Any = Refill(self, self, RunConfig(), 1)  # type: ignore[arg-type]
        self.shard = Shard(DATA, data_set(10, "train", 1, "")[1], "run/train", refill)
        self.supply.add(self.shard, {"me": "a", "life": 1, "tables": [], "ended": False})

    def exchange_early(self) -> None:
        assert self.exchanges < 20, "it goes on for ever"
        self.done.append("exchange")
        table = self.answers[min(self.exchanges, len(self.answers) - 1)]
        self.shard.hear(table, leases.held(table, "a", 1))
        self.exchanges += 1

    def catch_up(self) -> None:
        self.done.append("catch up")

    def merge(self) -> None:
        self.done.append("merge")

    def tell(self, kind: str, **values: Any) -> None:
        self.done.append(f"{kind} {values}")

    @contextmanager
    def beside(self) -> Iterator[None]:
        began = CLOCK.now
        yield
        self.waits.append(round(CLOCK.now - began))

    def report(self, text: str) -> None:
        self.reports.append(text)


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait takes time."""
    clock = SimpleNamespace(monotonic=lambda: CLOCK.now, sleep=lambda s: setattr(CLOCK, "now", CLOCK.now + s))
    monkeypatch.setattr(refill, "time", clock)


def held_by(peer: str) -> Table:
    """The answer that a peer holds all of the data."""
    return Table(DATA, 10, (Lease(peer, 1, 0, 10, 1),))


def test_a_loop_ends_if_nothing_will_come() -> None:
    # A loop ends if only its own batches are left. Its step is what the others wait for, so it does not wait for
    # them.
    run = Run(held_by("a"))
    assert [batch.tolist() for batch in run.shard.loader(10)] == [run.shard.indices(((0, 10),))]
    assert not run.shard.complete

    # A wait for other peers is reported. While others hold what is left, the wait has a reason; it ends with the
    # data.
    run = Run(held_by("b"), held_by("b"), Table(DATA, 10))
    assert not list(run.shard.loader(10))
    assert run.shard.complete
    assert run.reports
    assert "other peers hold all samples that are not used yet" in run.reports[-1]


def test_it_catches_up_asks_the_others_once_and_waits_ever_longer() -> None:
    # A newcomer has missed what the others did meanwhile, and asks them once to exchange now.
    run = Run(Table(DATA, 10, (Lease("a", 1, 0, 10, 1),)))
    next(iter(run.shard.loader(10)))
    assert run.done == ["catch up", "nudge {'goal': 2}", "catch up", "exchange"]

    # Where exchanges bring nothing each wait is twice as long, up to heartbeat_timeout, and ends with a merge.
    run = Run(*[held_by("b")] * 8, Table(DATA, 10))
    assert not list(run.shard.loader(10))
    assert run.waits == [1, 2, 4, 8, 10, 10, 10]
    assert [one for one in run.done if one.startswith("nudge")] == ["nudge {'goal': 2}"]
    assert run.done.count("merge") == len(run.waits) + 1

    # A newer state ends a wait at once.
    run = Run(*[held_by("b")] * 8, Table(DATA, 10))
    run.is_due = True
    assert not list(run.shard.loader(10))
    assert set(run.waits) == {0}


class Opened:
    """A session whose node knows these data sets, and answers as the run's tables say."""

    def __init__(self) -> None:
        self.hook = Hook.__new__(Hook)
        self.hook.supply = Supply(0.0)
        self.tables: Tables = ()
        self.config, self.plan = RunConfig(), SimpleNamespace(fragments=((0,),))
        self.node = SimpleNamespace(client=self)

    def ask(self, kind: str, answer: str) -> dict[str, Any]:
        return {"me": "a", "life": 1, "tables": msgspec.to_builtins(self.tables), "ended": False}

    def open(self, samples: int, name: str = "train") -> Shard:
        return open_shard(self, *data_set(samples, name, 1, ""), "run")  # type: ignore[arg-type]


def test_a_data_set_is_opened_once_and_as_the_run_has_it() -> None:
    # The second call gives the same shard. A new one would not know of the steps that the node has not heard of,
    # and their samples would come again.
    session = Opened()
    assert session.open(10) is session.open(10)
    with pytest.raises(ConfigError, match="other values"):
        session.open(11)

    # A fifth data set is refused. No commit would ever give samples of it.
    session = Opened()
    for name in "abcd":
        session.open(10, name)
    with pytest.raises(ConfigError, match="one data set too many"):
        session.open(10, "e")

    # A mistake can be mended. A data set that differs from the run's is refused, and then the right one is taken.
    session = Opened()
    session.tables = (Table(DATA),)
    with pytest.raises(ConfigError, match="length"):
        session.open(11)
    assert session.open(10).data.length == 10
