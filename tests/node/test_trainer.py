"""The trainer's side of a node: a merge that is answered late, and one that nobody waits for any more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2p_diloco.core.logs import Logs
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited


@awaited
async def test_a_merge_that_was_broken_off_while_its_answer_waited(
    memory_peer: type[Any], quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards are at unlike epochs, the trainer is interrupted and goes on: the late answer is no licence to read,
    so θ goes on, and the next merge is answered."""
    peer = memory_peer(MemoryNetwork(), "a", {**quick, "shard_elements": 2})
    await peer.enter()
    await peer.merge()
    with monkeypatch.context() as uneven:
        uneven.setattr(Logs, "uneven", lambda logs: {0: (1, 2)})
        peer.tell("merge", n=70, measures=False, afresh=False, data={})
        peer.tell("have read", loaded=[], torn=True)
        await asyncio.sleep(4 * quick["heartbeat_interval"])
    assert (await asyncio.wait_for(peer.exchange(1.0), 20.0))["sent"]
    assert all(message.get("n") != 70 for message in peer.said)
    _, again, *_ = [message for message in peer.said if message["kind"] == "load"]
    assert again["takes"] == [[0, "forget"], [1, "forget"]]  # the late answer was taken for merged by the log
    await peer.stop()


@awaited
async def test_the_answer_to_a_merge_weighs_what_is_due_and_counts_what_was_sent(
    memory_peer: type[Any], quick: dict[str, Any]
) -> None:
    """By the trainer's steps, which the node sees in the shared memory."""
    peer = memory_peer(MemoryNetwork(), "a", quick)
    await peer.enter()
    await peer.merge()
    peer.memory.steps, peer.memory.samples = 3, 12
    load = await peer.merge()
    assert (load["weight"], load["samples"], load["counted"]) == (3.0, 12, 0)
    peer.memory.delta.fill_(1.0)
    sending = {"shards": load["due"], "weight": load["weight"], "samples": load["samples"], "every": 1}
    assert (await peer.ask("contribute", "release", stands=True, **sending))["sent"]
    load = await peer.merge()
    assert load["takes"] == [[0, "drop"]]  # nothing was trained since, so nothing is left of it
    assert (load["counted"], load["dropped_samples"]) == (1, 0)
    peer.memory.steps, peer.memory.samples = 5, 19
    load = await peer.merge()
    assert (load["weight"], load["samples"], load["counted"]) == (2.0, 7, 1)
    await peer.stop()


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
    one.tell("have read", loaded=[], torn=False)
    await one.ask("read", "readable")
    before = one.memory.theta.clone()
    await asyncio.sleep(0.2)
    assert one.memory.theta.equal(before)
    one.tell("have read", loaded=[], torn=False)
    assert (await submitting)["sent"]
    while one.memory.theta.equal(before):
        await asyncio.sleep(0.01)
    await two.stop()
    await one.stop()


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
    await one.stop()
