"""A lying peer among nodes: rounds over the in-memory swarm, with the test in the trainers' place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.net.memory import MemoryNetwork

ROUNDS = 3
SENT = {"a": (1.0, 20.0), "b": (1.0, 20.0), "liar": (-1000.0, 1500.0)}
"""By peer: each element of its pseudo-gradient, and its weight."""


async def exchange(peer: Any, delta: float, weight: float) -> None:
    due = (await peer.merge())["due"]
    peer.memory.delta.fill_(delta)
    release = await peer.ask(
        "contribute", "release", fragment=due, weight=weight, samples=1, stands=True, every=1, uses=[]
    )
    assert release["sent"]
    await peer.merge()


@pytest.mark.parametrize("aggregation", ["clip", "centered_clip"])
def test_no_aggregator_lets_a_liar_run_away_with_the_model(
    memory_peer: Any, quick: dict[str, Any], aggregation: str
) -> None:
    """Two peers contribute 1, the third −1000 with a weight of 1500: −1000 counts as −1, and 1500 as 1.5 · 20. So clip
    makes steps of (1 + 1 − 1.5) / 3.5, whichever peer aggregates; centered_clip makes longer ones. All have the same θ.
    """
    config = {**quick, "outer_momentum": 0.0, "start_peers": 3, "slice_elements": 2, "aggregation": aggregation}

    async def scenario() -> list[torch.Tensor]:
        network = MemoryNetwork()
        peers = {name: memory_peer(network, name, config, sizes=(6,)) for name in SENT}
        for peer in peers.values():
            await peer.enter()
        for _ in range(ROUNDS):
            await asyncio.gather(*(exchange(peers[name], *sent) for name, sent in SENT.items()))
        thetas = [peer.memory.theta.clone() for peer in peers.values()]
        for peer in peers.values():
            await peer.stop()
        return thetas

    thetas = asyncio.run(scenario())
    assert all(torch.equal(theta, thetas[0]) for theta in thetas)
    steps = (-thetas[0] / ROUNDS).tolist()
    if aggregation == "clip":
        assert steps == pytest.approx([0.5 / 3.5] * 6, rel=1e-5)
    else:
        assert min(steps) > 2 * 0.5 / 3.5
        assert max(steps) <= 1.0
