"""Where the time of real peers goes: by their own metrics, and by the stopwatch of the training script."""

from __future__ import annotations

from typing import Any

import pytest
from swarm import Swarm

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

NUMEL, ROUNDS, H = 2_000_000, 6, 4
STEP_S = {"quick": 0.1, "slow": 0.3}
PARTS = ("pseudo_gradient", "codec", "group", "transfer", "outer_step", "merge")
LATE_S = (ROUNDS - 1) * H * (STEP_S["slow"] - STEP_S["quick"])
"""How much more the slow peer trains, after the first exchange."""


def accounts(swarm: Swarm, **settings: Any) -> dict[str, dict[str, Any]]:
    """A fast and a slow peer complete a run; returns the times of each."""
    swarm.bootstrap()
    config = {"sync_every": H, "start_peers": 2, "min_peers": 2, "stop_after_epochs": ROUNDS, **settings}
    peers = {
        name: swarm.start(name, "timed.py", numel=NUMEL, step_s=step_s, pause_s=0.05, config=config)
        for name, step_s in STEP_S.items()
    }
    return {name: peer.wait_for("times") for name, peer in peers.items()}


def check(told: dict[str, Any]) -> None:
    """The parts add up to the whole, and both clocks agree."""
    times, wall_s = told["metrics"], told["wall_s"]
    blocked_s = sum(times[f"{part}_time_s"] for part in PARTS)
    assert times["waiting_time_s"] == pytest.approx(blocked_s, abs=1e-6)
    assert times["inner_time_s"] + blocked_s + times["paused_time_s"] == pytest.approx(wall_s, rel=0.02)
    assert times["inner_time_s"] == pytest.approx(told["inner_s"], abs=0.03 * wall_s)
    assert blocked_s == pytest.approx(told["outer_s"], abs=0.03 * wall_s)
    assert times["paused_time_s"] == pytest.approx(told["paused_s"], abs=0.03 * wall_s)
    hidden_s = sum(times[f"hidden_{part}_time_s"] for part in ("codec", "group", "transfer", "outer_step"))
    assert times["hidden_time_s"] == pytest.approx(hidden_s, abs=1e-6)
    assert all(value >= 0 for value in times.values())
    assert all(times[f"{part}_time_s"] > 0 for part in ("pseudo_gradient", "merge"))


def test_the_parts_are_the_whole(swarm: Swarm) -> None:
    """Inner steps, encoding, waiting, transfer, outer step, merge and pauses add up to the time of training; the fast
    peer waits for the slow one, which waits for no peer."""
    told = accounts(swarm)
    for peer in told.values():
        check(peer)
        assert peer["exchanges"] == ROUNDS
        assert peer["metrics"]["hidden_time_s"] == 0.0
        assert all(peer["metrics"][f"{part}_time_s"] > 0 for part in ("codec", "transfer", "outer_step"))
    quick, slow = told["quick"]["metrics"], told["slow"]["metrics"]
    assert quick["group_time_s"] - slow["group_time_s"] > 0.5 * LATE_S
    assert quick["group_time_s"] > 0.5 * quick["waiting_time_s"]


def test_hidden_time_is_separate(swarm: Swarm) -> None:
    """With an overlap of all steps but one, the slow peer's exchanges are hidden, and so is part of the fast one's
    wait; the parts of the waiting time still add up to the whole."""
    told = accounts(swarm, overlap_steps=H - 1, merge="rebase")
    for peer in told.values():
        check(peer)
    quick, slow = told["quick"]["metrics"], told["slow"]["metrics"]
    assert slow["hidden_time_s"] > 0.3 * slow["total_sync_time_s"]
    assert slow["hidden_codec_time_s"] > 0
    assert quick["hidden_group_time_s"] > 0.5
    assert 0 < quick["hidden_time_s"] < quick["total_sync_time_s"]
