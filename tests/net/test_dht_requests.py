"""What strangers ask the DHT for costs little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2p_diloco.net import dht_requests
from p2p_diloco.net.dht_requests import BURST_BYTES, BYTES_PER_S, FOUND_BYTES_MAX, KEYS_MAX, Allowance, bounded
from p2p_diloco.net.hivemind_library import PeerID, dht_pb2
from tests.net.patience import awaited
from tests.net.swarm import join


class Asked:
    """A member of the DHT that answers with `nbytes` for each key."""

    def __init__(self, nbytes: int = 10, allowance: Allowance | None = None) -> None:
        self.asked: list[bytes] = []
        self._nbytes = nbytes
        self._answer = bounded(self._find, allowance or Allowance())

    async def _find(self, _: Any, request: Any, context: Any) -> Any:
        self.asked += request.keys
        return dht_pb2.FindResponse(results=[dht_pb2.FindResult(value=bytes(self._nbytes)) for _ in request.keys])

    async def ask(self, *keys: bytes, sender: str = "eve") -> Any:
        return await self._answer(None, dht_pb2.FindRequest(keys=keys), SimpleNamespace(remote_id=sender))


@awaited
async def test_a_key_that_is_named_again_is_looked_up_once() -> None:
    peer = Asked()
    assert len((await peer.ask(*[b"a", b"b"] * 100_000)).results) == 2
    assert peer.asked == [b"a", b"b"]


@awaited
async def test_a_request_for_many_keys_is_refused_before_any_is_looked_up() -> None:
    peer = Asked()
    with pytest.raises(ValueError, match="names 5 keys, at most 4"):
        await peer.ask(*(b"%d" % number for number in range(KEYS_MAX + 1)))
    assert peer.asked == []


@awaited
async def test_an_answer_fits_into_a_message() -> None:
    with pytest.raises(ValueError, match="at most 3145728 are sent"):
        await Asked(FOUND_BYTES_MAX).ask(b"a")


@awaited
async def test_who_asks_for_much_waits_and_the_others_dont() -> None:
    """A sender gets a burst, and then so much a second."""
    now = 100.0
    peer = Asked(2**20, Allowance(lambda: now))
    for _ in range(BURST_BYTES // 2**20):
        await peer.ask(b"a")
    with pytest.raises(ValueError, match="too much lately"):
        await peer.ask(b"a")
    await peer.ask(b"a", sender="bob")
    now += 2**20 / BYTES_PER_S
    await peer.ask(b"a")
    with pytest.raises(ValueError, match="too much lately"):
        await peer.ask(b"a")


def test_the_senders_that_are_counted_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_requests, "SENDERS_MAX", 10)
    allowance = Allowance()
    for number in range(100):
        allowance.got(str(number), 1)
    assert len(allowance._used) <= 10


@pytest.mark.real
@awaited
async def test_members_of_the_dht_have_these_limits() -> None:
    """Over libp2p: a record is found as ever, and a request for too much is answered with an error."""
    a = await join()
    b = await join(initial_peers=a.addresses())
    try:
        assert await a.store("key", "x", b"1", 60.0)
        assert set(await b.fetch("key")) == {"x"}
        stub = b._dht._node.protocol.get_stub(PeerID.from_base58(a.peer_id))
        with pytest.raises(Exception, match="names 5 keys"):
            await stub.rpc_find(dht_pb2.FindRequest(keys=[bytes([n]) * 20 for n in range(5)]), timeout=5.0)
    finally:
        await b.close()
        await a.close()
