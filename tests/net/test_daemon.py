"""p2pd: its start and end, its addresses, and what its dials tell of other peers."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time

import psutil
import pytest

from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.net.framing import VERSION
from p2p_diloco.net.interface import Unreachable
from tests.net.patience import awaited, run, until
from tests.net.swarm import AT_ONCE_S, STRANGER, gone, join, peer_process

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_daemon_is_left")]


@awaited
async def test_who_is_unknown_or_of_another_run_or_version_is_not_taken_for_dead(
    recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs may share a DHT. No request that fails leaves a connection to the daemon open: the garbage collector
    would close it, in any thread, and Python would warn of it."""
    gc.collect()  # what other tests have left
    recwarn.clear()
    a = await join()
    b = await join(run_id="another", initial_peers=a.addresses())
    monkeypatch.setattr("p2p_diloco.net.hivemind.VERSION", VERSION - 1)
    old = await join(direct=False)
    for other in (b, old):
        await a.introduce(other.peer_id, other.addresses())
    in_another = "isn't in this run, or speaks another version"
    for peer, why in ((b.peer_id, in_another), (old.peer_id, in_another), (STRANGER, "isn't known")):
        for payload in (None, memoryview(bytes(1000))):
            with pytest.raises(Unreachable, match=why) as caught:
                await a.send(peer, b"hello", payload)
            assert not caught.value.refused, str(caught.value)
    await asyncio.sleep(0.1)
    gc.collect()
    for one in (old, b, a):
        await one.close()
    assert [str(w.message) for w in recwarn if "StreamWriter" in str(w.message)] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@awaited
async def test_the_daemons_death_is_reported(number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    """The node is told why, and later calls fail at once. It is no error in the log if the daemon was asked to end, as
    ^C in a terminal, or the stop of a service, asks each process."""
    reasons: asyncio.Queue[str] = asyncio.Queue()
    transport = await join(on_daemon_death=reasons.put_nowait)
    os.kill(transport._dht.daemon.p2p._child.pid, number)
    assert "daemon" in await asyncio.wait_for(reasons.get(), AT_ONCE_S)
    errors = [each.getMessage() for each in caplog.records if each.levelno > logging.INFO]
    assert any("daemon ended" in error for error in errors) is (number == signal.SIGKILL)
    with pytest.raises(Unreachable, match="daemon"):
        await transport.send(STRANGER, b"hello")
    started = time.monotonic()
    await transport.close()
    assert time.monotonic() - started < AT_ONCE_S


@awaited
async def test_a_dead_peer_is_recognised_while_the_daemon_does_not_dial() -> None:
    """After a failed dial, e.g. by the DHT, the daemon makes no other for 5 s and doesn't tell the result. A plain
    connection then tells whether a process listens there, and a living peer is not taken for a dead one."""
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    from p2p_diloco.net.daemon import all_refuse

    with peer_process() as (process, peer_id, address, daemon):
        transport = await join(initial_peers=[address])
        host = address.partition("/p2p/")[0]
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            closed = f"/ip4/127.0.0.1/tcp/{listening.getsockname()[1]}"
        await transport.introduce(peer_id, [address])
        process.kill()
        await until(lambda: gone(daemon), 30.0)

        async def dial_fails() -> None:
            """Once this peer's own daemon has seen the connection break; until then it dials none."""
            while True:
                await transport._dht.daemon.p2p._client.connect(PeerID.from_base58(peer_id), [Multiaddr(host)])
                await asyncio.sleep(0.01)

        with pytest.raises(Exception, match="failed to dial"):
            await asyncio.wait_for(dial_fails(), 30.0)
        for _ in range(2):
            with pytest.raises(Unreachable, match="a moment ago") as caught:
                await transport.send(peer_id, b"anyone?")
            assert caught.value.refused
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        mute = f"/ip4/127.0.0.1/tcp/{listening.getsockname()[1]}"
        assert not await all_refuse([mute, closed])
        assert await all_refuse([closed])
        assert not await all_refuse(["/ip4/127.0.0.1/udp/9/quic-v1"])
        assert not await all_refuse([])
    await transport.close()


@awaited
async def test_announced_addresses_replace_the_daemons() -> None:
    """Behind a forwarded port other peers are told the outer address; one without a port is an error. After `close` no
    process is left, and `on_daemon_death` isn't called for an end that was asked for."""
    outer, reasons = "/ip4/203.0.113.5/tcp/31337", list[str]()
    transport = await join(announce_maddrs=[outer], on_daemon_death=reasons.append)
    daemon = transport._dht.daemon.p2p._child.pid
    assert transport.addresses() == [f"{outer}/p2p/{transport.peer_id}"]
    await transport.close()
    assert gone(daemon)
    assert reasons == []
    with pytest.raises(ConfigError, match="port 0"):
        await join(announce_maddrs=["/ip4/203.0.113.5/tcp/0"])


@awaited
async def test_a_peer_is_found_where_libp2p_has_proven_it_and_not_where_it_claims_to_be() -> None:
    """Also a peer that has dialled this one, and that listens nowhere; a peer that isn't found is nowhere."""
    a = await join()
    b = await join(initial_peers=a.addresses(), client_mode=True)
    place, _, _ = a.addresses()[0].partition("/p2p/")
    await b.introduce(a.peer_id, [f"/ip4/192.0.2.1/tcp/22/p2p/{a.peer_id}", *a.addresses()])
    assert await b._dht.daemon.found_at(a.peer_id) == [place]
    (found,) = await a._dht.daemon.found_at(b.peer_id)
    assert found.startswith("/ip4/127.0.0.1/tcp/")
    assert await a._dht.daemon.found_at(STRANGER) == []
    await b.close()
    await a.close()


@pytest.mark.parametrize("turns", range(1, 9, 2))
def test_a_cancelled_start_ends_and_leaves_no_process(turns: int) -> None:
    """It is cancelled in one of the loop's first turns, while the daemon's process begins."""
    from p2p_diloco.net.dht import DhtPeer

    before = set(psutil.Process().children(recursive=True))

    async def test() -> None:
        starting = asyncio.ensure_future(DhtPeer.create(PeerConfig()))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting], timeout=30)
        assert starting.cancelled()

    run(test())
    assert all(gone(process.pid) for process in set(psutil.Process().children(recursive=True)) - before)


@awaited
async def test_no_daemon_relays_for_strangers() -> None:
    """Neither a peer's nor one's that listens nowhere. As Hivemind starts it, a daemon would pass on 128 KiB within two
    minutes, again and again."""
    boot = await join()
    hidden = await join(initial_peers=boot.addresses(), client_mode=True)
    eve = await join(initial_peers=boot.addresses())
    try:
        await boot._dht.daemon.greet(eve.addresses()[0])
        await hidden._dht.daemon.greet(eve.addresses()[0])
        for peer in (boot.peer_id, hidden.peer_id):
            with pytest.raises(Unreachable, match="it isn't in this run"):
                await eve._dht.daemon.open_stream(peer, "/libp2p/circuit/relay/0.2.0/hop", timeout_s=10.0)
    finally:
        for one in (eve, hidden, boot):
            await one.close()
