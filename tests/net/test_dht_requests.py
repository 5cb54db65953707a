"""What strangers ask the DHT for costs little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2p_diloco.net import records
from p2p_diloco.net.hivemind_library import DHTID, PeerID, dht_pb2
from p2p_diloco.net.records import (
    BURST_BYTES,
    BYTES_PER_S,
    FOUND_BYTES_MAX,
    IDS_MAX,
    IDS_S,
    KEYS_MAX,
    STORED_BYTES_MAX,
    STORED_KEYS_MAX,
    Ids,
    bounded,
    cheap,
)
from p2p_diloco.net.shares import Budget
from tests.net.patience import awaited, until
from tests.net.swarm import Join, real


class Asked:
    """A member of the DHT that answers with `nbytes` for each key."""

    def __init__(self, nbytes: int = 10, budget: Budget | None = None) -> None:
        self.asked: list[bytes] = []
        self._nbytes = nbytes
        self._answer = bounded(self._find, budget or Budget(BURST_BYTES, BYTES_PER_S))

    async def _find(self, _: Any, request: Any, context: Any) -> Any:
        self.asked += request.keys
        return dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=bytes(self._nbytes)) for _ in request.keys])

    async def ask(self, *keys: bytes, sender: str = "eve") -> Any:
        return await self._answer(None, dht_pb2.FindRequest(keys=keys), SimpleNamespace(remote_id=sender))


@awaited
async def test_a_request_costs_little() -> None:
    # a key that is named again is looked up once
    peer = Asked()
    assert len((await peer.ask(*[b"a", b"b"] * 100_000)).results) == 2
    assert peer.asked == [b"a", b"b"]

    # a request for many keys is refused before any is looked up
    peer = Asked()
    with pytest.raises(ValueError, match="names 5 keys, at most 4"):
        await peer.ask(*(b"%d" % number for number in range(KEYS_MAX + 1)))
    assert peer.asked == []

    # an answer fits into a message
    with pytest.raises(ValueError, match="at most 3145728 are sent"):
        await Asked(FOUND_BYTES_MAX).ask(b"a")


@awaited
async def test_who_asks_for_much_waits_and_the_others_dont(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender gets a burst, and then so much a second."""
    now = 100.0
    monkeypatch.setattr(records.time, "monotonic", lambda: now)
    peer = Asked(2**20)
    for _ in range(BURST_BYTES // 2**20):
        await peer.ask(b"a")
    with pytest.raises(ValueError, match="too much lately"):
        await peer.ask(b"a")
    await peer.ask(b"a", sender="bob")
    now += 2**20 / BYTES_PER_S
    await peer.ask(b"a")
    with pytest.raises(ValueError, match="too much lately"):
        await peer.ask(b"a")


@awaited
async def test_who_costs_much_processor_time_is_refused_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its requests say; the others are served."""
    now, spent = 100.0, 0.0
    monkeypatch.setattr(records.time, "thread_time", lambda: spent)
    monkeypatch.setattr(records.time, "monotonic", lambda: now)
    peer = Asked()

    async def slow(self: Any, request: Any, context: Any) -> Any:
        nonlocal spent
        spent += 0.5
        return dht_pb2.StoreResponse()

    peer._answer = cheap(slow, Budget(2.0, 0.1), Ids())
    for _ in range(4):
        await peer.ask(b"a")
    with pytest.raises(ValueError, match="cost too much lately"):
        await peer.ask(b"a")
    await peer.ask(b"a", sender="bob")
    now += 1.0
    await peer.ask(b"a")


def test_a_member_may_have_another_id_now_and_then() -> None:
    """It has one for each of its starts."""
    now = 100.0
    ids = Ids(lambda: now)
    assert [ids.has("eve", b"%d" % number) for number in range(IDS_MAX + 2)] == [True] * IDS_MAX + [False] * 2
    assert ids.has("eve", b"%d" % (IDS_MAX - 1))
    assert ids.has("bob", b"0")
    now += IDS_S
    assert ids.has("eve", b"new")


def test_the_senders_that_are_counted_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ASKERS_MAX", 10)
    ids = Ids()
    assert all(ids.has(str(number), b"x") for number in range(100))
    assert len(ids._of) <= 10


@real
async def test_members_of_the_dht_have_these_limits(join: Join) -> None:
    """Over libp2p: a record is found as ever, and a request for too much is answered with an error."""
    a = await join()
    b = await join(initial_peers=a.addresses())
    assert await a.store("key", "x", b"1", 60.0)
    assert set(await b.fetch("key")) == {"x"}
    stub = b._dht._node.protocol.get_stub(PeerID.from_base58(a.peer_id))
    for count, nbytes in ((STORED_KEYS_MAX + 1, 1), (1, STORED_BYTES_MAX)):
        said = {"keys": [bytes(20)] * count, "values": [bytes(nbytes)] * count, "in_cache": [False] * count}
        request = dht_pb2.StoreRequest(expiration_time=[9e9] * count, **said)
        with pytest.raises(Exception, match="at most 256 keys and 1048576 bytes"):
            await stub.rpc_store(request, timeout=5.0)
    with pytest.raises(Exception, match="names 5 keys"):
        await stub.rpc_find(dht_pb2.FindRequest(keys=[bytes([n]) * 20 for n in range(5)]), timeout=5.0)


@real
async def test_one_stranger_has_one_place_in_the_routing_table(join: Join) -> None:
    """Over libp2p: it pings with invented ids beside a key, and is in the table under the last that it may have."""
    a = await join()
    eve = await join(initial_peers=a.addresses())
    stub = eve._dht._node.protocol.get_stub(PeerID.from_base58(a.peer_id))
    for number in range(20):
        invented = dht_pb2.NodeInfo(node_id=DHTID(number).to_bytes())
        await stub.rpc_ping(dht_pb2.PingRequest(peer=invented), timeout=5.0)
    table = a._dht._node.protocol.routing_table
    await until(lambda: eve.peer_id in [str(peer) for peer in table.uid_to_peer_id.values()])
    assert [str(peer) for peer in table.uid_to_peer_id.values()] == [eve.peer_id]
    with pytest.raises(Exception, match="too many ids"):
        await stub.rpc_find(dht_pb2.FindRequest(keys=[bytes(20)], peer=invented), timeout=5.0)
