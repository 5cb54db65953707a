"""Each sample of a shared data set is used exactly once an epoch, though peers are killed and others come: θ itself
shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from once import Once
from swarm import Swarm

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

SAMPLES, EPOCHS = 5_000, 1
CONFIG = {"sync_every": 10, "start_peers": 3, "heartbeat_interval": 0.5, "heartbeat_timeout": 6.0}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_sample_is_used_once_though_peers_die(swarm: Swarm, tmp_path: Path, mode: str) -> None:
    """Three peers share 5,000 samples. Twice one is killed, and another comes in its place. Every loader ends, and each
    sample has been counted once."""
    run = Once(swarm, tmp_path, SAMPLES, EPOCHS, lives=5, config={**CONFIG, "mode": mode}, step_s=0.06)
    for _ in range(3):
        run.join()
    for part in (0.2, 0.5):
        run.reaches(int(part * SAMPLES), 180.0)
        run.kill(run.living[0])
        run.join()
    run.ended(180.0)
    assert not run.verdict()
    assert all(member.last("end")["complete"] for member in run.living)


def test_accumulated_gradients_and_workers(swarm: Swarm, tmp_path: Path) -> None:
    """Processes read batches ahead, and a step takes four of them. One of three peers is killed. At the end each loop
    has fewer than four batches left: it ends, the peer makes a step with them, and all samples are counted once."""
    options: dict[str, Any] = {"accumulate": 4, "workers": 2, "step_s": 0.1}
    run = Once(swarm, tmp_path, 1_075, EPOCHS, lives=3, config=CONFIG, **options)
    for _ in range(3):
        run.join()
    run.reaches(300, 180.0)
    run.kill(run.living[0])
    run.ended(180.0)
    assert not run.verdict()
    assert all(member.last("end")["complete"] for member in run.living)


def test_each_sample_of_a_stream_is_used_once(swarm: Swarm, tmp_path: Path) -> None:
    """Three peers share two epochs of a stream of 450 samples, whose length was given as 500. One is killed: the others
    go back to what it held. The positions behind the stream's end are used, too, so every loader ends."""
    options: dict[str, Any] = {"stream": 500, "workers": 1, "step_s": 0.1}
    run = Once(swarm, tmp_path, 450, 2, lives=3, config=CONFIG, **options)
    for _ in range(3):
        run.join()
    run.reaches(150, 180.0)
    run.kill(run.living[0])
    run.ended(180.0)
    assert not run.verdict()
    assert all(member.last("end")["complete"] and member.last("end")["used"] == 1000 for member in run.living)
    assert any("has no sample 450, though length=500" in member.log() for member in run.living)
