"""The trainer's side of a node: its merges, and where the base of its progress is after θ has changed."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from p2p_diloco.core import leases
from p2p_diloco.core.fetching import Fetching
from p2p_diloco.core.leases import DataSet, Table, Use
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.training import Training
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.records import read_peers
from p2p_diloco.node.status import DataProgress
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, MemoryPeer, entered, exchange


@awaited
async def test_a_merge_that_was_broken_off_while_its_answer_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version is near, the trainer is interrupted and goes on: the late answer is no licence to read, so θ
    goes on, and the next merge is answered."""
    (peer,) = await entered("a", {**QUICK, "slice_elements": 2})
    await peer.merge()
    with monkeypatch.context() as near:
        near.setattr(Training, "load", lambda training, now: [])
        peer.tell("merge", n=70, measures=False, data=False)
        peer.tell("have read", loaded=[])
        await asyncio.sleep(4 * QUICK["heartbeat_interval"])
    assert (await asyncio.wait_for(peer.exchange(1.0), 20.0))["sent"]
    assert all(message.get("n") != 70 for message in peer.said)
    _, again, *_ = [message for message in peer.said if message["kind"] == "load"]
    assert again["outcomes"] == []  # the late answer was taken for merged by the log; the trainer loads all by itself


@awaited
async def test_a_trainer_is_told_the_tables_of_its_data() -> None:
    """At its start, and with each merge that asks for them while nothing is under way; they say what its contributions
    have claimed. The peer's status has the progress of the data."""
    network = MemoryNetwork()
    peer, watcher = MemoryPeer(network, "a", QUICK), network.join("w", Inbox())
    await peer.enter()
    told = await peer.ask("ask", "told")
    assert (told["me"], told["tables"], told["ended"]) == ("a", [], False)
    due = (await peer.merge())["due"]
    assert (await peer.merge())["tables"] is None
    data = DataSet("train", 100)
    assert (await peer.contribute(due, uses=[Use(data, (), 20)]))["sent"]
    load = await peer.ask("merge", "load", measures=False, data=True)
    (table,) = (msgspec.convert(one, Table) for one in load["tables"])
    assert (table.data, leases.held(table, "a", told["life"])) == (data, ((0, 20),))
    peer.tell("have read", loaded=[due])
    status = None
    while status is None or not status.data:
        await asyncio.sleep(0.05)
        status = (await read_peers(watcher, "r")).get("a")
    assert status.data == (DataProgress("train", 100, 0, 0, 20),)


@awaited
async def test_theta_stays_while_one_reading_follows_another() -> None:
    """A commit waits until the trainer has read. If the next reading begins before it is its turn, it waits for that
    one too."""
    one, two = await entered("ab", {**QUICK, "mode": "async"})
    await one.merge()
    await one.ask("read", "readable")
    submitting = asyncio.create_task(two.exchange(1.0))
    await asyncio.sleep(0.5)  # its commit has come by then
    one.tell("have read", loaded=[])
    await one.ask("read", "readable")
    before = one.memory.theta.clone()
    await asyncio.sleep(0.2)
    assert one.memory.theta.equal(before)
    one.tell("have read", loaded=[])
    assert (await submitting)["sent"]
    await until(lambda: not one.memory.theta.equal(before))


@pytest.mark.parametrize("stands", [True, False])
@awaited
async def test_a_trainer_hears_where_its_base_is(stands: bool) -> None:
    """A trainer that stands still during its exchange needs no memory beside θ; one that trains finds the old base in
    `base`, once."""
    peer = MemoryPeer(MemoryNetwork(), "a", QUICK, sizes=(2,))
    await peer.enter(theta=5.0)
    await peer.ask("read", "readable")
    peer.tell("have read", loaded=[])  # a look at the global values moves no base
    first = await peer.merge()
    assert (first["kept"], first["gone"], first["outcomes"]) == ([], [0], [[0, {"counted": False, "dropped": ""}]])
    await peer.exchange(1.0, stands=stands)
    loads = [message for message in peer.said if message["kind"] == "load"]
    assert loads[-1]["outcomes"]
    assert (loads[-1]["kept"], loads[-1]["gone"]) == (([], [0]) if stands else ([0], []))
    assert peer.memory.theta.tolist() != [5.0, 5.0]
    assert peer.memory.base.tolist() == ([0.0, 0.0] if stands else [5.0, 5.0])
    later = await peer.merge()
    assert (later["kept"], later["gone"], later["outcomes"]) == ([], [], [])


async def two_after_a_round(**config: Any) -> list[MemoryPeer]:
    peers = await entered("ab", {**QUICK, "start_peers": 2, **config}, sizes=(3,))
    await exchange(*peers)
    return peers


@pytest.mark.usefixtures("memory_is_always_looked_at")
@awaited
async def test_a_base_that_was_changed_in_memory_is_mended_first() -> None:
    """The base is repaired before a pseudo-gradient is computed from it, so no progress is lost."""
    a, b = await two_after_a_round()
    true = a.memory.theta.tolist()
    assert b.memory.theta.tolist() == true
    b.memory.theta[1] += 1.0
    await b.merge()
    assert b.memory.theta.tolist() != true  # nothing is measured
    load = await b.merge(measures=True)
    assert b.memory.theta.tolist() == true
    assert (load["kept"], load["lost"], load["outcomes"], load["due"]) == ([], [], [], 0)


@pytest.mark.usefixtures("memory_is_always_looked_at")
@awaited
async def test_a_changed_base_is_not_kept_when_others_pass_its_trainer_by() -> None:
    """Their commit is computed on what was changed, found wrong, and fetched; what was trained can't be told then."""
    a, b = await two_after_a_round(round_timeout=1.0)
    b.memory.theta[1] += 1.0
    await a.exchange(1.0)  # b trains
    await until(lambda: b.memory.theta.tolist() == a.memory.theta.tolist())
    load = await b.merge(measures=True)
    assert (load["kept"], load["lost"]) == ([], [0])
    assert not b.memory.base.any()


@pytest.mark.usefixtures("memory_is_always_looked_at")
@awaited
async def test_an_unrepaired_base_is_used_after_a_bounded_wait_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait for a repair is bounded, because no peer may have the slice; the log names the slices."""
    monkeypatch.setattr(Rules, "mended_within", 0.05)
    monkeypatch.setattr(Fetching, "repaired", lambda self, fragment: (0,))

    (peer,) = await entered("a", {**QUICK, "heartbeat_timeout": 20.0}, sizes=(3,))
    await peer.exchange(1.0)
    peer.memory.theta[1] += 1.0
    assert (await peer.merge(measures=True))["due"] == 0
    await peer.stop()
    assert "slices 0 were corrupted in memory, and not repaired within 0.05 s" in caplog.text
