"""A lying aggregator among nodes, over the in-memory swarm, with the test in the trainers' place; and its limit in
checkpoints."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from p2p_diloco.node import slice_work
from p2p_diloco.tensors.mean import weighted_mean
from tests.net.memory import MemoryNetwork

PLAIN = {"outer_momentum": 0.0, "slice_elements": 2}
UNHURRIED = {"heartbeat_timeout": 20.0, "round_timeout": 20.0}
"""No peer is given up, however slow the machine is: peers that give each other up fork, and differ for a while."""


@pytest.fixture
def lies(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What every aggregator multiplies its means by: the last of these numbers."""
    times = [1.0]
    monkeypatch.setattr(slice_work, "weighted_mean", lambda *given: weighted_mean(*given) * times[-1])
    return times


@pytest.mark.parametrize(("limit", "moved"), [(3.0, 3.0), (0.0, 1000.0)])
def test_all_peers_cut_a_long_commit_alike_and_a_newcomer_does(
    memory_peer: Any, quick: dict[str, Any], lies: list[float], limit: float, moved: float
) -> None:
    """Three honest rounds of steps of 1; then a commit of a thousand times the length and of the wrong sign. All move
    by the limit, the aggregator too. A peer that joins then has the lengths, and the next one moves it as far."""
    config = {**quick, **PLAIN, **UNHURRIED, "step_limit": limit}

    async def scenario() -> list[list[Tensor]]:
        network = MemoryNetwork()
        peers = [memory_peer(network, name, {**config, "start_peers": 2}, sizes=(6,)) for name in "ab"]
        found = []

        async def all_contribute() -> None:
            await asyncio.gather(*(peer.exchange(1.0) for peer in peers))

        for peer in peers:
            await peer.enter()
        for _ in range(3):
            await all_contribute()
        lies.append(-1000.0)
        await all_contribute()
        found.append([peer.memory.theta.clone() for peer in peers])
        newcomer = memory_peer(network, "c", {}, sizes=(6,))
        await newcomer.enter()
        await newcomer.merge()
        peers.append(newcomer)
        await all_contribute()
        found.append([peer.memory.theta.clone() for peer in peers])
        for peer in peers:
            await peer.stop()
        return found

    for lied, thetas in enumerate(asyncio.run(asyncio.wait_for(scenario(), 100.0)), start=1):
        assert all(torch.equal(theta, thetas[0]) for theta in thetas)
        assert thetas[0].tolist() == pytest.approx([-3.0 + lied * moved] * 6)


def after_each(memory_peer: Any, deltas: list[float], config: dict[str, Any], **local: Any) -> list[float]:
    """A lone peer's θ after each exchange."""

    async def life() -> list[float]:
        peer = memory_peer(MemoryNetwork(), "a", config, sizes=(3, 2), **local)
        try:
            await peer.enter()
            values = []
            for delta in deltas:
                await peer.exchange(delta)
                values.append(peer.memory.theta[0].item())
            return values
        finally:
            await peer.stop()

    return asyncio.run(asyncio.wait_for(life(), 100.0))


def test_a_restarted_run_cuts_as_one_that_never_stopped(
    memory_peer: Any, quick: dict[str, Any], tmp_path: Path
) -> None:
    """With other settings, such as another H, means have another length: then the next one is taken whole."""
    deltas, config = [1.0, 1.0, 1.0, 1000.0, 1000.0], {**quick, **PLAIN}
    whole = after_each(memory_peer, deltas, config)
    assert whole == pytest.approx([-1, -2, -3, -4.25, -5.5])
    first = after_each(memory_peer, deltas[:3], config, checkpoint_dir=tmp_path, save_every=1)
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert first + after_each(memory_peer, deltas[3:], config, checkpoint_dir=tmp_path) == whole
    changed = {**config, "sync_every": 2}
    assert after_each(memory_peer, [1000.0], changed, checkpoint_dir=tmp_path / "copy") == [-1003.0]
