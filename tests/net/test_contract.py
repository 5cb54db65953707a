"""The contract between transport and node: the same tests for every transport."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.config import PeerConfig
from p2p_diloco.net.interface import VALUE_BYTES_MAX, Limits, Refusal, Transport, Unreachable
from tests.net.inboxes import Box
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until

LIMITS = Limits(payload_bytes_max=80 << 20, connect_timeout_s=30.0, read_timeout_s=30.0, write_timeout_s=30.0)
AT_ONCE_S = 8.0
"""What waits for no deadline takes far less, unless the machine stands still meanwhile."""


class MemorySwarm:
    def __init__(self) -> None:
        self.network = MemoryNetwork()

    async def join(self, limits: Limits = LIMITS) -> tuple[Transport, Box]:
        box = Box()
        return self.network.join(f"peer-{len(self.network.peers)}", box, limits=limits), box

    def kill(self, transport: Transport) -> None:
        self.network.kill(transport.peer_id)

    async def close(self) -> None:
        for transport in list(self.network.peers.values()):
            await transport.close()


class HivemindSwarm:
    """Peers in this process, each with a daemon of its own; the first is the others' initial peer."""

    def __init__(self) -> None:
        self.peers: list[Any] = []

    async def join(self, limits: Limits = LIMITS) -> tuple[Transport, Box]:
        from p2p_diloco.net.hivemind import HivemindTransport

        box = Box()
        initial_peers = self.peers[0].addresses() if self.peers else []
        local = PeerConfig(run_id="contract", initial_peers=initial_peers)
        transport = await HivemindTransport.create(box, local, limits=limits)
        for other in self.peers:
            await other.introduce(transport.peer_id, transport.addresses())
            await transport.introduce(other.peer_id, other.addresses())
        self.peers.append(transport)
        return transport, box

    def kill(self, transport: Transport) -> None:
        os.kill(transport._dht.daemon.p2p._child.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    async def close(self) -> None:
        for transport in self.peers:
            await transport.close()


@contextlib.asynccontextmanager
async def opened(way: str) -> AsyncIterator[MemorySwarm | HivemindSwarm]:
    """A swarm of the adapter in question; all of it ends with the context."""
    swarm = MemorySwarm() if way == "memory" else HivemindSwarm()
    try:
        yield swarm
    finally:
        await swarm.close()


WAYS = ["memory", pytest.param("libp2p", marks=pytest.mark.real)]


@pytest.fixture(params=WAYS)
def swarm(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """A context manager that gives a swarm of its own."""
    return lambda: opened(request.param)


@awaited
async def test_messages_arrive_in_order_and_refusals_come_back(swarm: Any) -> None:
    """Messages without payload arrive under the sender's id, in the order of the calls, though none waits for the one
    before. A refusal's reason reaches the sender, with and without a payload; a fault in the receiver's own code gives
    nothing away. What follows is taken as before, and answers go to those that they are for, also after one of the
    senders has gone."""
    async with swarm() as s:
        (a, _), (b, inbox) = await s.join(), await s.join()
        sent = [f"{number}".encode() for number in range(200)]
        await asyncio.gather(*(a.send(b.peer_id, header) for header in sent))
        assert inbox.got == [(a.peer_id, header, None) for header in sent]

        entered, release = asyncio.Event(), asyncio.Event()

        async def judge(header: bytes) -> None:
            if header == b"bad":
                raise KeyError("a secret")
            if header == b"no":
                raise Refusal("not today")
            if header == b"given up":
                entered.set()
                await release.wait()

        inbox.on_deliver = judge
        for payload in (None, memoryview(b"x" * 100)):
            with pytest.raises(Refusal) as refused:
                await a.send(b.peer_id, b"no", payload)
            assert refused.value.reason == "not today"
            with pytest.raises(Refusal) as refused:
                await a.send(b.peer_id, b"bad", payload)
            assert "secret" not in refused.value.reason
        assert b.traffic.peers[a.peer_id].refused == 4

        given_up = asyncio.create_task(a.send(b.peer_id, b"given up"))
        await entered.wait()
        given_up.cancel()
        await asyncio.wait([given_up])
        release.set()
        with pytest.raises(Refusal):
            await a.send(b.peer_id, b"no")
        await a.send(b.peer_id, b"yes")
        assert inbox.headers[-1] == b"yes"


@awaited
async def test_sizes_are_limited_at_both_ends(swarm: Any) -> None:
    """What is longer than the inbox admits is refused with both sizes, and never held; a header or payload over this
    side's limits is refused here. A payload of no bytes arrives as such, not as none."""
    async with swarm() as s:
        (a, _), (b, inbox) = await s.join(), await s.join()
        inbox.admitted_bytes = 1000
        payload = memoryview(bytearray(64 << 20))
        tracemalloc.start()
        with pytest.raises(Refusal, match="67108864 bytes is announced, at most 1000"):
            await a.send(b.peer_id, b"too big", payload)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 16 << 20
        assert inbox.got == []
        for nbytes in (1000, 0):
            await a.send(b.peer_id, b"fits", memoryview(bytes(nbytes)))
        assert [len(payload) for _, _, payload in inbox.got] == [1000, 0]
        before = a.traffic.bytes_sent
        with pytest.raises(Refusal, match="header"):
            await a.send(b.peer_id, bytes(LIMITS.header_bytes_max + 1))
        with pytest.raises(Refusal, match="payload"):
            await a.send(b.peer_id, b"", memoryview(bytearray(LIMITS.payload_bytes_max + 1)))
        await a.send(b.peer_id, bytes(LIMITS.header_bytes_max))
        assert len(inbox.got) == 3
        assert a.traffic.bytes_sent - before < LIMITS.header_bytes_max + 1000


@awaited
async def test_a_death_is_noticed_at_once(swarm: Any) -> None:
    """When a peer is killed, sends under way to it end, and those with a link to or from it hear `closed`, long before
    any deadline. That proves nothing; a dial afterwards is refused, and says so."""
    async with swarm() as s:
        (a, inbox_a), (b, inbox), (c, inbox_c) = await s.join(), await s.join(), await s.join()
        await b.send(c.peer_id, b"to c")
        reached = list[bytes]()

        async def hang(header: bytes) -> None:
            reached.append(header)
            await asyncio.Event().wait()

        inbox.on_deliver = hang
        sends = [asyncio.create_task(a.send(b.peer_id, b"", payload)) for payload in (None, memoryview(bytes(1000)))]
        await until(lambda: len(reached) == len(sends))
        s.kill(b)
        results = await asyncio.wait_for(asyncio.gather(*sends, return_exceptions=True), AT_ONCE_S)
        assert [type(result) for result in results] == [Unreachable, Unreachable]
        assert not results[0].refused
        for box in (inbox_a, inbox_c):
            await until(lambda box=box: b.peer_id in box.closed_peers, AT_ONCE_S)
        for payload in (None, memoryview(b"x"), None):
            with pytest.raises(Unreachable) as caught:
                await asyncio.wait_for(a.send(b.peer_id, b"anyone?", payload), AT_ONCE_S)
            assert caught.value.refused, str(caught.value)
        await a.send(c.peer_id, b"still here")


@awaited
async def test_a_peer_that_never_answers_is_given_up(swarm: Any) -> None:
    """An inbox that doesn't return makes `send` end at the deadline, with and without a payload; one that was set
    later, for what begins then."""
    async with swarm() as s:
        (a, _), (b, inbox) = await s.join(replace(LIMITS, read_timeout_s=0.5)), await s.join()

        async def hang(header: bytes) -> None:
            await asyncio.sleep(60)

        inbox.on_deliver = hang
        started = time.monotonic()
        sends = [a.send(b.peer_id, b"", payload) for payload in (None, memoryview(b"x"))]
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(result) for result in results] == [Unreachable, Unreachable]
        assert 0.4 < time.monotonic() - started < AT_ONCE_S
        a.limits = replace(LIMITS, read_timeout_s=1.5)
        started = time.monotonic()
        with pytest.raises(Unreachable):
            await a.send(b.peer_id, b"", memoryview(b"x"))
        assert 1.4 < time.monotonic() - started < AT_ONCE_S


@awaited
async def test_closing_is_reported_to_the_others(swarm: Any) -> None:
    """The peer that closes hears nothing itself, and sends nothing more."""
    async with swarm() as s:
        (a, inbox_a), (b, inbox_b) = await s.join(), await s.join()
        await a.send(b.peer_id, b"hello")
        await b.close()
        await until(lambda: b.peer_id in inbox_a.closed_peers, AT_ONCE_S)
        assert inbox_b.closed_peers == []
        with pytest.raises(Unreachable):
            await b.send(a.peer_id, b"hello")
        await b.close()


@awaited
async def test_records_are_found_by_all_until_they_expire(swarm: Any) -> None:
    """Records of several peers under one key are found by each, with value and expiration; other keys hold nothing. A
    record replaces one that expires before it, and no other; the loser is told. One under another peer's id isn't
    found, however long it lives. One too large, too long-lived, or with too long a name is an error of the caller's."""
    async with swarm() as s:
        (a, _), (b, _), (c, _) = await s.join(), await s.join(), await s.join()
        key, now = "key", time.time()
        assert await a.store(key, a.peer_id, b"of a", 60.0)
        assert await b.store(key, b.peer_id + "/loss", bytes(1024), 30.0)
        assert await b.store(key, "anyone's", b"free", 60.0, owned=False)
        for transport in (a, b, c):
            found = await transport.fetch(key)
            assert {name: value for name, (value, _) in found.items()} == {
                a.peer_id: b"of a",
                b.peer_id + "/loss": bytes(1024),
                "anyone's": b"free",
            }
            assert found[a.peer_id][1] == pytest.approx(now + 60, abs=20)
            assert await transport.fetch("another key") == {}

        for owned in (True, False):
            await b.store("forged", a.peer_id, b"forged", 600.0, owned=owned)
        assert await c.fetch("forged") == {}
        assert await a.store("forged", a.peer_id, b"true", 60.0)
        assert (await c.fetch("forged"))[a.peer_id][0] == b"true"

        assert await a.store("twice", "x", b"first", 30.0)
        assert await a.store("twice", "x", b"longer", 60.0)
        assert not await a.store("twice", "x", b"shorter", 10.0)
        assert (await b.fetch("twice"))["x"][0] == b"longer"
        assert await b.store("twice", "x", b"another's", 90.0)
        assert (await a.fetch("twice"))["x"][0] == b"another's"

        assert await a.store("short", "long", b"2", 60.0)
        found, began = {}, time.time()
        while set(found) != {"short", "long"}:
            assert not found or time.time() > began + 1.0  # else this machine has not stood still
            began = time.time()
            assert await a.store("short", "short", b"1", 1.0)
            found = await b.fetch("short")
        await asyncio.sleep(1.1)
        assert set(await b.fetch("short")) == {"long"}

        for bad in (("x", bytes(VALUE_BYTES_MAX + 1), 60.0), ("x", b"", 1e9), ("x", b"", 0.0), ("x" * 257, b"", 60.0)):
            with pytest.raises(ValueError, match="record"):
                await a.store(key, *bad)
