"""How peers learn of each other's speeds, and what follows from them: with probes, in both modes."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_diloco.node import participation
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, entered

WITHIN_S = 10.0


def trains(peer: Any, step_time_s: float) -> None:
    """It makes another step, which takes so long."""
    peer.memory.step_time_s = step_time_s
    peer.memory.steps = peer.memory.steps + 1


def planned_s(peer: Any) -> float:
    return float(peer.memory.trains_for_s)


@awaited
async def test_every_peer_plans_by_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as its speed is known, and again when it changes; an aggregator without a trainer has none. A slow link
    takes its time off the training: the four elements in fp32 are 16 bytes there and 16 back, 2 s on one link, 16 on
    the other."""
    monkeypatch.setattr(participation, "MEASURE_EVERY_S", 0.05)
    network, config = MemoryNetwork(), {**QUICK, "pace": "time", "sync_every": 20}
    peers = fast, slow = await entered("ab", config, network)
    await entered("c", {}, network, sizes=None)
    assert [planned_s(peer) for peer in peers] == [math.inf] * 2
    trains(slow, 40.0)
    await until(lambda: [planned_s(peer) for peer in peers] == [800.0] * 2)
    trains(fast, 10.0)
    await until(lambda: [planned_s(peer) for peer in peers] == [200.0] * 2)
    trains(fast, 20.0)
    await until(lambda: [planned_s(peer) for peer in peers] == [400.0] * 2)
    for peer, rate in zip(peers, (16.0, 2.0), strict=True):
        peer.transport.traffic.bandwidth = SimpleNamespace(rate=rate)
    await until(lambda: [planned_s(peer) for peer in peers] == [400.0, 400.0 + 2.0 - 16.0])


@awaited
async def test_dynamic_local_updates_follow_what_probes_tell() -> None:
    """Asynchronous mode: the next submission's steps, of a peer that is five times slower than the other."""
    peers = await entered("ab", {**QUICK, "mode": "async", "dylu": True, "sync_every": 100})

    async def next_steps(peer: Any) -> int:
        await peer.exchange(1.0)
        return int((await peer.merge())["every"])

    assert await next_steps(peers[1]) == 100
    trains(peers[0], 10.0)
    trains(peers[1], 50.0)
    steps, give_up_at = 100, time.monotonic() + WITHIN_S
    while steps != 20:
        assert time.monotonic() < give_up_at
        steps = await next_steps(peers[1])
    assert await next_steps(peers[0]) == 100
