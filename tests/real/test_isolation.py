"""The node has its own process: a trainer busy in Python does not slow the exchange, and is not slowed by it.

Two peers on separate machines exchange a model of 4M parameters over a link; from the contribution until its commits
have arrived, the first peer's main thread is idle, or spins in pure Python. The link is as fast as a good internet
connection. On two cores a faster one would show the processor's limit: a spinning thread takes half of it.
"""

from __future__ import annotations

import os
import statistics

import pytest
from swarm import Line, Member, Swarm, until

from examples.benchmarks.network import Network

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(500)]

NUMEL = 4_000_000
LINK_MBIT = 100
CONFIG = {"sync_every": 1, "codec": "fp32", "start_peers": 2, "outer_lr": 0.1}
EXCHANGES, TURNS = 3, 2
"""Counted exchanges in each turn, and turns of each condition."""
RATIO = 0.8
"""Of the exchange's rate beside an idle main thread."""
PACE = 0.95
"""Of the main thread's own pace."""


def spinner_and_other(swarm: Swarm, network: Network) -> tuple[Member, Member]:
    """Two peers with separate links, once they exchange."""
    swarm.bootstrap("10.77.0.1", network.machine("seed"))
    machines = {name: network.machine(name) for name in ("spinner", "other")}
    for name in machines:
        network.throttle(name, LINK_MBIT)
    spinner, other = (
        swarm.start(name, "busy.py", on=machine, numel=NUMEL, config=CONFIG) for name, machine in machines.items()
    )
    other.wait_for("exchange")
    return spinner, other


def exchanges(spinner: Member, condition: str, turn: int, count: int) -> list[Line]:
    """This many exchanges in this condition, after its first one."""
    spinner.tell(condition)
    done = lambda: spinner.lines("exchange", turn=turn)  # noqa: E731
    until(lambda: len(done()) > count, 60.0 + 20.0 * count, f"{count} exchanges in turn {turn}")
    return done()[1 : count + 1]


def test_a_busy_trainer_does_not_slow_the_exchange(swarm: Swarm, network: Network) -> None:
    """The throughput beside a busy main thread is compared with that beside an idle one."""
    spinner, _ = spinner_and_other(swarm, network)
    took: dict[str, list[float]] = {"idle": [], "busy": []}
    turn = 1
    for _ in range(TURNS):
        for condition in took:
            turn += 1
            lines = exchanges(spinner, condition, turn, EXCHANGES)
            took[condition] += [line["took_s"] for line in lines]
            assert all((line["beside"] > 0) == (condition == "busy") for line in lines), (
                "the main thread does what it is told"
            )
    moved_mb = 2 * NUMEL * 4 / 1e6  # each peer sends one model's bytes and receives as many
    rate = {condition: moved_mb / statistics.median(times) for condition, times in took.items()}
    print({condition: f"{value:.0f} MB/s" for condition, value in rate.items()}, f"load {os.getloadavg()[0]:.1f}")
    assert rate["busy"] >= RATIO * rate["idle"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core that is free")
def test_an_exchange_does_not_slow_a_busy_trainer(swarm: Swarm, network: Network) -> None:
    """With its own core the main thread is as fast during exchanges as between them."""
    spinner, other = spinner_and_other(swarm, network)
    own, *rest = sorted(os.sched_getaffinity(0))
    for process in (*spinner.family()[1:], *other.family()):
        process.cpu_affinity(rest)
    spinner.family()[0].cpu_affinity([own])
    lines = exchanges(spinner, "busy", 2, 2 * EXCHANGES)
    pace = {what: statistics.median(line[what] for line in lines) for what in ("alone", "beside")}
    print(pace, f"load {os.getloadavg()[0]:.1f}")
    assert pace["beside"] >= PACE * pace["alone"] > 0
