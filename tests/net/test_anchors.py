"""A stranger that invents ids of the DHT beside a run's keys hides no record."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_diloco.net.hivemind_library import DHTID, DHTLocalStorage, PeerID, dht_pb2
from p2p_diloco.observe.snapshot import observer
from tests.net.patience import awaited, until
from tests.net.swarm import join

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_daemon_is_left")]

INVENTED = 25
"""More than the members that keep a record, and than those of which a search begins."""


class Forgets(DHTLocalStorage):  # type: ignore[misc]  # Hivemind has no types
    """Says that it stores, and has nothing."""

    def store(self, *_: Any, **__: Any) -> bool:
        return True

    store_subkey = store


async def surround(eve: Any, key: str, *victims: Any) -> None:
    """Eve has ids nearer to the key than any honest member, as far as the victims know; one peer is taken under one id,
    so this stands for as many strangers. She answers, stores nothing, and knows nobody else."""
    protocol, nearest = eve._dht._node.protocol, int(DHTID.generate(source=key))
    protocol.storage = Forgets()
    protocol.routing_table.get_nearest_neighbors = lambda *_, **__: []
    for victim in victims:
        stub = protocol.get_stub(PeerID.from_base58(victim.peer_id))
        await stub.rpc_ping(dht_pb2.PingRequest(), timeout=10.0)  # connects them
        table, peer = victim._dht._node.protocol.routing_table, PeerID.from_base58(eve.peer_id)
        for number in range(INVENTED):
            table.add_or_update_node(DHTID(nearest ^ number), peer)
        assert [str(peer) for _, peer in table.get_nearest_neighbors(DHTID(nearest), 5)] == [eve.peer_id] * 5


async def stores(peer: Any, subkey: str, value: bytes) -> None:
    """Store a record. On a busy machine it may take longer than its deadline; a peer stores its records again, too."""
    while not await peer.store("key", subkey, value, 60.0):
        pass


@awaited
async def test_a_record_is_found_though_a_stranger_surrounds_its_key() -> None:
    """By a newcomer, by an observer such as `status`, by the initial peer, and by the peer that stored it."""
    boot = await join()
    member = await join(initial_peers=boot.addresses())
    eve = await join(initial_peers=boot.addresses())
    await surround(eve, "key", boot, member)
    await stores(member, "x", b"1")
    await stores(boot, "y", b"2")
    newcomer = await join(initial_peers=boot.addresses())
    await surround(eve, "key", newcomer)
    try:
        for who in (newcomer, boot, member):
            assert {name: value for name, (value, _) in (await who.fetch("key")).items()} == {"x": b"1", "y": b"2"}
        async with observer(boot.addresses()) as watching:
            assert set(await watching.fetch("key")) == {"x", "y"}
    finally:
        for one in (newcomer, eve, member, boot):
            await one.close()


@awaited
async def test_who_was_met_earlier_is_asked_for_what_nobody_has() -> None:
    """A bootstrap that has just started knows nothing, and a stranger has surrounded the key."""
    elsewhere = await join()
    member = await join(initial_peers=elsewhere.addresses())
    await stores(member, "x", b"1")
    boot = await join()
    eve = await join(initial_peers=boot.addresses())
    returning = await join(initial_peers=boot.addresses())
    await surround(eve, "key", boot, returning)
    try:
        assert await returning.fetch("key") == {}
        returning.meet([*boot.addresses(), *member.addresses()])
        await until(lambda: len(returning._dht._anchors._met) == 2)
        assert set(await returning.fetch("key")) == {"x"}
    finally:
        for one in (returning, eve, boot, member, elsewhere):
            await one.close()


@awaited
async def test_an_initial_peer_that_is_gone_costs_no_record() -> None:
    """The others have what it had."""
    boot = await join()
    a = await join(initial_peers=boot.addresses())
    b = await join(initial_peers=[*boot.addresses(), *a.addresses()])
    await boot.close()
    try:
        await stores(a, "x", b"1")
        assert set(await b.fetch("key")) == {"x"}
    finally:
        await b.close()
        await a.close()
