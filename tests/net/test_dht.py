"""Joining a DHT and staying in it: identities, initial peers, clocks."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import NoBootstrapReached, Refused
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.private_files import read_key
from tests.net.patience import awaited
from tests.net.swarm import STRANGER, join

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_daemon_is_left")]


@awaited
async def test_errors_of_hivemind_become_failed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
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
    await a.close()


@awaited
async def test_no_initial_peer_reached_says_why_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
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
    await seed.close()


@awaited
async def test_a_joiner_with_a_wrong_clock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is 10 s behind would make it lose every record."""
    import hivemind.dht.protocol

    seed = await join()
    monkeypatch.setattr(hivemind.dht.protocol, "get_dht_time", lambda: time.time() + 10)
    with pytest.raises(Refused, match=r"clock is 10\.\d s behind.*NTP"):
        await join(initial_peers=seed.addresses())
    await seed.close()


@awaited
@pytest.mark.parametrize("same", [True, False])
async def test_a_restarted_bootstrap_is_joined_again(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed that comes back empty at its port, under its identity or a new one, connects old and new peers. The daemon
    and this package read the same id from an identity file."""
    monkeypatch.setattr("p2p_diloco.net.dht.REJOIN_EVERY_S", 0.2)
    from p2p_diloco.net.dht import DhtPeer

    path = str(tmp_path / "identity") if same else None
    seed = await DhtPeer.create(PeerConfig(identity_path=path))
    assert path is None or seed.peer_id == read_key(Path(path)).peer_id
    old = await DhtPeer.create(PeerConfig(initial_peers=seed.daemon.addresses))
    host, address = seed.daemon.addresses[0].rpartition("/p2p/")[0], seed.daemon.addresses
    await seed.close()
    assert await old.store("key", "old", b"1", 600.0)  # also drops the seed from its table
    seed = await DhtPeer.create(PeerConfig(identity_path=path, host_maddrs=[host]))
    assert (seed.daemon.addresses == address) is same
    new = await DhtPeer.create(PeerConfig(initial_peers=seed.daemon.addresses))
    deadline = time.monotonic() + 60
    while set(await new.fetch("key")) != {"old"}:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    for peer in (new, old, seed):
        await peer.close()
