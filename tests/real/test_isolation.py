"""The node has its own process, so that a trainer busy in Python takes no bandwidth from the exchange.

Two peers on machines of their own exchange a model of 4M parameters over a link; from the contribution until its
commits are there, the first one's main thread is idle, or spins in pure Python. The link is good for the internet.
On two cores a faster one would show the processor's limit: whatever spins takes half of what the exchange could use.
"""

from __future__ import annotations

import os
import statistics

import pytest
from swarm import Swarm, until

from p2p_diloco.cli.bench.network import Network

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(500)]

NUMEL = 4_000_000
LINK_MBIT = 100
CONFIG = {"sync_every": 1, "codec": "fp32", "start_peers": 2, "outer_lr": 0.1}
EXCHANGES, TURNS = 3, 2
"""Counted exchanges in each turn, and turns of each condition."""
RATIO = 0.8


def test_a_busy_trainer_does_not_slow_the_exchange(swarm: Swarm, network: Network) -> None:
    """Throughput beside a busy main thread holds against that beside an idle one."""
    swarm.bootstrap("10.77.0.1", network.machine("seed"))
    machines = {name: network.machine(name) for name in ("spinner", "other")}
    for name in machines:
        network.throttle(name, LINK_MBIT)
    spinner, other = (
        swarm.start(name, "busy.py", on=machine, numel=NUMEL, config=CONFIG) for name, machine in machines.items()
    )
    other.wait_for("exchange")
    took: dict[str, list[float]] = {"idle": [], "busy": []}
    turn = 1
    for _ in range(TURNS):
        for condition in took:
            spinner.tell(condition)
            turn += 1
            done = lambda turn=turn: spinner.lines("exchange", turn=turn)  # noqa: E731
            until(lambda done=done: len(done()) > EXCHANGES, 120.0, f"{EXCHANGES} exchanges in turn {turn}")
            took[condition] += [line["took_s"] for line in done()[1 : EXCHANGES + 1]]
    moved_mb = 2 * NUMEL * 4 / 1e6  # each peer sends one model's bytes and receives as many
    rate = {condition: moved_mb / statistics.median(times) for condition, times in took.items()}
    print({condition: f"{value:.0f} MB/s" for condition, value in rate.items()}, f"load {os.getloadavg()[0]:.1f}")
    assert rate["busy"] >= RATIO * rate["idle"]
