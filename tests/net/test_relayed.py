"""Two peers that no other peer can dial, and a relay: real daemons and transports."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from p2p_diloco.net import paths
from p2p_diloco.net.interface import Unreachable
from tests.net.patience import awaited, until
from tests.net.swarm import AT_ONCE_S, PATIENT, Box, gone, join, peer_process

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_daemon_is_left")]


async def private(seed: Any, box: Box) -> Any:
    """A peer that listens nowhere, registered at the seed."""
    peer = await join(box, initial_peers=seed.addresses(), client_mode=True)
    await until(lambda: peer._circuits.registered, PATIENT.connect_timeout_s)
    assert peer.reach.private
    assert all("/p2p-circuit/" in address for address in peer.addresses())
    return peer


@awaited
async def test_two_private_peers_exchange_through_a_relay() -> None:
    """Messages and payloads, in both directions; when the relay ends so do their links, in bounded time."""
    seed, boxes = await join(), (Box(), Box())
    a, b = [await private(seed, box) for box in boxes]
    for one, other, box in ((a, b, boxes[1]), (b, a, boxes[0])):
        await one.introduce(other.peer_id, other.addresses())
        await one.send(other.peer_id, b"hello")
        assert await asyncio.wait_for(box.headers.get(), AT_ONCE_S) == b"hello"
        await one.send(other.peer_id, b"bulk", memoryview(bytes(1 << 20)))
        assert await asyncio.wait_for(box.headers.get(), AT_ONCE_S) == b"bulk"
        assert one.traffic.ways() == {other.peer_id: "relayed"}
    await seed.close()
    for box, other in ((boxes[0], b), (boxes[1], a)):
        assert await asyncio.wait_for(box.closed_peers.get(), AT_ONCE_S) == other.peer_id
    with pytest.raises(Unreachable) as caught:
        await a.send(b.peer_id, b"anyone?")
    assert not caught.value.refused
    await asyncio.wait_for(asyncio.gather(a.close(), b.close()), AT_ONCE_S)


@awaited
async def test_a_killed_private_peer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay says so at once; the dial then counts as refused."""
    monkeypatch.setattr(paths, "HEAD_START_S", 0.05)
    seed = await join()
    with contextlib.ExitStack() as processes:  # it joins while this loop serves
        started = await asyncio.to_thread(processes.enter_context, peer_process(*seed.addresses()))
        process, peer_id, _, daemon = started
        a = await private(seed, Box())
        await until(lambda: peer_id in seed._relay._registered, PATIENT.connect_timeout_s)
        address = f"{seed.addresses()[0]}/p2p-circuit/p2p/{peer_id}"
        await a.introduce(peer_id, [address])
        await a.send(peer_id, b"hello")
        process.kill()
        await until(lambda: peer_id not in seed._relay._registered, AT_ONCE_S)
        refused = False
        for _ in range(50):
            with pytest.raises(Unreachable) as caught:
                await a.send(peer_id, b"anyone?")
            if refused := caught.value.refused:
                break
        assert refused
        await until(lambda: gone(daemon), AT_ONCE_S)
        await a.close()
    await seed.close()
