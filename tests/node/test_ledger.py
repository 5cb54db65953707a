"""Where time goes: every moment in one part, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

import pytest

from p2p_diloco.node.ledger import OF_EXCHANGE, OF_TRAINING, Ledger, last_round, told
from p2p_diloco.node.status import LastRound
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, entered


class Clock:
    """Seconds, as the test says; and since when training stands still."""

    def __init__(self) -> None:
        self.now, self.stands_since = 100.0, math.inf

    def __call__(self) -> float:
        return self.now

    def ledger(self, order: tuple[str, ...] = OF_EXCHANGE) -> Ledger:
        return Ledger(order, self, lambda: self.stands_since)


def nonzero(seconds: dict[str, float]) -> dict[str, float]:
    return {part: value for part, value in seconds.items() if value}


def test_each_moment_is_in_one_part() -> None:
    # Arithmetic goes before transfer and the rest is waiting. While the node computes and a payload travels, the
    # time is the computing's; while neither does, the group's.
    clock = Clock()
    ledger = clock.ledger()
    clock.now += 1.0
    with ledger.part("transfer"):
        clock.now += 2.0
        with ledger.part("transfer"), ledger.part("codec"):
            clock.now += 4.0
            with ledger.part("outer_step"):
                clock.now += 8.0
        clock.now += 16.0
    clock.now += 32.0
    assert ledger.hidden == {"group": 33.0, "transfer": 18.0, "codec": 4.0, "outer_step": 8.0}
    assert nonzero(ledger.stood) == {}

    # What is before training stands still is hidden. The moment is told by the trainer, and may lie within a part
    # that began before it; each part is cut there.
    clock = Clock()
    ledger = clock.ledger()
    with ledger.part("transfer"):
        clock.now += 3.0
        clock.stands_since = clock.now - 1.0
    clock.now += 5.0
    assert nonzero(ledger.hidden) == {"transfer": 2.0}
    assert nonzero(ledger.stood) == {"transfer": 1.0, "group": 5.0}

    # Each exchange begins anew and a part ends though it fails. What is under way when it begins is counted from
    # there on; an error leaves nothing under way.
    clock = Clock()
    ledger = clock.ledger()
    with contextlib.suppress(ValueError), ledger.part("transfer"):
        clock.now += 3.0
        ledger.begin()
        clock.now += 4.0
        raise ValueError("no")
    clock.now += 1.0
    assert nonzero(ledger.hidden) == {"transfer": 4.0, "group": 1.0}

    # What has come is split and nothing else. What another account knows better of the last wait takes nothing
    # from the waits before it.
    clock = Clock()
    ledger = Ledger(OF_TRAINING, clock)
    for others in ({"codec": 1.0, "group": 2.0}, {"codec": 1.0, "transfer": 5.0}):
        before = ledger.stood["group"]
        with ledger.part("group"):
            clock.now += 3.0
        ledger.split("group", before, others)
    assert nonzero(ledger.stood) == {"group": 2.0, "codec": 2.0, "transfer": 2.0}


@pytest.mark.parametrize("stands", [True, False])
@awaited
async def test_a_node_tells_where_the_time_of_an_exchange_went(stands: bool) -> None:
    """With the release comes what the exchange was made of, in the column of whether training stood still; one that is
    early waits for its group."""
    late_s, network = 0.5, MemoryNetwork(delay_s=0.02)
    early, late = await entered("ab", {**QUICK, "start_peers": 2, "min_peers": 2}, network, sizes=(50_000,))
    if stands:
        early.memory.stands_since = time.monotonic()
    began = time.monotonic()
    exchanging = asyncio.create_task(early.exchange(1.0))
    await until(lambda: early.node.replica.own.flying)  # however long its own merge takes on a busy machine
    await asyncio.sleep(late_s)
    await late.exchange(1.0)
    release = await exchanging
    took_s = time.monotonic() - began
    assert release["sent"]
    column, other = (release["stood"], release["hidden"]) if stands else (release["hidden"], release["stood"])
    assert set(column) == set(OF_EXCHANGE)
    assert nonzero(other) == {}
    assert 0.9 * late_s < sum(column.values()) < took_s
    assert column["group"] > 0.5 * sum(column.values())
    assert min(column.values()) > 0


def test_shares() -> None:
    """Six parts of the time without pauses, in seconds and as shares, and what of the exchange was hidden."""
    stood = dict.fromkeys(OF_TRAINING, 0.0)
    stood |= {"inner": 6.0, "pseudo_gradient": 1.0, "codec": 0.5, "group": 1.5, "transfer": 0.5, "merge": 0.5}
    last = last_round({**stood, "paused": 99.0}, hidden_s=4.0, ended=1700.0)
    assert last == LastRound(6.0, 1.5, 1.5, 0.5, 0.0, 0.5, 4.0, 1700.0)
    assert list(last.shares.values()) == [0.6, 0.15, 0.15, 0.05, 0.0, 0.05, 0.5]
    six = "inner 60.0%, encode 15.0%, group 15.0%, transfer 5.0%, outer step 0.0%, merge 5.0%"
    assert told(last) == f"{six}; of its exchange hidden 50.0%"
    assert not any(last_round(dict.fromkeys(OF_TRAINING, 0.0), 0.0, 1700.0).shares.values())
