"""A lying aggregator among nodes, over the in-memory swarm, with the test in the trainers' place; and its limit in
checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from p2p_diloco.node import slice_work
from p2p_diloco.tensors import checkpoint
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


@pytest.mark.parametrize(("limit", "moved"), [(3.0, 3.0), (1.5, 1.5), (0.0, 1000.0)])
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
    deltas = [1.0, 1.0, 1.0, 1000.0, 1000.0]
    whole = after_each(memory_peer, deltas, {**quick, **PLAIN})
    assert whole == pytest.approx([-1, -2, -3, -4.25, -5.5])
    first = after_each(memory_peer, deltas[:3], {**quick, **PLAIN}, checkpoint_dir=tmp_path, save_every=1)
    assert first + after_each(memory_peer, deltas[3:], {**quick, **PLAIN}, checkpoint_dir=tmp_path) == whole


@pytest.mark.parametrize("changed", [{"sync_every": 2}, {"step_limit": 0.0}])
def test_a_run_that_starts_again_with_other_settings_knows_no_lengths(
    memory_peer: Any, quick: dict[str, Any], tmp_path: Path, changed: dict[str, Any]
) -> None:
    """With another H, say, means have another length, or a run begins without a limit: its next mean is taken whole."""
    after_each(memory_peer, [1.0] * 3, {**quick, **PLAIN}, checkpoint_dir=tmp_path, save_every=1)
    config = {**quick, **PLAIN, **changed}
    assert after_each(memory_peer, [1000.0], config, checkpoint_dir=tmp_path) == [-1003.0]


def test_a_checkpoint_of_a_version_without_lengths_is_read_with_none(
    memory_peer: Any, quick: dict[str, Any], tmp_path: Path
) -> None:
    """The momentum goes on; the limit applies once three lengths are known."""
    momentum = {**quick, "slice_elements": 2, "outer_momentum": 0.5}
    deltas = [1.0, 1.0, 1.0, 1.0, 1.0, 1000.0]
    whole = after_each(memory_peer, deltas, momentum)
    after_each(memory_peer, deltas[:2], {**momentum, "step_limit": 0.0}, checkpoint_dir=tmp_path, save_every=2)
    path = checkpoint.latest(tmp_path)
    assert path is not None
    tensors, manifest = checkpoint.load(path)
    own: dict[str, Any] = {key: value for key, value in manifest.items() if key not in ("format", "epoch", "files")}
    assert set(tensors["outer"]) == {f"{index}.m" for index in range(3)}
    del own["config"]["step_limit"]
    checkpoint.save(tmp_path, 2, tensors, own, keep=1)
    assert after_each(memory_peer, deltas[2:], {}, checkpoint_dir=tmp_path) == whole[2:]
