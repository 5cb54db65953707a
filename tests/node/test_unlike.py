"""A machine whose outer step rounds otherwise, among others."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch

from p2p_diloco.tensors.digest import look
from p2p_diloco.tensors.store import Proposal, ShardStore
from tests.net.memory import MemoryNetwork

ROUNDS = 16


def test_a_machine_unlike_the_others_is_sent_states(
    memory_peer: Any, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All hold the same bits after each of many rounds; the odd one says once what it is."""
    propose = ShardStore.propose

    async def life() -> list[torch.Tensor]:
        network = MemoryNetwork()
        peers = [memory_peer(network, name, {**quick, "start_peers": 3}) for name in ("anna", "bert", "carl")]
        odd = peers[-1].memory.theta.data_ptr()

        def proposed(self: ShardStore, shard: int, mean: Any, codec: str, meta: bytes, *more: int) -> Proposal:
            right = propose(self, shard, mean, codec, meta, *more)
            if self.theta(0).data_ptr() != odd:
                return right
            theta = torch.nextafter(right.theta, torch.full_like(right.theta, torch.inf))
            seen = look(theta, right.state)
            return Proposal(theta, right.state, seen.digest(meta), seen.of("theta"))

        monkeypatch.setattr(ShardStore, "propose", proposed)
        for peer in peers:
            await peer.enter()
        for number in range(ROUNDS):
            await asyncio.wait_for(asyncio.gather(*(peer.exchange(1.0 + number) for peer in peers)), 60.0)
        held = [peer.memory.theta.clone() for peer in peers]
        for peer in peers:
            await peer.stop()
        return held

    with caplog.at_level(logging.INFO):
        thetas = asyncio.run(life())
    assert all(torch.equal(theta, thetas[0]) for theta in thetas)
    assert thetas[0][0] < -ROUNDS
    loud = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("this machine computes the outer step unlike" in text for text in loud) == 1
