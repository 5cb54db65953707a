"""Questions to peers of the DHT by a process that is none of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from p2p_diloco.config import PeerConfig
from p2p_diloco.net import dht, probing
from p2p_diloco.net.dht import DhtPeer
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.probing import ask, visiting
from tests.net.patience import awaited

pytestmark = pytest.mark.real
STRANGER = "12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"


@awaited
async def test_a_peer_answers_with_its_time_whatever_travels_with_the_question() -> None:
    """Small and large questions are answered, and the asker doesn't become a peer of the DHT. A peer that is not there
    is unreachable, and so is one from which nothing comes in time."""
    seed = await DhtPeer.create(PeerConfig())
    try:
        async with visiting(("/ip4/127.0.0.1/tcp/0",), start_s=20.0) as (daemon, _):
            assert daemon.addresses
            assert await daemon.greet(seed.daemon.addresses[0]) is None
            for padding_bytes in (0, probing.PADDING_BYTES_MAX):
                answer = await ask(daemon, seed.peer_id, timeout_s=20.0, padding_bytes=padding_bytes)
                assert answer.took_s > 0
                assert abs(answer.clock_ahead_s) <= answer.took_s
            assert not seed._node.protocol.routing_table.peer_id_to_uid
            with pytest.raises(Unreachable):
                await ask(daemon, STRANGER, timeout_s=20.0)
            with pytest.raises(Unreachable):
                await ask(daemon, seed.peer_id, timeout_s=0.0)
    finally:
        await seed.close()


def test_a_clock_reading_counts_from_the_middle_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer reads its clock between question and answer, so half of the time that both took is subtracted."""

    now = [1000.0]
    clock = SimpleNamespace(time=lambda: now[0], perf_counter=lambda: now[0])

    class Stub:
        async def rpc_ping(self, request: object, timeout: float) -> object:
            now[0] += 4.0
            return SimpleNamespace(dht_time=1010.0)

    monkeypatch.setattr(probing, "_stub", lambda daemon, peer: Stub())
    monkeypatch.setattr(probing, "time", clock)
    answer = asyncio.run(ask(None, STRANGER, timeout_s=1.0))  # type: ignore[arg-type]
    assert (answer.took_s, answer.clock_ahead_s) == (4.0, 8.0)
    assert asyncio.run(dht._clock_difference_s(None, STRANGER)) == 4.0  # type: ignore[arg-type]
