"""Joining a DHT and staying in it: identities, initial peers, clocks; and that no stranger hides a record."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.errors import NoBootstrapReached, Refused
from p2p_diloco.net.hivemind_library import DHTID, DHTLocalStorage, PeerID, dht_pb2
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.private_files import read_key
from p2p_diloco.observe.snapshot import observer
from tests.net.patience import until
from tests.net.swarm import STRANGER, Join, real


@real
async def test_errors_of_hivemind_become_failed_calls(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Hivemind raises: a record isn't stored, a key can't be read, a stream can't be opened."""
    a = await join()

    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the daemon speaks in riddles")

    node, client = a._dht._node, a._dht.daemon.p2p
    with monkeypatch.context() as patch:
        for owner, name in ((node, "store"), (node, "get"), (client, "call_binary_stream_handler")):
            patch.setattr(owner, name, fail)
        assert not await a.store("k", "s", b"v", 30.0)
        with pytest.raises(Unreachable, match="riddles"):
            await a.fetch("k")
        with pytest.raises(Unreachable, match="riddles"):
            await a.send(STRANGER, b"hello")


@real
async def test_no_initial_peer_reached_says_why_for_each(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connection refused, silence, another peer: each address with its reason."""
    monkeypatch.setattr("p2p_diloco.net.daemon.DIAL_S", 3.0)
    seed = await join()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        refused = f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}"
        other = seed.addresses()[0].rpartition("/")[0] + "/QmZKXnHKqqS7m6rrLSjDhCAhAjA6pD96y2SDZvwevAf5Yu"
        port, third = silent.getsockname()[1], "QmWXYrvWj6aas2wh5mZbNuP7AAcvLxCHGf5b7jsjEjMHj3"
        mute = f"/ip4/127.0.0.1/tcp/{port}/p2p/{third}"
        with pytest.raises(NoBootstrapReached) as error:
            await join(initial_peers=[refused, other, mute])
    text = str(error.value)
    assert f"{refused} (connection refused" in text
    assert f"{other} (another peer answers there: its id is {seed.peer_id}" in text
    assert f"{mute} (timed out" in text


@real
async def test_a_joiner_with_a_wrong_clock_is_refused(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is 10 s behind would make it lose every record."""
    import hivemind.dht.protocol

    seed = await join()
    monkeypatch.setattr(hivemind.dht.protocol, "get_dht_time", lambda: time.time() + 10)
    with pytest.raises(Refused, match=r"clock is 10\.\d s behind.*NTP"):
        await join(initial_peers=seed.addresses())


@pytest.mark.parametrize("same", [True, False])
@real
async def test_a_restarted_bootstrap_is_joined_again(
    join: Join, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed that comes back empty at its port, under its identity or a new one, connects old and new peers. The daemon
    and this package read the same id from an identity file."""
    monkeypatch.setattr("p2p_diloco.net.dht.REJOIN_EVERY_S", 0.2)
    path = str(tmp_path / "identity") if same else None
    seed = await join(identity_path=path)
    assert path is None or seed.peer_id == read_key(Path(path)).peer_id
    addresses = seed.addresses()
    old = await join(initial_peers=addresses)
    await seed.close()
    assert await old.store("key", "old", b"1", 600.0)  # also drops the seed from its table
    seed = await join(identity_path=path, host_maddrs=[addresses[0].rpartition("/p2p/")[0]])
    assert (seed.addresses() == addresses) is same
    new = await join(initial_peers=seed.addresses())
    deadline = time.monotonic() + 60
    while set(await new.fetch("key")) != {"old"}:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


# -- a stranger that invents ids of the DHT beside a run's keys

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


@real
async def test_a_record_is_found_though_a_stranger_surrounds_its_key(join: Join) -> None:
    """By a newcomer, by an observer such as `status`, by the initial peer, and by the peer that stored it."""
    boot = await join()
    member = await join(initial_peers=boot.addresses())
    eve = await join(initial_peers=boot.addresses())
    await surround(eve, "key", boot, member)
    await stores(member, "x", b"1")
    await stores(boot, "y", b"2")
    newcomer = await join(initial_peers=boot.addresses())
    await surround(eve, "key", newcomer)
    for who in (newcomer, boot, member):
        assert {name: value for name, (value, _) in (await who.fetch("key")).items()} == {"x": b"1", "y": b"2"}
    async with observer(boot.addresses()) as watching:
        assert set(await watching.fetch("key")) == {"x", "y"}


@real
async def test_who_was_met_earlier_is_asked_for_what_nobody_has(join: Join) -> None:
    """A bootstrap that has just started knows nothing, and a stranger has surrounded the key."""
    elsewhere = await join()
    member = await join(initial_peers=elsewhere.addresses())
    await stores(member, "x", b"1")
    boot = await join()
    eve = await join(initial_peers=boot.addresses())
    returning = await join(initial_peers=boot.addresses())
    await surround(eve, "key", boot, returning)
    assert await returning.fetch("key") == {}
    returning.meet([*boot.addresses(), *member.addresses()])
    await until(lambda: len(returning._dht._anchors._met) == 2)
    assert set(await returning.fetch("key")) == {"x"}


@real
async def test_an_initial_peer_that_is_gone_costs_no_record(join: Join) -> None:
    """The others have what it had."""
    boot = await join()
    a = await join(initial_peers=boot.addresses())
    b = await join(initial_peers=[*boot.addresses(), *a.addresses()])
    await boot.close()
    await stores(a, "x", b"1")
    assert set(await b.fetch("key")) == {"x"}
