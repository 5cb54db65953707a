"""The first rounds of a run are as correct as later ones, though the peers have not met each other yet."""

from __future__ import annotations

from typing import Any

import pytest
from swarm import Swarm

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(500)]

ROUNDS, RUNS = 6, 3
DELTAS = {"a": 1.0, "b": 2.0, "c": 6.0}


def test_every_peer_that_a_commit_names_is_waited_for(swarm: Swarm) -> None:
    """Rounds shorter than the time in which peers meet: a peer that a commit names is waited for, and aggregates,
    whether this peer has met it or not; θ falls by the mean of all three each round."""
    swarm.bootstrap()

    def case(run: int, delta: float) -> dict[str, Any]:
        config = {"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "start_peers": 3}
        config |= {"stop_after_epochs": ROUNDS, "shard_elements": 2, "aggregation": "mean", "step_limit": 0.0}
        return {"run_id": f"run-{run}", "config": config, "theta": 0.0, "deltas": [delta] * 6}

    peers = [
        swarm.start(name, "cases.py", cases=[case(run, delta) for run in range(RUNS)]) for name, delta in DELTAS.items()
    ]
    for run in range(RUNS):
        for peer in peers:
            peer.wait_for("done", run=f"run-{run}")
            values = [line["values"] for line in peer.lines("epoch", run=f"run-{run}")]
            assert values == [pytest.approx([-3.0 * epoch] * 6) for epoch in range(1, ROUNDS + 1)]
