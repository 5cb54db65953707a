"""A lying aggregator among nodes, over the in-memory swarm, with the test in the trainers' place; and its limit in
checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from p2p_diloco.node import slice_work
from p2p_diloco.tensors.mean import weighted_mean
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited
from tests.node.conftest import QUICK, entered, exchange

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
@awaited
async def test_all_peers_cut_a_long_commit_alike_and_a_newcomer_does(
    lies: list[float], limit: float, moved: float
) -> None:
    """Three honest rounds of steps of 1; then a commit of a thousand times the length and of the wrong sign. All move
    by the limit, the aggregator too. A peer that joins then has the lengths, and the next one moves it as far."""
    network, config = MemoryNetwork(), {**QUICK, **PLAIN, **UNHURRIED, "step_limit": limit, "start_peers": 2}
    peers = await entered("ab", config, network, sizes=(6,))
    for _ in range(3):
        await exchange(*peers)
    lies.append(-1000.0)
    for lied in (1, 2):
        await exchange(*peers)
        assert all(torch.equal(peer.memory.theta, peers[0].memory.theta) for peer in peers)
        assert peers[0].memory.theta.tolist() == pytest.approx([-3.0 + lied * moved] * 6)
        peers += await entered("c" if lied == 1 else "", {}, network, sizes=(6,))


async def after_each(deltas: list[float], config: dict[str, Any], **local: Any) -> list[float]:
    """A lone peer's θ after each exchange."""
    (peer,) = await entered("a", config, sizes=(3, 2), **local)
    values = []
    for delta in deltas:
        await peer.exchange(delta)
        values.append(peer.memory.theta[0].item())
    await peer.stop()
    return values


@awaited
async def test_a_restarted_run_cuts_as_one_that_never_stopped(tmp_path: Path) -> None:
    """With other settings, such as another H, means have another length: then the next one is taken whole."""
    deltas, config = [1.0, 1.0, 1.0, 1000.0, 1000.0], {**QUICK, **PLAIN}
    whole = await after_each(deltas, config)
    assert whole == pytest.approx([-1, -2, -3, -4.25, -5.5])
    first = await after_each(deltas[:3], config, checkpoint_dir=tmp_path, save_every=1)
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert first + await after_each(deltas[3:], config, checkpoint_dir=tmp_path) == whole
    changed = {**config, "sync_every": 2}
    assert await after_each([1000.0], changed, checkpoint_dir=tmp_path / "copy") == [-1003.0]
