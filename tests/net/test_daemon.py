"""p2pd: its start and end, its addresses, and what its dials tell of other peers."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket

import psutil
import pytest

from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.net import daemon
from p2p_diloco.net.daemon import DIALS_MAX, DIALS_S, HOSTS_MAX, PROVEN_MAX, Unproven
from p2p_diloco.net.framing import VERSION
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.signing import SigningKey
from tests.net.patience import until
from tests.net.swarm import AT_ONCE_S, STRANGER, Join, gone, peer_process, real


@real
async def test_who_is_unknown_or_of_another_run_or_version_is_not_taken_for_dead(
    join: Join, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
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
    assert [str(w.message) for w in recwarn if "StreamWriter" in str(w.message)] == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@real
async def test_the_daemons_end_is_told(join: Join, number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    """The node is told why, direct connections end, and later calls fail at once. It is no error in the log if the
    daemon was asked to end, as ^C in a terminal, or the stop of a service, asks each process."""
    reasons: asyncio.Queue[str] = asyncio.Queue()
    transport, other = await join(on_daemon_death=reasons.put_nowait), await join()
    await other.introduce(transport.peer_id, transport.addresses())
    await other.send(transport.peer_id, b"bulk", memoryview(bytes(1000)))
    assert other.traffic.ways() == {transport.peer_id: "direct"}
    os.kill(transport._dht.daemon.p2p._child.pid, number)
    assert "daemon" in await asyncio.wait_for(reasons.get(), AT_ONCE_S)
    errors = [each.getMessage() for each in caplog.records if each.levelno > logging.INFO]
    assert any("daemon ended" in error for error in errors) is (number == signal.SIGKILL)
    listener = transport._exchange.direct.listener
    await until(lambda: not listener.ports and not listener._serving, AT_ONCE_S)
    with pytest.raises(Unreachable, match="daemon"):
        await transport.send(STRANGER, b"hello")
    await asyncio.wait_for(transport.close(), AT_ONCE_S)


@real
async def test_a_dead_peer_is_recognised_while_the_daemon_does_not_dial(join: Join) -> None:
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


@real
async def test_announced_addresses_replace_the_daemons(join: Join) -> None:
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


@real
async def test_a_peer_is_found_where_libp2p_has_proven_it_and_not_where_it_claims_to_be(join: Join) -> None:
    """Also a peer that has dialled this one, and that listens nowhere; a peer that isn't found is nowhere."""
    a = await join()
    b = await join(initial_peers=a.addresses(), client_mode=True)
    place, _, _ = a.addresses()[0].partition("/p2p/")
    await b.introduce(a.peer_id, [f"/ip4/192.0.2.1/tcp/22/p2p/{a.peer_id}", *a.addresses()])
    assert await b._dht.daemon.found_at(a.peer_id) == [place]
    (found,) = await a._dht.daemon.found_at(b.peer_id)
    assert found.startswith("/ip4/127.0.0.1/tcp/")
    assert await a._dht.daemon.found_at(STRANGER) == []


@pytest.mark.real
@pytest.mark.usefixtures("no_daemon_is_left")
@pytest.mark.parametrize("turns", [1, 5])
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

    asyncio.run(asyncio.wait_for(test(), 100))
    assert all(gone(process.pid) for process in set(psutil.Process().children(recursive=True)) - before)


@real
async def test_no_daemon_relays_for_strangers(join: Join) -> None:
    """Neither a peer's nor one's that listens nowhere. As Hivemind starts it, a daemon would pass on 128 KiB within two
    minutes, again and again."""
    boot = await join()
    hidden = await join(initial_peers=boot.addresses(), client_mode=True)
    eve = await join(initial_peers=boot.addresses())
    for peer in (boot, hidden):
        await peer._dht.daemon.greet(eve.addresses()[0])
        with pytest.raises(Unreachable, match="it isn't in this run"):
            await eve._dht.daemon.open_stream(peer.peer_id, "/libp2p/circuit/relay/0.2.0/hop", timeout_s=10.0)


# -- records that name another host: it is dialled a few times, and peers behind one router as ever

THIRD = "/ip4/192.0.2.9/tcp/{}"


def test_a_host_is_dialled_so_often_in_a_minute_unless_a_peer_was_found_there() -> None:
    # A host is dialled so often in a minute whoever names it. However many peers, ports, and spellings of the
    # address.
    now = 100.0
    dials = Unproven(lambda: now)
    spelled = [THIRD, "/ip4/192.0.2.9/udp/{}/quic-v1", "/ip6/::ffff:192.0.2.9/tcp/{}", "/ip6/::ffff:c000:209/tcp/{}"]
    named = [spelled[n % 4].format(n) for n in range(16)]
    assert sum(len(dials.admit(f"p{n}", named)) for n in range(30)) == DIALS_MAX
    assert dials.admit("p0", ["/ip4/192.0.2.8/tcp/1"]) == ["/ip4/192.0.2.8/tcp/1"]
    assert sum(len(dials.admit(f"p{n}", [f"/dns4/{n}.example/tcp/1"])) for n in range(99)) == DIALS_MAX
    now += DIALS_S
    assert dials.admit("p0", named) == named

    # Peers that were found at a host are dialled there without limit. Many peers behind one router, each at a
    # port of its own. Who was found through a relay proves nothing of its host.
    dials = Unproven()
    for n in range(10 * DIALS_MAX):
        assert dials.admit(f"p{n}", [THIRD.format(n)])
        dials.prove(f"p{n}", THIRD.format(n))
    assert dials.proven("p7", [THIRD.format(7), THIRD.format(8)])
    assert not dials.proven("p7", [THIRD.format(7), "/ip4/192.0.2.8/tcp/1"])
    assert sum(len(dials.admit("x", [THIRD.format(n)])) for n in range(99)) == DIALS_MAX
    assert dials.admit("p7", [THIRD.format(7)])
    dials.prove("p", f"{THIRD.format(1)}/p2p/relay/p2p-circuit")
    assert not dials.proven("p", [THIRD.format(1)])

    # what is counted is bounded
    dials = Unproven()
    for n in range(2 * HOSTS_MAX):
        dials.admit("p", [f"/ip4/10.{n // 250 % 250}.{n % 250}.1/tcp/1"])
        dials.prove(f"p{n}", THIRD.format(1))
    assert len(dials._dials) <= HOSTS_MAX
    assert len(dials._proven) <= PROVEN_MAX


@real
async def test_invented_records_have_a_third_host_dialled_a_few_times(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over libp2p. A real peer that names that host too is reached at its own address."""
    monkeypatch.setattr(daemon, "DIALS_MAX", 8)
    came = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        writer.close()

    third = await asyncio.start_server(count, "127.0.0.2", 0)
    port = third.sockets[0].getsockname()[1]
    a, b = await join(), await join()
    for number in range(30):
        invented = SigningKey(bytes([number]) * 32).peer_id
        await a.introduce(invented, [f"/ip4/127.0.0.2/tcp/{port}/p2p/{invented}"])
        with pytest.raises(Unreachable):
            await a.send(invented, b"hello")
    assert 0 < came <= 8
    await a.introduce(b.peer_id, [f"/ip4/127.0.0.2/tcp/{port}/p2p/{b.peer_id}", *b.addresses()])
    await a.send(b.peer_id, b"hello")
    third.close()
