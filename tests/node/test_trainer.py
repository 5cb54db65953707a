"""The trainer's side of a node: a merge that is answered late, and one that nobody waits for any more."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from p2p_diloco.core import leases
from p2p_diloco.core.leases import DataSet, Table, Use
from p2p_diloco.core.training import Training
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.records import read_peers
from p2p_diloco.node.status import DataProgress
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited


@awaited
async def test_a_merge_that_was_broken_off_while_its_answer_waited(
    memory_peer: type[Any], quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next version is near, the trainer is interrupted and goes on: the late answer is no licence to read, so θ
    goes on, and the next merge is answered."""
    peer = memory_peer(MemoryNetwork(), "a", {**quick, "slice_elements": 2})
    await peer.enter()
    await peer.merge()
    with monkeypatch.context() as near:
        near.setattr(Training, "load", lambda training, now: [])
        peer.tell("merge", n=70, measures=False, data=False)
        peer.tell("have read", loaded=[])
        await asyncio.sleep(4 * quick["heartbeat_interval"])
    assert (await asyncio.wait_for(peer.exchange(1.0), 20.0))["sent"]
    assert all(message.get("n") != 70 for message in peer.said)
    _, again, *_ = [message for message in peer.said if message["kind"] == "load"]
    assert again["outcomes"] == []  # the late answer was taken for merged by the log; the trainer loads all by itself


@awaited
async def test_a_trainer_is_told_the_tables_of_its_data(memory_peer: type[Any], quick: dict[str, Any]) -> None:
    """At its start, and with each merge that asks for them while nothing is under way; they say what its contributions
    have claimed. The peer's status has the progress of the data."""
    network = MemoryNetwork()
    peer, watcher = memory_peer(network, "a", quick), network.join("w", Inbox())
    await peer.enter()
    told = await peer.ask("data", "data")
    assert (told["me"], told["tables"], told["ended"]) == ("a", [], False)
    due = (await peer.merge())["due"]
    assert (await peer.merge())["tables"] is None
    data = DataSet("train", 100)
    asked = {"fragment": due, "weight": 1.0, "samples": 1, "stands": True, "every": 1}
    release = await peer.ask("contribute", "release", **asked, uses=[Use(data, (), 20)])
    assert release["sent"]
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
async def test_theta_stays_while_one_reading_follows_another(memory_peer: type[Any], quick: dict[str, Any]) -> None:
    """A commit waits until the trainer has read. If the next reading begins before it is its turn, it waits for that
    one too."""
    network, config = MemoryNetwork(), {**quick, "mode": "async"}
    one, two = memory_peer(network, "a", config), memory_peer(network, "b", config)
    await one.enter()
    await two.enter()
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
    while one.memory.theta.equal(before):
        await asyncio.sleep(0.01)


@awaited
async def test_epoch_and_digest_are_of_what_was_merged(memory_peer: type[Any], quick: dict[str, Any]) -> None:
    """Two trainers that have merged the same epoch are told the same digest; a later epoch has another one."""
    network = MemoryNetwork()
    one, two = memory_peer(network, "a", quick), memory_peer(network, "b", quick)
    await one.enter()
    await one.exchange(1.0)
    await two.enter()
    before = await two.merge()
    same = await one.merge()
    assert (before["epoch"], before["digest"]) == (same["epoch"], same["digest"])
    two.tell("pause", on=True)
    await two.stop()
    await one.exchange(1.0)
    after = await one.merge()
    assert after["epoch"] > before["epoch"]
    assert after["digest"] != before["digest"]
