"""A lying aggregator among nodes, over the in-memory swarm, with the test in the trainers' place; and its limit in
checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.net.patience import awaited
from tests.node.conftest import QUICK, entered

PLAIN = {"outer_momentum": 0.0, "slice_elements": 2}


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
