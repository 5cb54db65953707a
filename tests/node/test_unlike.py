"""A machine whose outer step rounds otherwise, among others."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch

from p2p_diloco.tensors.outer_state import OuterState, SliceState
from tests.net.memory import MemoryNetwork
from tests.net.patience import until

ROUNDS = 8


def test_a_machine_unlike_the_others_fetches_their_state(
    memory_peer: Any, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After each of many rounds it comes to hold the bits of the others; it says once what it is."""
    step = OuterState.step

    async def life() -> list[torch.Tensor]:
        network = MemoryNetwork()
        peers = [memory_peer(network, name, {**quick, "start_peers": 3}) for name in ("anna", "bert", "carl")]
        odd = peers[-1].memory.theta

        def stepped(self: OuterState, index: int, held: SliceState, *more: Any) -> float:
            factor = step(self, index, held, *more)
            if self.slices[0].theta.data_ptr() == odd.data_ptr():
                held.theta.copy_(torch.nextafter(held.theta, torch.full_like(held.theta, torch.inf)))
            return factor

        monkeypatch.setattr(OuterState, "step", stepped)
        for peer in peers:
            await peer.enter()
        for number in range(ROUNDS):
            await asyncio.wait_for(asyncio.gather(*(peer.exchange(1.0 + number) for peer in peers)), 60.0)
            await until(lambda: torch.equal(odd, peers[0].memory.theta), 60.0)
        held = [peer.memory.theta.clone() for peer in peers]
        for peer in peers:
            await peer.stop()
        return held

    with caplog.at_level(logging.INFO):
        thetas = asyncio.run(life())
    assert all(torch.equal(theta, thetas[0]) for theta in thetas)
    assert thetas[0][0] < -ROUNDS
    loud = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("computes the outer step unlike the other peers" in text for text in loud) == 1
