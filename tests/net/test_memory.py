"""Faults that a test can cause in a swarm in memory."""

from __future__ import annotations

import asyncio
import time

import pytest

from p2p_diloco.net.interface import Limits, Unreachable
from tests.net.inboxes import Quiet
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited


class Box(Quiet):
    def __init__(self) -> None:
        self.headers: list[bytes] = []
        self.closed_peers: list[str] = []

    def admit(self, sender: str, header: bytes) -> int:
        return 0

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        self.headers.append(header)

    def closed(self, peer: str) -> None:
        self.closed_peers.append(peer)


@awaited
async def test_a_cut_is_silent_and_heals() -> None:
    """Two cut peers exchange nothing and get no report, even of a death; other peers notice nothing; healing ends the
    cut."""
    network = MemoryNetwork()
    boxes = {name: Box() for name in "abc"}
    limits = Limits(connect_timeout_s=0.05)
    a, _, c = (network.join(name, boxes[name], limits=limits) for name in "abc")
    await a.send("b", b"1")
    network.cut("a", "b")
    started = time.monotonic()
    with pytest.raises(Unreachable):
        await a.send("b", b"2")
    assert time.monotonic() - started >= 0.05
    await c.send("b", b"3")
    network.heal()
    await a.send("b", b"4")
    assert boxes["b"].headers == [b"1", b"3", b"4"]
    network.cut("a", "b")
    network.kill("b")
    await asyncio.sleep(0)
    assert [boxes[name].closed_peers for name in "abc"] == [[], [], ["b"]]


@awaited
async def test_messages_take_as_long_as_the_network_says() -> None:
    """`delay_s` passes before a message is delivered."""
    network = MemoryNetwork(delay_s=0.05)
    box = Box()
    a, _ = network.join("a", Box()), network.join("b", box)
    started = time.monotonic()
    await a.send("b", b"1")
    assert time.monotonic() - started >= 0.05
    assert box.headers == [b"1"]


@awaited
async def test_records_follow_the_networks_clock() -> None:
    """A record expires by the clock that the test turns, not by the wall's."""
    now = 100.0
    network = MemoryNetwork(clock=lambda: now)
    a = network.join("a", Box())
    assert await a.store("key", "a", b"1", 10.0)
    assert await a.fetch("key") == {"a": (b"1", 110.0)}
    now = 110.0
    assert await a.fetch("key") == {}


@awaited
async def test_a_name_can_come_back() -> None:
    """A peer that was killed may start again under its name, and is reached as before."""
    network, box = MemoryNetwork(), Box()
    a, _ = network.join("a", Box()), network.join("b", Box())
    await a.send("b", b"1")
    network.kill("b")
    network.join("b", box)
    await a.send("b", b"2")
    assert box.headers == [b"2"]
