"""Checkpoints of a run on the log of fragments."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.fragments.state import is_sound
from p2p_diloco.node.which_core import FRAGMENTS, VARIABLE
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited
from tests.node.test_restart import disk


async def trained(peers: list[Any], rounds: int) -> list[float]:
    """θ after these peers have entered and made rounds together; then they end."""
    await asyncio.gather(*(peer.enter(theta=1.0) for peer in peers))
    for _ in range(rounds):
        await asyncio.gather(*(peer.exchange(1.0) for peer in peers))
    theta: list[float] = peers[0].memory.theta.tolist()
    assert all(peer.memory.theta.tolist() == theta for peer in peers)
    return theta


@pytest.mark.parametrize("before", [FRAGMENTS, "shards"])
@awaited
async def test_a_run_goes_on_from_the_disks_of_its_peers(
    memory_peer: Any, quick: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Also from checkpoints with a log for each shard: all peers make the same state of them, which others find
    sound."""
    monkeypatch.setenv(VARIABLE, before)
    config, network = {**quick, "num_fragments": 2, "sync_every": 2, "shard_elements": 1}, MemoryNetwork()
    made = [memory_peer(network, name, config, sizes=(3, 2), **disk(tmp_path, name)) for name in "ab"]
    theta = await trained(made, 4)
    for peer in made:
        await peer.stop()
    monkeypatch.setenv(VARIABLE, FRAGMENTS)
    network = MemoryNetwork()
    again = [memory_peer(network, name, sizes=(3, 2), **disk(tmp_path, name)) for name in "ab"]
    assert await trained(again, 0) == theta
    held = [[log.held for log in peer.inbox.handler._node.replica.logs] for peer in again]
    assert held[0] == held[1]
    assert all(is_sound(state) for state in held[0])
    late = memory_peer(network, "c", sizes=(3, 2))
    await late.enter()
    assert late.memory.theta.tolist() == theta
    await asyncio.gather(*(peer.exchange(1.0) for peer in (*again, late)))
    assert late.memory.theta.tolist() == again[0].memory.theta.tolist() != theta
    for peer in (*again, late):
        await peer.stop()
