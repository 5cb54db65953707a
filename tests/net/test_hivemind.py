"""What only the libp2p adapter can get wrong: processes, identities, initial peers, strangers' records."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from p2p_diloco.errors import AddressError, ConfigError, NoBootstrapReached, Refused
from p2p_diloco.net.interface import Limits, Unreachable

pytestmark = pytest.mark.real

LISTEN = ["/ip4/127.0.0.1/tcp/0"]
PATIENT = Limits(connect_timeout_s=30.0, read_timeout_s=30.0, write_timeout_s=30.0, payload_bytes_max=1 << 30)
AT_ONCE_S = 8.0
"""What waits for no deadline takes far less, unless the machine, or one of its processes, stands still meanwhile."""
STRANGER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"

CHILD = """
import asyncio
from p2p_diloco.net.hivemind import HivemindTransport

class Box:
    def admit(self, sender, header): return 1 << 30
    async def deliver(self, sender, header, payload):
        if payload is None:
            asyncio.create_task(transport.send(sender, b"echo " + header))
    def closed(self, peer): pass
    def moving(self, peer): pass

async def main():
    global transport
    transport = await HivemindTransport.create(
        Box(), run_id="real", initial_peers=[], host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    print(transport.peer_id, transport.addresses()[0], transport._dht.daemon.p2p._child.pid, flush=True)
    await asyncio.sleep(110)

asyncio.run(main())
"""


class Box:
    def __init__(self) -> None:
        self.headers: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed_peers: asyncio.Queue[str] = asyncio.Queue()

    def admit(self, sender: str, header: bytes) -> int:
        return 1 << 30

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        self.headers.put_nowait(header)

    def moving(self, peer: str) -> None:
        pass

    def closed(self, peer: str) -> None:
        self.closed_peers.put_nowait(peer)


def run(test: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, 110)

    asyncio.run(bounded())


async def join(box: Box | None = None, **options: Any) -> Any:
    from p2p_diloco.net.hivemind import HivemindTransport

    settings = {"run_id": "real", "initial_peers": [], "host_maddrs": LISTEN, "limits": PATIENT} | options
    return await HivemindTransport.create(box or Box(), **settings)


@contextlib.contextmanager
def peer_process() -> Iterator[tuple[subprocess.Popen[str], str, str, int]]:
    """A peer in a process of its own: the process, its peer id, its address, and its daemon's process id."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, env=os.environ | _path()
    )
    try:
        assert process.stdout is not None
        peer_id, address, daemon = process.stdout.readline().split()
        yield process, peer_id, address, int(daemon)
    finally:
        process.kill()
        process.wait(10)


def _path() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[2])}


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class Awake:
    """How long something takes, without the time for which this process stood still: that counts as one tick."""

    TICK_S = 0.05

    def __init__(self) -> None:
        self.passed_s = 0.0
        self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(self.TICK_S)
            self.passed_s += min(2 * self.TICK_S, time.monotonic() - began)

    async def over(self) -> float:
        self._ticking.cancel()
        await asyncio.wait({self._ticking})
        return self.passed_s


async def until(condition: Any, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.01)


def test_a_killed_process_is_noticed_and_leaves_nothing() -> None:
    """SIGKILL of a peer's Python: its daemon is gone, and those linked to it know, long before any deadline."""

    async def test() -> None:
        with peer_process() as (process, peer_id, address, daemon):
            box = Box()
            transport = await join(box, initial_peers=[address])
            await transport.introduce(peer_id, [address])
            await transport.send(peer_id, b"hello")
            assert await asyncio.wait_for(box.headers.get(), 30) == b"echo hello"
            assert not gone(daemon)
            process.kill()
            assert await asyncio.wait_for(box.closed_peers.get(), AT_ONCE_S) == peer_id
            await until(lambda: gone(daemon), AT_ONCE_S)
            began, refused = time.monotonic(), False
            while not refused:  # that the connection has ended may still be on its way to our own daemon
                assert time.monotonic() - began < AT_ONCE_S
                with pytest.raises(Unreachable) as caught:
                    await transport.send(peer_id, b"anyone?")
                refused = caught.value.refused
            began = time.monotonic()
            for _ in range(3):  # the daemon itself dials only once
                with pytest.raises(Unreachable, match=r"refused|dialled") as caught:
                    await transport.send(peer_id, b"anyone?")
                assert caught.value.refused
            assert time.monotonic() - began < AT_ONCE_S
            await transport.close()

    run(test())


def test_what_is_no_refused_dial() -> None:
    """A peer whose address nobody knows, and one that answers but serves another run, are not taken for dead."""

    async def test() -> None:
        a, b = await join(), await join(run_id="another")
        await a.introduce(b.peer_id, b.addresses())
        for peer in (b.peer_id, STRANGER):
            with pytest.raises(Unreachable) as caught:
                await a.send(peer, b"hello")
            assert not caught.value.refused, str(caught.value)
        await a.close()
        await b.close()

    run(test())


def test_a_daemon_that_fails_is_a_failed_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Hivemind raises, a record isn't stored, a key can't be read and a stream can't be opened: no more."""

    async def test() -> None:
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

    run(test())


def test_a_frozen_process_is_given_up_midway() -> None:
    """A receiver that stops in the middle of a payload costs the sender one read timeout, no more."""

    async def test() -> None:
        with peer_process() as (process, peer_id, address, _):
            transport = await join(initial_peers=[address])
            await transport.send(peer_id, b"whole", memoryview(bytes(1000)))
            process.send_signal(signal.SIGSTOP)
            payload = memoryview(bytearray(256 << 20))
            transport.limits = replace(PATIENT, read_timeout_s=1.0)
            awake = Awake()
            with pytest.raises(Unreachable, match="nothing came"):
                await transport.send(peer_id, b"stuck", payload)
            assert await awake.over() < 2.5
            process.send_signal(signal.SIGCONT)
            await transport.close()

    run(test())


def test_the_daemons_death_is_told() -> None:
    """When p2pd dies, the node is told why, and what is tried afterwards fails at once."""

    async def test() -> None:
        reasons: asyncio.Queue[str] = asyncio.Queue()
        transport = await join(on_daemon_death=reasons.put_nowait)
        os.kill(transport._dht.daemon.p2p._child.pid, signal.SIGKILL)
        assert "daemon" in await asyncio.wait_for(reasons.get(), AT_ONCE_S)
        with pytest.raises(Unreachable, match="daemon"):
            await transport.send(STRANGER, b"hello")
        started = time.monotonic()
        await transport.close()
        assert time.monotonic() - started < AT_ONCE_S

    run(test())


def test_closing_ends_the_daemon() -> None:
    """Nothing is left after `close`, and `on_daemon_death` is not called for an end that was asked for."""

    async def test() -> None:
        reasons: list[str] = []
        transport = await join(on_daemon_death=reasons.append)
        daemon = transport._dht.daemon.p2p._child.pid
        await transport.close()
        assert gone(daemon)
        assert reasons == []

    run(test())


def test_one_initial_peer_that_lives_is_enough() -> None:
    """Dead ones beside it cost no more than the time to dial them, which is nothing where nobody listens."""

    async def test() -> None:
        seed = await join()
        dead = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{STRANGER}" for port in (1, 2)]
        awake = Awake()
        transport = await join(initial_peers=[dead[0], *seed.addresses(), dead[1]])
        assert await awake.over() < 8.0
        assert await seed.store("key", "x", b"1", 60.0)
        assert set(await transport.fetch("key")) == {"x"}
        await transport.close()
        await seed.close()

    run(test())


def test_no_initial_peer_reached_says_why_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, silent, somebody else, and no peer at all: each address with its reason, in less than 10 s."""
    monkeypatch.setattr("p2p_diloco.net.daemon.DIAL_S", 5.0)

    async def test() -> None:
        seed = await join()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            refused = f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}"
            other = seed.addresses()[0].rpartition("/")[0] + "/QmZKXnHKqqS7m6rrLSjDhCAhAjA6pD96y2SDZvwevAf5Yu"
            port, third = silent.getsockname()[1], "QmWXYrvWj6aas2wh5mZbNuP7AAcvLxCHGf5b7jsjEjMHj3"
            mute = f"/ip4/127.0.0.1/tcp/{port}/p2p/{third}"
            awake = Awake()
            with pytest.raises(NoBootstrapReached) as error:
                await join(initial_peers=[refused, other, mute])
            assert await awake.over() < 10.0
        text = str(error.value)
        assert f"{refused} (connection refused" in text
        assert f"{other} (another peer answers there: its id is {seed.peer_id}" in text
        assert f"{mute} (timed out" in text
        await seed.close()

    run(test())


def test_an_unreadable_initial_peer_is_an_address_error() -> None:
    """It is said before anything is started."""

    async def test() -> None:
        with pytest.raises(AddressError):
            await join(initial_peers=["127.0.0.1:4000"])

    run(test())


def test_clocks_that_differ_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A joiner whose clock is 10 s behind is told so, rather than losing every record."""

    async def test() -> None:
        import hivemind.dht.protocol

        seed = await join()
        monkeypatch.setattr(hivemind.dht.protocol, "get_dht_time", lambda: time.time() + 10)
        with pytest.raises(Refused, match=r"clock is 10\.\d s behind.*NTP"):
            await join(initial_peers=seed.addresses())
        await seed.close()

    run(test())


def test_the_dead_are_known_though_somebody_else_dialled_before() -> None:
    """The DHT dials by itself; after its failed dial the daemon makes no other for 5 s, and doesn't say what came of
    it. So whether anybody listens there is asked by other means, and a living peer is not taken for a dead one."""

    async def test() -> None:
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
            assert not await all_refuse([Multiaddr(mute), Multiaddr(closed)])
            assert await all_refuse([Multiaddr(closed)])
            assert not await all_refuse([Multiaddr("/ip4/127.0.0.1/udp/9/quic-v1")])
            assert not await all_refuse([])
        await transport.close()

    run(test())


def test_an_identity_is_kept_and_not_shared(tmp_path: Path) -> None:
    """The same file gives the same peer id; two at once may not use it; it is for its owner's eyes only."""

    async def test() -> None:
        path = tmp_path / "identity"
        first = await join(identity_path=str(path))
        assert path.stat().st_mode & 0o077 == 0
        with pytest.raises(ConfigError, match="in use by another"):
            await join(identity_path=str(path))
        await first.close()
        second = await join(identity_path=str(path))
        assert second.peer_id == first.peer_id
        await second.close()
        assert os.listdir(tmp_path) == ["identity"]

    run(test())


@pytest.mark.parametrize("bad", ["no key at all", "missing folder"])
def test_an_identity_that_cant_be_used_is_said(tmp_path: Path, bad: str) -> None:
    """A file of something else, or a folder that isn't there, is an error that names the key and the path."""

    async def test() -> None:
        path = tmp_path / "identity" if bad == "no key at all" else tmp_path / "nowhere" / "identity"
        if bad == "no key at all":
            path.write_text("hello")
        with pytest.raises(ConfigError) as error:
            await join(identity_path=str(path))
        assert error.value.key == "identity_path"
        assert str(path) in str(error.value)

    run(test())


def test_a_port_that_is_taken_is_said() -> None:
    """The listening address is named, and what to do."""

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
            with pytest.raises(ConfigError) as error:
                await join(host_maddrs=[address])
        assert error.value.key == "host_maddrs"
        assert address in str(error.value)

    run(test())


def test_a_direct_port_that_is_taken_is_said() -> None:
    """As that of libp2p; one that is free is the one that direct connections come to."""

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=str(port)) as error:
                await join(direct_port=port)
        assert error.value.key == "direct_port"
        transport = await join(direct_port=port)
        assert transport._exchange.sender.direct.listener.ports == ((4, port),)
        await transport.close()

    run(test())


@pytest.mark.parametrize("sender_is_client", [True, False])
def test_a_client_has_direct_connections_too(sender_is_client: bool) -> None:
    """It dials, whoever of the two is to send; where direct connections are switched off nobody does."""

    async def test() -> None:
        box = Box()
        seed = await join(box)
        client = await join(box, initial_peers=seed.addresses(), client_mode=True)
        plain = await join(box, initial_peers=seed.addresses(), direct=False)
        sender, receiver = (client, seed) if sender_is_client else (seed, client)
        await sender.introduce(plain.peer_id, plain.addresses())
        for other in (receiver, plain):
            await sender.send(other.peer_id, b"bulk", memoryview(bytes(1000)))
            await other.send(sender.peer_id, b"hello")
        assert sender.traffic.ways() == {receiver.peer_id: "direct", plain.peer_id: "libp2p"}
        for transport in (plain, client, seed):
            await transport.close()

    run(test())


def opened_streams(transport: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The protocols of the streams that are opened from now on."""
    opened, client = list[str](), transport._dht.daemon.p2p
    call = client.call_binary_stream_handler

    async def noted(peer_id: Any, protocol: str) -> Any:
        opened.append(protocol)
        return await call(peer_id, protocol)

    monkeypatch.setattr(client, "call_binary_stream_handler", noted)
    return opened


def test_payloads_share_a_stream_of_the_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is direct all go on one, those under way at once too. One that the other end leaves is replaced
    unnoticed, and at the end both daemons have none."""

    async def test() -> None:
        box, there = Box(), Box()
        a, b = await join(box, direct=False), await join(there, direct=False)
        await a.introduce(b.peer_id, b.addresses())
        opened = opened_streams(a, monkeypatch)
        for _ in range(3):
            await a.send(b.peer_id, b"bulk", memoryview(bytes(1000)))
        await asyncio.gather(*(a.send(b.peer_id, b"bulk", memoryview(bytes(3 << 20))) for _ in range(4)))
        assert len(opened) == 1
        (kept,) = [pipe for pipe in b._exchange.streams.pipes if pipe.ended is None]
        kept.abort()
        await until(lambda: all(pipe.ended for pipe in a._exchange.streams.pipes), 30.0)
        await a.send(b.peer_id, b"bulk", memoryview(bytes(1000)))
        assert len(opened) == 2
        assert a.traffic.ways() == {b.peer_id: "libp2p"}
        assert [there.headers.get_nowait() for _ in range(8)] == [b"bulk"] * 8
        assert box.closed_peers.empty()
        await a.close()
        await until(lambda: all(pipe.ended for pipe in b._exchange.streams.pipes), 30.0)
        await b.close()

    run(test())


def test_who_dies_between_payloads_is_refused() -> None:
    """The stream that was kept is over, and the next payload learns at once that nobody listens."""

    async def test() -> None:
        transport = await join(direct=False)
        with peer_process() as (process, peer_id, address, daemon):
            await transport.introduce(peer_id, [address])
            await transport.send(peer_id, b"bulk", memoryview(bytes(1000)))
            process.kill()
            await until(lambda: gone(daemon), 30.0)
            refused, began = False, time.monotonic()
            while not refused:  # that the connection has ended may still be on its way to our own daemon
                assert time.monotonic() - began < AT_ONCE_S
                with pytest.raises(Unreachable) as caught:
                    await transport.send(peer_id, b"bulk", memoryview(bytes(1000)))
                refused = caught.value.refused
        await transport.close()

    run(test())


def test_another_protocol_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer of the protocol before, which takes one payload on a stream, isn't sent two."""

    async def test() -> None:
        from p2p_diloco.net import hivemind

        new = await join(direct=False)
        monkeypatch.setattr(hivemind, "VERSION", hivemind.VERSION - 1)
        old = await join(direct=False)
        for one, other in ((new, old), (old, new)):
            await one.introduce(other.peer_id, other.addresses())
            with pytest.raises(Unreachable, match="another version"):
                await one.send(other.peer_id, b"bulk", memoryview(bytes(1000)))
        await new.close()
        await old.close()

    run(test())


def circuit_over(address: str) -> Any:
    """Where a peer is found that has a place at the relay of this address. Its bytes are put together here, for what
    Hivemind makes of a peer id within a multiaddr no daemon can read.
    """
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    place, _, relay = address.rpartition("/p2p/")
    peer_id = PeerID.from_base58(relay).to_bytes()
    p2p, p2p_circuit = b"\xa5\x03", b"\xa2\x02"  # their codes in the table of multiaddr protocols, as varints
    return Multiaddr(Multiaddr(place).to_bytes() + p2p + bytes([len(peer_id)]) + peer_id + p2p_circuit)


@pytest.mark.slow
def test_payloads_over_a_relay_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of two peers listens, and daemons that may relay pass on what one sends to the other: that way is told
    as relayed. p2pd asks for a place at a relay at once only where it knows four."""
    from hivemind.p2p import P2P

    create, more = P2P.create, dict[str, Any]()

    async def relaying(**settings: Any) -> Any:
        return await create(**{**settings, "use_relay": True, **more})

    monkeypatch.setattr(P2P, "create", relaying)

    async def test() -> None:
        more["force_reachability"] = "public"
        relays = [await join(), *(await asyncio.gather(*(join() for _ in range(3))))]
        known = [relay.addresses()[0] for relay in relays]
        more.update(force_reachability="private", use_auto_relay=True, trusted_relays=known, initial_peers=known)
        box = Box()
        hidden = await join(box, initial_peers=known[:1], client_mode=True)
        more.clear()
        sender = await join(initial_peers=known[:1], client_mode=True)
        place = [circuit_over(address) for address in known]
        for _ in range(30):
            try:
                await sender._dht.daemon.p2p._client.connect(_peer_id(hidden), place)
                break
            except Exception:  # it has no place at a relay yet
                await asyncio.sleep(1.0)
        await sender.send(hidden.peer_id, b"bulk", memoryview(bytes(1000)))
        assert await asyncio.wait_for(box.headers.get(), 30) == b"bulk"
        assert sender.traffic.ways() == {hidden.peer_id: "relayed"}
        await asyncio.gather(*(transport.close() for transport in (sender, hidden, *relays)))

    run(test())


def _peer_id(transport: Any) -> Any:
    from hivemind.p2p import PeerID

    return PeerID.from_base58(transport.peer_id)


def test_direct_connections_die_with_the_daemon() -> None:
    """A peer without its daemon is dead to others: a payload under way to it ends, as does one from it."""

    async def test() -> None:
        box = Box()
        a, b = await join(), await join(box)
        await a.introduce(b.peer_id, b.addresses())
        await a.send(b.peer_id, b"first", memoryview(bytes(1000)))
        assert a.traffic.ways() == {b.peer_id: "direct"}
        listener = b._exchange.sender.direct.listener
        os.kill(b._dht.daemon.p2p._child.pid, signal.SIGKILL)
        await until(lambda: not listener.ports and not listener._serving, AT_ONCE_S)
        with pytest.raises(Unreachable) as caught:
            await asyncio.wait_for(a.send(b.peer_id, b"second", memoryview(bytes(1000))), AT_ONCE_S)
        assert caught.value.refused
        await a.close()
        await b.close()

    run(test())


def test_announced_addresses_are_the_ones_shown() -> None:
    """Behind a forwarded port others are told the outer address; one without a port is an error."""

    async def test() -> None:
        outer = "/ip4/203.0.113.5/tcp/31337"
        transport = await join(announce_maddrs=[outer])
        assert transport.addresses() == [f"{outer}/p2p/{transport.peer_id}"]
        await transport.close()
        with pytest.raises(ConfigError, match="port 0"):
            await join(announce_maddrs=["/ip4/203.0.113.5/tcp/0"])

    run(test())


def test_a_client_takes_part_without_listening() -> None:
    """In client mode there is no address to dial, but messages and records go both ways."""

    async def test() -> None:
        box = Box()
        seed = await join()
        client = await join(box, initial_peers=seed.addresses(), client_mode=True)
        assert client.addresses() == []
        await client.send(seed.peer_id, b"out")
        await seed.send(client.peer_id, b"in")
        assert await asyncio.wait_for(box.headers.get(), 30) == b"in"
        assert await client.store("key", client.peer_id, b"1", 60.0)
        assert set(await seed.fetch("key")) == {client.peer_id}
        await client.close()
        await seed.close()

    run(test())


def test_peers_of_another_run_are_strangers() -> None:
    """Two runs may share a DHT; a message for one run never reaches the other's inbox."""

    async def test() -> None:
        a = await join(run_id="one")
        b = await join(run_id="two", initial_peers=a.addresses())
        with pytest.raises(Unreachable, match="isn't in this run"):
            await b.send(a.peer_id, b"hello")
        await b.close()
        await a.close()

    run(test())


def test_a_bootstrap_that_restarts_is_met_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed that dies and comes back empty, under its identity and port, joins old and new peers."""
    monkeypatch.setattr("p2p_diloco.net.dht.REJOIN_EVERY_S", 0.2)

    async def test() -> None:
        from p2p_diloco.net.dht import DhtPeer

        path = str(tmp_path / "identity")
        seed = await DhtPeer.create(identity_path=path)
        old = await DhtPeer.create(initial_peers=seed.daemon.addresses)
        host, address = seed.daemon.addresses[0].rpartition("/p2p/")[0], seed.daemon.addresses
        await seed.close()
        assert await old.store("key", "old", b"1", 600.0)  # also drops the seed from its table
        seed = await DhtPeer.create(identity_path=path, host_maddrs=[host])
        assert seed.daemon.addresses == address
        new = await DhtPeer.create(initial_peers=address)
        deadline = time.monotonic() + 60
        while set(await new.fetch("key")) != {"old"}:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        for peer in (new, old, seed):
            await peer.close()

    run(test())


def test_strangers_records_are_judged() -> None:
    """Plain, badly signed, oversized, long-lived and undecodable records are not believed."""
    from hivemind.dht.validation import DHTRecord
    from hivemind.utils.crypto import RSAPrivateKey

    from p2p_diloco.net.records import SignedRecords

    mine, theirs = SignedRecords(RSAPrivateKey()), SignedRecords(RSAPrivateKey())
    soon = time.time() + 60

    def record(name: bytes, value: bytes, until: float = soon, signer: SignedRecords = mine) -> DHTRecord:
        bare = DHTRecord(b"key", msgpack.packb(name), value, until)
        return DHTRecord(b"key", msgpack.packb(name), signer.sign_value(bare), until)

    value = msgpack.packb(b"1")
    owned = b"x" + mine.local_public_key
    assert theirs.validate(record(b"free", value))
    assert theirs.validate(record(owned, value))
    assert theirs.validate(record(owned, msgpack.packb(bytes(1024))))
    assert not theirs.validate(record(owned, value, signer=theirs))
    assert not theirs.validate(DHTRecord(b"key", msgpack.packb(owned), record(owned, value).value, soon + 1))
    assert not theirs.validate(record(b"x[owner:ssh-rsa garbage]", value + b"[signature:abc]"))
    assert not theirs.validate(record(b"free", msgpack.packb(bytes(1025))))
    assert not theirs.validate(record(b"free" * 500, value))
    assert not theirs.validate(record(b"free", value, until=time.time() + 1e7))
    assert not theirs.validate(record(b"free", b"\xc1 no msgpack"))
    assert not theirs.validate(record(b"free", msgpack.packb(["a", "list"])))
    for reserved in (msgpack.packb(None), b""):
        assert not theirs.validate(DHTRecord(b"key", reserved, value, soon))


def test_importing_hivemind_leaves_logging_as_it_was() -> None:
    """No handler on the root, level names unchanged; of Hivemind's lines warnings come, as ours."""
    code = (
        "import logging, p2p_diloco.net.hivemind\n"
        "assert logging.getLogger().handlers == [], logging.getLogger().handlers\n"
        "assert logging.getLevelName(logging.WARNING) == 'WARNING'\n"
        "logging.basicConfig(format='%(name)s|%(message)s', level=logging.DEBUG)\n"
        "logging.getLogger('hivemind.dht.node').warning('careful')\n"
        "logging.getLogger('hivemind.dht.node').info('chatter')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ | _path()
    )
    assert result.returncode == 0, result.stderr
    assert "p2p_diloco.net.hivemind_library|hivemind: careful" in result.stderr
    assert "chatter" not in result.stderr


@pytest.fixture(autouse=True)
def no_daemon_is_left() -> Iterator[None]:
    """Every test ends the daemons that it started."""
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.name() == "p2pd"]
    for child in left:
        child.kill()
    assert left == []


@pytest.mark.parametrize("turns", range(1, 9))
def test_a_start_that_is_broken_off_ends_and_leaves_nothing(turns: int) -> None:
    """Cancelled while its daemon's process begins, in any of the loop's first turns, it waits for nothing for ever."""
    from p2p_diloco.net.dht import DhtPeer

    before = set(psutil.Process().children(recursive=True))

    async def test() -> None:
        starting = asyncio.ensure_future(DhtPeer.create())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting], timeout=30)
        assert starting.cancelled()

    run(test())
    assert all(gone(process.pid) for process in set(psutil.Process().children(recursive=True)) - before)
