"""Codecs of few bits between nodes: rounds over the in-memory swarm, with the test in the trainers' place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from p2p_diloco.core import waits
from tests.node.conftest import QUICK, entered

ROUNDS, NUMEL = 12, 300
SLICES = {
    **QUICK, "slice_elements": 150, "outer_momentum": 0.0, "start_peers": 3, "aggregation": "mean", "step_limit": 0.0,
    "heartbeat_interval": 0.1, "heartbeat_timeout": 20.0,
}  # fmt: skip


def constant(peer: int) -> Tensor:
    """A pseudo-gradient whose smallest elements are far below what 4 bits tell of its largest."""
    source = torch.Generator().manual_seed(peer)
    return torch.randn(NUMEL, generator=source) * torch.logspace(0, -4, NUMEL)


async def exchange(peer: Any, delta: Tensor) -> None:
    due = (await peer.merge())["due"]
    peer.memory.delta.copy_(delta)
    peer.memory.steps += 1  # else it would be idle, and nobody would wait for it
    assert (await peer.contribute(due))["sent"]
    await peer.merge()


async def trained(config: dict[str, Any]) -> list[Tensor]:
    """θ of three peers after rounds in which each contributes the same every time."""
    peers = await entered("abc", config, sizes=(NUMEL,))
    for _ in range(ROUNDS):
        await asyncio.gather(*(exchange(peer, constant(index)) for index, peer in enumerate(peers)))
    return [peer.memory.theta.clone() for peer in peers]


@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.004), ("int4", 0.08), ("e3m0", 0.5), ("topk", 4.0)])
def test_three_peers_arrive_where_fp32_does(codec: str, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have the same θ to the bit, and are off by what the residuals of one round hold, not of all. Every round
    waits for all three: on a busy machine one would soon be late in rounds as short as these."""
    monkeypatch.setattr(waits, "awaited", lambda log, now: {})
    config = {**SLICES, "codec": codec, "reply_codec": "fp32"}
    thetas = asyncio.run(trained(config))
    assert torch.equal(thetas[0], thetas[1])
    assert torch.equal(thetas[0], thetas[2])
    mean = sum((constant(index) for index in range(3)), torch.zeros(NUMEL)) / 3
    missing = (thetas[0] + ROUNDS * mean).abs()
    largest = max(constant(index).abs().max().item() for index in range(3))
    assert missing.max().item() < bound * largest
