"""Each sample of a shared data set is used exactly once an epoch, though peers are killed and others come: θ itself
shows it."""

from __future__ import annotations

from pathlib import Path

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
