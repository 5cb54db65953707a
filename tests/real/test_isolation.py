"""The node has its own process, so that a trainer busy in Python takes no bandwidth from the exchange.

Two peers exchange a model of 16M parameters; while they do, the first one's main thread is idle, or spins in pure
Python; or, for comparison, an unrelated process spins, which costs the same processor and can't hold the interpreter.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import psutil
import pytest
from swarm import Swarm, until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

NUMEL = 16_000_000
CONFIG = {"sync_every": 1, "codec": "fp32", "start_peers": 2, "outer_lr": 0.1}
EXCHANGES, TURNS = 3, 3
"""Counted exchanges in each turn, and turns of each condition."""
SPIN = "while True: sum(i * i for i in range(100_000))"
RATIO = 0.8
"""Of the rate of an idle machine, where there are processors for all."""
RATIO_CROWDED = 0.3
"""Of the rate beside a stranger, where there are not: medians of nine vary that much on a shared machine. An exchange
in a thread of the trainer's own interpreter would fall below a tenth."""


def test_a_busy_trainer_does_not_slow_the_exchange(swarm: Swarm) -> None:
    """Throughput beside a busy main thread holds against that beside an equally busy stranger; and against that of an
    idle machine, where there are processors for all of it (two trainers, two nodes, two p2pd)."""
    swarm.bootstrap()
    spinner, other = (swarm.start(name, "busy.py", numel=NUMEL, config=CONFIG) for name in ("spinner", "other"))
    other.wait_for("exchange")
    took: dict[str, list[float]] = {"idle": [], "busy": [], "elsewhere": []}
    turn = 1
    for _ in range(TURNS):
        for condition in took:
            stranger = subprocess.Popen([sys.executable, "-c", SPIN]) if condition == "elsewhere" else None
            try:
                spinner.tell("busy" if condition == "busy" else "idle")
                turn += 1
                done = lambda turn=turn: spinner.lines("exchange", turn=turn)  # noqa: E731
                until(lambda done=done: len(done()) > EXCHANGES, 120.0, f"{EXCHANGES} exchanges in turn {turn}")
                took[condition] += [line["took_s"] for line in done()[1 : EXCHANGES + 1]]
            finally:
                if stranger is not None:
                    stranger.kill()
                    stranger.wait(5)
    moved_mb = 2 * NUMEL * 4 / 1e6  # each peer sends one model's bytes and receives as many
    rate = {condition: moved_mb / statistics.median(times) for condition, times in took.items()}
    print({condition: f"{value:.0f} MB/s" for condition, value in rate.items()}, f"load {os.getloadavg()[0]:.1f}")
    assert rate["busy"] >= RATIO_CROWDED * rate["elsewhere"]
    if (psutil.cpu_count() or 1) >= 8 and os.getloadavg()[0] < 4:
        assert rate["busy"] >= RATIO * rate["idle"]
