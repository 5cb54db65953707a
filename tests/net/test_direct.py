"""Direct connections between exchanges: what goes over them, who is let in, and what happens when they fail.

The talk over libp2p is over socket pairs here; all else is as in a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from p2p_diloco.net import direct as direct_module
from p2p_diloco.net.direct import DIALLED_BACK_MAX, DirectChannel
from p2p_diloco.net.exchange import Exchange
from p2p_diloco.net.framing import Accepted, Bulk, FrameDecoder, Message, Refused, encode
from p2p_diloco.net.interface import Limits, Refusal, Traffic, Unreachable
from p2p_diloco.net.listener import I_SEND, WELCOME, Listener
from p2p_diloco.net.offer import TICKET_BYTES, Offer
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.tls import Certificate, Connection, connect
from tests.net.clocks import by_hand

LIMITS = Limits(
    connect_timeout_s=5.0, read_timeout_s=30.0, write_timeout_s=30.0, payload_bytes_max=64 << 20, streams_max=16
)
"""Deadlines that no test waits for, unless it turns the clock, and that no machine misses which stands still for a
while."""
AT_ONCE_S = LIMITS.read_timeout_s / 3
"""What has waited for no deadline takes less."""
HERE = "/ip4/127.0.0.1/tcp/1"


class Box:
    def __init__(self) -> None:
        self.got: list[tuple[str, bytes, bytes]] = []
        self.closed_peers: list[str] = []
        self.admitted_bytes = 64 << 20
        self.on_deliver: Callable[[], Awaitable[None]] | None = None

    def admit(self, sender: str, header: bytes) -> int:
        return self.admitted_bytes

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        if self.on_deliver is not None:
            await self.on_deliver()
        self.got.append((sender, header, bytes(payload or b"")))

    def moving(self, peer: str) -> None:
        pass

    def closed(self, peer: str) -> None:
        self.closed_peers.append(peer)


class Peer:
    """An exchange with direct connections, in a small world of such."""

    def __init__(self, world: dict[str, Peer], name: str, hosts: tuple[str, ...], limits: Limits) -> None:
        self.world, self.name, self.box, self.traffic, self.limits = world, name, Box(), Traffic(), limits
        self.known_at, self.libp2p_streams, self.talks = HERE, 0, 0
        self.told: Callable[[Offer], Offer] = lambda offer: offer
        """What becomes of the offers that this peer hears."""
        self.serving: set[asyncio.Task[None]] = set()
        self.exchange = Exchange(self.box, limits=limits, traffic=self.traffic, dial=self.dial)
        self.direct = self.exchange.sender.direct = DirectChannel(
            self.exchange.streams,
            open_stream=self.ask,
            addresses=lambda peer: [world[peer].known_at],
            serve=self.exchange.receiver.serve_direct,
            hosts=hosts,
        )
        world[name] = self

    async def dial(self, peer: str) -> tuple[Pipe, str]:
        self.libp2p_streams += 1
        near, far = await pair()
        there = self.world[peer]
        there.start(there.exchange.receiver.serve(self.name, far))
        return near, there.known_at

    async def ask(self, peer: str) -> tuple[Pipe, str]:
        if peer not in self.world:
            raise Unreachable(f"{peer}: nobody is there")
        self.talks += 1
        near, far = await pair()
        there = self.world[peer]
        there.start(there.direct.answer(self.name, far, self.known_at))
        return near, there.known_at

    def start(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)

    async def send(self, peer: str, payload: bytes, header: bytes = b"h") -> None:
        await self.exchange.send(peer, header, memoryview(payload))

    def connected(self, peer: str) -> bool:
        """Whether this peer has a connection on which it sends to that one."""
        return self.direct._way(peer).stream is not None

    @property
    def port(self) -> int:
        return self.direct.listener.ports[0][1]

    async def close(self) -> None:
        await self.exchange.close()
        await self.direct.close()
        await asyncio.gather(*self.serving, return_exceptions=True)


async def pair() -> tuple[Pipe, Pipe]:
    near, far = socket.socketpair()
    return tuple([await Pipe.adopt(*await asyncio.open_connection(sock=end)) for end in (near, far)])  # type: ignore[return-value]


Start = Callable[..., Peer]


def run(test: Callable[[Start], Awaitable[None]]) -> None:
    """Run a test in a world that it fills; afterwards no task, thread or socket may be left of it."""

    async def bounded() -> None:
        world: dict[str, Peer] = {}

        def start(name: str, *, hosts: tuple[str, ...] = ("127.0.0.1",), limits: Limits = LIMITS) -> Peer:
            return Peer(world, name, hosts, limits)

        try:
            await asyncio.wait_for(test(start), 100)
        finally:
            for peer in list(world.values()):
                await peer.close()
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    threads, files = threading.active_count(), psutil.Process().num_fds()
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(bounded())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
    gc.collect()
    assert threading.active_count() <= threads
    assert psutil.Process().num_fds() <= files


async def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.005)


# -- what goes well


def test_payloads_of_a_peer_share_a_connection() -> None:
    """One handshake serves them all, libp2p carries none; each way has its own."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        for number in range(5):
            await a.send("b", bytes([number]) * 100_000)
        await b.send("a", b"back")
        assert [payload[:1] for _, _, payload in b.box.got] == [bytes([number]) for number in range(5)]
        assert a.box.got == [("b", b"h", b"back")]
        assert (a.talks, a.libp2p_streams, a.connected("b")) == (1, 0, True)
        assert (b.talks, b.libp2p_streams, b.connected("a")) == (1, 0, True)
        assert a.traffic.ways() == {"b": "direct"}
        assert a.traffic.peers["b"].bytes_sent >= 500_000
        assert b.traffic.peers["a"].bytes_received >= 500_000

    run(test)


def test_many_payloads_at_once_all_arrive() -> None:
    """Between three peers, both ways, more than there are connections, each with its own bytes."""

    async def test(start: Start) -> None:
        peers = {name: start(name) for name in "abc"}
        sends = [
            peers[sender].send(to, f"{sender}{to}{number}".encode() * 50_000)
            for sender in "abc" for to in "abc" for number in range(6) if sender != to
        ]  # fmt: skip
        await asyncio.gather(*sends)
        for to, peer in peers.items():
            expected = sorted(f"{s}{to}{n}".encode() * 50_000 for s in "abc" if s != to for n in range(6))
            assert sorted(payload for _, _, payload in peer.box.got) == expected
            assert len(peer.direct.listener._serving) == 2
            assert all(peer.connected(other) for other in "abc" if other != to)

    run(test)


def test_one_connection_carries_all_payloads_to_a_peer() -> None:
    """Payloads sent at the same time are written one after the other. A second connection, which the other peer dials
    while the first one is open, is closed."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await asyncio.gather(*(a.send("b", b"x") for _ in range(7)))
        assert (a.talks, a.libp2p_streams, len(b.box.got)) == (1, 0, 7)
        first = a.direct._way("b").stream
        await ask_to_dial_back(a, "b")
        await until(lambda: not b.direct._dialled_back)
        await a.send("b", b"x")
        assert a.direct._way("b").stream is first

    run(test)


def test_a_refusal_keeps_the_connection() -> None:
    """Refused before it was read or after: the reason comes back, and what follows is in step."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await a.send("b", b"first")
        for admitted in (10, 1 << 20):
            b.box.admitted_bytes = admitted
            with pytest.raises(Refusal, match=f"at most {admitted}"):
                await a.send("b", bytes(2 << 20))
            with pytest.raises(Refusal, match=f"at most {admitted}"):
                await a.send("b", bytes(admitted + 1))
            await a.send("b", b"fits")
        assert [payload for _, _, payload in b.box.got] == [b"first", b"fits", b"fits"]
        assert a.libp2p_streams == 0
        assert b.traffic.peers["a"].refused == 4

    run(test)


def test_a_payload_of_nothing_is_one() -> None:
    """No bytes arrive as such, between others."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        for payload in (b"", b"x", b""):
            await a.send("b", payload)
        assert [payload for _, _, payload in b.box.got] == [b"", b"x", b""]

    run(test)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6_will_do() -> None:
    """A peer that listens on ::1 alone is reached there."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b", hosts=("::1",))
        if not b.direct.listener.ports:
            pytest.skip("this machine has no ::1")
        b.known_at = "/ip6/::1/tcp/1"
        await a.send("b", b"six")
        assert a.traffic.ways() == {"b": "direct"}

    run(test)


def test_a_connection_is_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    """After what may be encrypted under one key, another connection takes its place."""
    monkeypatch.setattr(direct_module, "CARRIED_BYTES_MAX", 250)

    async def test(start: Start) -> None:
        a, _ = start("a"), start("b")
        for _ in range(6):
            await a.send("b", bytes(100))
        assert (a.talks, a.libp2p_streams) == (2, 0)

    run(test)


def test_open_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond, the one used longest ago is closed."""
    monkeypatch.setattr(direct_module, "OPEN_MAX", 2)

    async def test(start: Start) -> None:
        a = start("a")
        for name in "bcd":
            start(name)
        for name in "bcb":
            await a.send(name, b"x")
        await a.send("d", b"x")
        assert [a.connected(name) for name in "bcd"] == [True, False, True]

    run(test)


def test_a_new_connection_is_not_the_first_to_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its peer has been known for long: it is about to be used."""
    monkeypatch.setattr(direct_module, "OPEN_MAX", 1)

    async def test(start: Start) -> None:
        a = start("a")
        for name in "bc":
            start(name)
        for name in "bcbb":
            await a.send(name, b"x")
        assert [a.connected(name) for name in "bc"] == [True, False]
        assert (a.talks, a.libp2p_streams) == (3, 0)

    run(test)


async def ask_to_dial_back(asker: Peer, peer: str) -> None:
    """Have the peer dial the asker, and so give the asker a connection to send on."""
    mine = asker.direct.listener.offer(peer)
    assert mine is not None
    await asker.direct._ask(peer, mine.pack())


def test_a_surplus_connection_is_closed() -> None:
    """The second one to a peer, whichever end dialled, unless the first has ended; and any once this peer closes."""

    async def test(start: Start) -> None:
        a = start("a")
        ends = [await pair() for _ in range(4)]
        for near, _ in ends[:2]:
            a.direct._keep("b", near)
        assert [near.ended is None for near, _ in ends[:2]] == [True, False]
        ends[0][1].abort()
        await until(lambda: ends[0][0].ended)
        a.direct._keep("b", ends[2][0])
        assert ends[2][0].ended is None
        await a.close()
        a.direct._keep("d", ends[3][0])
        assert ends[3][0].ended
        for _, far in ends:
            far.abort()

    run(test)


def test_of_too_many_peers_the_unused_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never one to which a connection is open, or being made."""
    monkeypatch.setattr(direct_module, "PEERS_COUNTED_MAX", 3)

    async def test(start: Start) -> None:
        a, _ = start("a"), start("b")
        await a.send("b", b"x")
        a.direct._way("c").attempt = a.direct._start(asyncio.sleep(0))
        for name in "defg":
            a.direct._way(name)
        assert list(a.direct._ways) == ["b", "c", "g"]

    run(test)


# -- who is not let in


async def offer_of(asker: Peer, peer: str) -> Offer:
    return Offer.unpack((await asker.direct._ask(peer, b""))[0])


async def let_in(asker: Peer, peer: str) -> Connection:
    """A connection on which the asker may send, and a test in its place."""
    offer = await offer_of(asker, peer)
    reader, writer = await connect("127.0.0.1", offer.ports[0][1], socket.AF_INET, offer.certificate)
    writer.write(offer.ticket + I_SEND)
    assert await reader.readexactly(1) == WELCOME
    return reader, writer


async def welcomed(offer: Offer, ticket: bytes, role: bytes = I_SEND) -> bool:
    """Whether the listener lets in who shows this ticket."""
    reader, writer = await connect("127.0.0.1", offer.ports[0][1], socket.AF_INET, offer.certificate)
    try:
        writer.write(ticket + role)
        return await reader.read(1) == WELCOME
    except OSError:
        return False
    finally:
        writer.transport.abort()


def test_a_ticket_lets_in_once() -> None:
    """The right one does; the same again, whoever shows it, a wrong one, and an unknown role don't, and are counted."""

    async def test(start: Start) -> None:
        a, b, c = start("a"), start("b"), start("c")
        offers = [await offer_of(a, "b") for _ in range(4)] + [await offer_of(c, "b")]
        assert await welcomed(offers[0], offers[0].ticket)
        assert not await welcomed(offers[4], offers[0].ticket)
        assert not await welcomed(offers[1], os.urandom(TICKET_BYTES))
        assert not await welcomed(offers[1], offers[1].ticket[:-1] + bytes([offers[1].ticket[-1] ^ 1]))
        assert not await welcomed(offers[1], offers[1].ticket)
        assert not await welcomed(offers[2], offers[2].ticket, b"?")
        assert b.direct.listener.turned_away == 5
        await a.send("b", b"still served")
        assert b.box.got == [("a", b"h", b"still served")]

    run(test)


def test_a_connection_is_its_tickets_peer() -> None:
    """What comes on it is from whom the ticket was drawn for, and not from whoever that says it is."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        _, writer = await let_in(a, "b")
        writer.write(encode(Bulk(b"from somebody else", 3)) + b"abc")
        await until(lambda: b.box.got)
        assert b.box.got == [("a", b"from somebody else", b"abc")]
        writer.transport.abort()

    run(test)


def test_nobody_is_heard_while_nobody_is_expected() -> None:
    """Without a ticket out, a connection is closed before a handshake, and counted."""

    async def test(start: Start) -> None:
        b = start("b")
        for count in (1, 2):
            reader, writer = await asyncio.open_connection("127.0.0.1", b.port)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), AT_ONCE_S) == b""
            writer.close()
            assert b.direct.listener.turned_away == count

    run(test)


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\x16\x03\x01\x02\x00\x01"])
def test_noise_before_the_handshake_costs_its_time_alone(monkeypatch: pytest.MonkeyPatch, noise: bytes) -> None:
    """Silence, another protocol, half a handshake: closed within the deadline and counted; others are served."""
    monkeypatch.setattr("p2p_diloco.net.listener.HANDSHAKE_S", 0.3)

    async def test(start: Start) -> None:
        with by_hand() as clock:
            a, b = start("a"), start("b")
            await offer_of(a, "b")
            reader, writer = await asyncio.open_connection("127.0.0.1", b.port)
            writer.write(noise)
            await a.send("b", b"meanwhile")
            closed = asyncio.create_task(reader.read())
            assert await clock.over(closed, step_s=0.05) < 0.5
            await asyncio.wait({closed})
            closed.exception()
            writer.close()
            await clock.until(lambda: b.direct.listener.turned_away == 1)
        assert b.box.got == [("a", b"h", b"meanwhile")]
        assert a.traffic.ways() == {"b": "direct"}

    run(test)


def test_handshakes_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes while many are half open is closed at once; when they are gone there is room again."""
    monkeypatch.setattr("p2p_diloco.net.listener.HANDSHAKES_MAX", 2)
    monkeypatch.setattr("p2p_diloco.net.listener.HANDSHAKE_S", 0.3)

    async def test(start: Start) -> None:
        with by_hand() as clock:
            a, b = start("a"), start("b")
            await offer_of(a, "b")
            idle = [await asyncio.open_connection("127.0.0.1", b.port) for _ in range(3)]
            await clock.until(lambda: b.direct.listener.turned_away == 1)
            await clock.passes(0.2)
            assert b.direct.listener.turned_away == 1
            await clock.passes(0.2)
            await clock.until(lambda: b.direct.listener.turned_away == 3)
            for _, writer in idle:
                writer.close()
            await a.send("b", b"after")
        assert a.traffic.ways() == {"b": "direct"}

    run(test)


def test_a_peers_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may not keep more than its number open; it is told by the end of the connection."""
    monkeypatch.setattr("p2p_diloco.net.listener.CONNECTIONS_PER_PEER_MAX", 1)

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await a.send("b", b"takes the only one")
        offer = await offer_of(a, "b")
        assert not await welcomed(offer, offer.ticket)
        other = await offer_of(start("c"), "b")
        assert await welcomed(other, other.ticket)
        assert b.direct.listener.turned_away == 1

    run(test)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"no frame at all", "no frame"),
        (encode(Message(b"hello")), "no place"),
        (encode(Accepted()), "no place"),
        (encode(Bulk(b"h", 1000)) + b"some", "no byte came"),
    ],
)
def test_a_connection_that_misbehaves_ends_alone(sent: bytes, reason: str) -> None:
    """After a valid ticket: it is told why, counted under its peer's name, and closed."""

    async def test(start: Start) -> None:
        impatient = replace(LIMITS, read_timeout_s=1.0, rate_bytes_per_s_min=10.0)
        a, b, c = start("a"), start("b", limits=impatient), start("c")
        await c.send("b", b"before")
        reader, writer = await let_in(a, "b")
        writer.write(sent)
        decoder, frame = FrameDecoder(header_bytes_max=1000), None
        while not isinstance(frame, Refused):
            decoder.feed(await reader.readexactly(1))
            frame = decoder.next_frame() or frame
        assert reason in frame.reason
        writer.transport.abort()
        await c.send("b", b"after")
        assert b.traffic.peers["a"].refused == 1
        assert [payload for _, _, payload in b.box.got] == [b"before", b"after"]

    run(test)


# -- whom the dialler doesn't trust


def test_an_impostor_gets_nothing() -> None:
    """Whoever listens where the peer should, and can't show its certificate, sees neither ticket nor payload."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        heard: list[bytes] = []

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                heard.append(await reader.read())
            writer.close()

        impostor = Certificate()
        server = await asyncio.start_server(hear, "127.0.0.1", 0, ssl=impostor.context)
        port = server.sockets[0].getsockname()[1]
        a.told = lambda offer: replace(offer, ports=((4, port),))
        with hearing(a):
            await a.send("b", b"secret")
        assert b.box.got == [("a", b"h", b"secret")]
        assert b"".join(heard) == b""
        server.close()
        await server.wait_closed()

    run(test)


@contextlib.contextmanager
def hearing(peer: Peer) -> Iterator[None]:
    """Let the peer hear other offers than those that are made, and make none itself."""
    ask = peer.direct._ask

    async def told(to: str, request: bytes) -> tuple[bytes, str]:
        if request:
            raise Refusal("not the other way round")
        answer, seen_at = await ask(to, request)
        return peer.told(Offer.unpack(answer)).pack(), seen_at

    peer.direct._ask = told  # type: ignore[method-assign]
    yield
    peer.direct._ask = ask  # type: ignore[method-assign]


@pytest.mark.parametrize("certificate", [b"\x30\x82", os.urandom(500), Certificate().der])
def test_a_bad_offer_is_no_harm(certificate: bytes) -> None:
    """A certificate that can't be read, or is another's: the payload goes over libp2p."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        a.told = lambda offer: replace(offer, certificate=certificate)
        with hearing(a):
            await a.send("b", b"x")
        assert (a.libp2p_streams, b.box.got) == (1, [("a", b"h", b"x")])
        assert a.traffic.ways() == {"b": "libp2p"}

    run(test)


# -- where there is no way


def test_who_cant_be_dialled_dials_back() -> None:
    """A peer that doesn't listen gets its payloads on connections that it makes itself."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b", hosts=())
        for number in range(3):
            await a.send("b", bytes([number]))
            await b.send("a", bytes([number]))
        assert a.traffic.ways() == {"b": "direct"}
        assert b.traffic.ways() == {"a": "direct"}
        assert (a.libp2p_streams, b.libp2p_streams) == (0, 0)
        assert [p for _, _, p in b.box.got] == [p for _, _, p in a.box.got] == [b"\0", b"\1", b"\2"]
        assert b.box.got[0][0] == "a"

    run(test)


def test_who_cant_be_reached_dials_back() -> None:
    """A peer that listens where it can't be reached, either."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            b.direct.listener.__class__ = type("Odd", (Listener,), {"ports": ((4, closed.getsockname()[1]),)})
            await a.send("b", b"x")
        assert a.traffic.ways() == {"b": "direct"}

    run(test)


def test_dialling_back_is_limited() -> None:
    """A peer can't make another one open connections without end."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        lent = list[Pipe]()
        a.direct.listener._lend = lambda _, pipe: lent.append(pipe)
        for _ in range(DIALLED_BACK_MAX):
            await ask_to_dial_back(a, "b")
        with pytest.raises(Refusal, match="enough"):
            await ask_to_dial_back(a, "b")
        await until(lambda: len(lent) == DIALLED_BACK_MAX)
        for pipe in lent:
            pipe.abort()
        await until(lambda: not b.direct._dialled_back)

    run(test)


@pytest.mark.parametrize("request_", [b"nonsense", encode(Accepted())])
def test_a_question_that_cant_be_read_is_refused(request_: bytes) -> None:
    """It is answered, and nothing is dialled."""

    async def test(start: Start) -> None:
        a, _ = start("a"), start("b")
        with pytest.raises(Refusal, match="no offer"):
            await a.direct._ask("b", request_)

    run(test)


def test_where_nothing_is_direct_libp2p_carries_all() -> None:
    """Neither listens: every payload arrives, and it isn't asked again at once."""

    async def test(start: Start) -> None:
        a, b = start("a", hosts=()), start("b", hosts=())
        for _ in range(3):
            await a.send("b", b"x")
        assert (a.libp2p_streams, a.talks, len(b.box.got)) == (1, 1, 3)
        assert a.traffic.ways() == {"b": "libp2p"}

    run(test)


def test_what_a_third_peer_passes_on_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was found at a relay's address is relayed; the next one may find another way."""
    monkeypatch.setattr("p2p_diloco.net.sending.STREAM_LIFE_S", 0.1)
    circuit = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N/p2p-circuit"

    async def test(start: Start) -> None:
        a, b = start("a", hosts=()), start("b", hosts=())
        for found_at, way in ((circuit, "relayed"), (HERE, "libp2p"), (circuit, "relayed")):
            b.known_at = found_at
            await a.send("b", b"x")
            assert a.traffic.ways() == {"b": way}
            await asyncio.sleep(0.15)

    run(test)


def test_a_black_hole_delays_one_payload_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that swallows everything costs the first payload a tenth of the time to connect, later ones nothing;
    once it is known to fail it is tried again after a while, and not waited for."""
    monkeypatch.setattr(direct_module, "PATIENCE_PART", 0.1)
    monkeypatch.setattr(direct_module, "DIAL_S", 3.0)

    async def test(start: Start) -> None:
        with socket.socket() as hole, by_hand() as clock:
            a, b = start("a"), start("b")
            hole.bind(("127.0.0.1", 0))
            hole.listen(0)
            a.told = lambda offer: replace(offer, ports=((4, hole.getsockname()[1]),))
            with hearing(a):
                took_s = []
                for _ in range(3):
                    sending = asyncio.create_task(a.send("b", b"x"))
                    await clock.until(lambda: a.talks == 1)
                    took_s.append(await clock.over(sending, step_s=0.03))
                assert 0.4 < took_s[0] < 0.7
                assert max(took_s[1:]) < 0.2
                assert (a.libp2p_streams, a.talks) == (1, 1)
                assert a.traffic.ways() == {"b": "libp2p"}
                way = a.direct._way("b")
                await clock.passes(3.0)
                await clock.until(lambda: way.failures == 1)
            await clock.passes(direct_module.RETRY_S - 1.0)
            await a.send("b", b"too early")
            assert a.talks == 1
            await clock.passes(1.5)
            await a.send("b", b"not waited for")
            assert a.traffic.ways() == {"b": "libp2p"}
            await clock.until(lambda: a.connected("b"))
            await a.send("b", b"direct")
            assert a.libp2p_streams == 1
            assert a.traffic.ways() == {"b": "direct"}
            assert len(b.box.got) == 6

    run(test)


def test_retries_get_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure doubles the time to the next attempt, up to an end; several at once count as one."""

    async def test(start: Start) -> None:
        a = start("a")
        now = 1000.0
        monkeypatch.setattr(a.direct, "_clock", lambda: now)
        way, waits = a.direct._way("b"), []
        for _ in range(7):
            a.direct.failed("b", "why")
            a.direct.failed("b", "why")
            waits.append(way.retry_at - now)
            now = way.retry_at
        assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]

    run(test)


def test_a_failure_ends_what_is_free() -> None:
    """Nothing of this way is kept, nor used before its time."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await a.send("b", b"first")
        (pipe,) = b.direct.listener._serving
        a.direct.failed("b", "why")
        assert not a.connected("b")
        await until(lambda: pipe.ended)

    run(test)


@pytest.mark.parametrize("refused", [False, True])
def test_an_answer_makes_good_for_failures(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """A payload that comes to its verdict, whichever, shows that the way is fine."""
    monkeypatch.setattr(direct_module, "RETRY_S", 0.05)

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        a.direct.failed("b", "why")
        await asyncio.sleep(0.1)
        await a.send("b", b"not waited for")
        await until(lambda: a.connected("b"))
        way = a.direct._way("b")
        assert way.failures == 1
        if refused:
            b.box.admitted_bytes = 0
            with pytest.raises(Refusal):
                await a.send("b", b"x")
        else:
            await a.send("b", b"x")
        assert (way.failures, way.retry_at) == (0, 0.0)

    run(test)


def test_who_is_gone_is_unreachable() -> None:
    """Nobody at the other end of libp2p either: the payload's sender is told, in good time."""

    async def test(start: Start) -> None:
        a = start("a")

        async def nobody(peer: str) -> tuple[Pipe, str]:
            raise Unreachable("nobody is there", refused=True)

        a.exchange.sender._dial = nobody
        with pytest.raises(Unreachable) as caught:
            await asyncio.wait_for(a.send("gone", b"x"), AT_ONCE_S)
        assert caught.value.refused

    run(test)


# -- what breaks midway


def test_a_connection_that_breaks_loses_nothing() -> None:
    """The listener's end is cut within a payload: it arrives over libp2p, the break is told as any other, and direct
    connections are left alone for a while."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await a.send("b", b"first")
        sending = asyncio.create_task(a.send("b", bytes(48 << 20)))
        await until(lambda: any(p.filled_bytes > 1 << 20 for p in b.direct.listener._serving))
        for pipe in list(b.direct.listener._serving):
            pipe._transport.abort()
        await sending
        assert [len(payload) for _, _, payload in b.box.got] == [5, 48 << 20]
        assert (a.box.closed_peers, a.libp2p_streams) == (["b"], 1)
        assert 48 << 20 < a.traffic.bytes_sent < 49 << 20  # what broke was not a message
        await a.send("b", b"over libp2p")
        assert (a.libp2p_streams, a.talks) == (1, 1)
        assert a.traffic.ways() == {"b": "libp2p"}

    run(test)


def test_a_connection_that_breaks_while_idle_is_replaced() -> None:
    """Nobody notices; the next payload makes another."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await a.send("b", b"first")
        for pipe in list(b.direct.listener._serving):
            pipe.abort()
        stream = a.direct._way("b").stream
        assert stream is not None
        await until(lambda: stream.ended)
        await a.send("b", b"second")
        assert (a.libp2p_streams, a.talks, a.connected("b")) == (0, 2, True)
        assert a.box.closed_peers == []

    run(test)


def test_what_comes_unasked_is_no_answer() -> None:
    """A connection on which something came between two payloads isn't used again."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await a.send("b", b"first")
        (pipe,) = b.direct.listener._serving
        pipe.write(encode(Refused("nobody asked")))
        stream = a.direct._way("b").stream
        assert stream is not None
        await until(lambda: not stream.fit)
        await a.send("b", b"second")
        assert [payload for _, _, payload in b.box.got] == [b"first", b"second"]
        assert (a.talks, a.connected("b")) == (2, True)
        await until(lambda: pipe.ended)

    run(test)


def test_a_dialler_that_dies_midway_is_told() -> None:
    """Its payload isn't delivered, its memory is given back, and the node hears of it."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        _, writer = await let_in(a, "b")
        writer.write(encode(Bulk(b"h", 1000)) + b"some")
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await until(lambda: b.box.closed_peers == ["a"])
        assert b.box.got == []
        assert b.exchange.receiver._receiving._value == LIMITS.streams_max
        await until(lambda: not b.direct.listener._serving)

    run(test)


def test_a_listener_that_freezes_is_found_out() -> None:
    """One that stops reading costs a read timeout, as over libp2p; afterwards that connection isn't used again."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await a.send("b", b"first")
        (pipe,) = b.direct.listener._serving
        pipe._transport.pause_reading()  # type: ignore[attr-defined]
        with by_hand() as clock:
            sending = asyncio.create_task(a.send("b", bytes(48 << 20)))
            assert 0.9 * LIMITS.read_timeout_s < await clock.over(sending, step_s=0.5) < 2 * LIMITS.read_timeout_s
            with pytest.raises(Unreachable, match="nothing came"):
                await sending
        await a.send("b", b"over libp2p")
        assert a.traffic.ways() == {"b": "libp2p"}

    run(test)


def test_an_inbox_that_hangs_is_given_up() -> None:
    """A verdict that doesn't come is waited for as long as over libp2p."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        reached, gate = asyncio.Event(), asyncio.Event()

        async def hang() -> None:
            reached.set()
            await gate.wait()

        b.box.on_deliver = hang
        with by_hand() as clock:
            sending = asyncio.create_task(a.send("b", b"x"))
            await clock.until(reached.is_set)
            assert 0.9 * LIMITS.read_timeout_s < await clock.over(sending, step_s=0.5) < 2 * LIMITS.read_timeout_s
            with pytest.raises(Unreachable, match=r"nothing came|took longer"):
                await sending
        gate.set()

    run(test)


def test_a_send_that_is_cancelled_ends_its_connection_alone() -> None:
    """What was half sent can't be taken for the next payload."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await a.send("b", b"first")
        sending = asyncio.create_task(a.send("b", bytes(48 << 20)))
        await until(lambda: any(p.filled_bytes > 1 << 20 for p in b.direct.listener._serving))
        sending.cancel()
        await asyncio.wait([sending])
        await until(lambda: not a.connected("b"))
        await a.send("b", b"next")
        assert a.traffic.bytes_sent < 1 << 20  # what was cancelled was not a message
        assert [payload for _, _, payload in b.box.got] == [b"first", b"next"]
        assert (a.libp2p_streams, a.talks) == (0, 2)

    run(test)


def test_a_spoilt_wire_delivers_nothing_spoilt() -> None:
    """Bits that flip on the way break the connection; the payload comes whole over libp2p."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        passed = 0

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal passed
            with contextlib.suppress(OSError):
                while piece := bytearray(await reader.read(1 << 16)):
                    passed += len(piece)
                    if passed > 1 << 20:
                        piece[random.randrange(len(piece))] ^= 1
                    writer.write(piece)
                    await writer.drain()
            writer.close()

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection("127.0.0.1", b.port)
            await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        a.told = lambda offer: replace(offer, ports=((4, port),))
        payload = os.urandom(8 << 20)
        with hearing(a):
            await a.send("b", payload)
        assert passed > 1 << 20
        assert b.box.got == [("a", b"h", payload)]
        assert a.libp2p_streams == 1
        server.close()
        await until(lambda: len(asyncio.all_tasks()) < 50)
        await asyncio.sleep(0.1)

    run(test)


# -- ending


def test_closing_ends_everything_in_bounded_time() -> None:
    """Payloads under way, connections that wait and one that is being made: all end, and `run` finds nothing left."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        gate = asyncio.Event()
        b.box.on_deliver = gate.wait  # type: ignore[assignment]
        sends = [asyncio.create_task(a.send("b", bytes(1000))) for _ in range(3)]
        await until(lambda: any(stream._waiting for stream in a.direct._connections))
        _, writer = await asyncio.open_connection("127.0.0.1", b.port)
        began = time.monotonic()
        await asyncio.gather(a.close(), b.close())
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(result) for result in results] == [Unreachable] * 3
        assert time.monotonic() - began < AT_ONCE_S
        assert a.box.closed_peers == b.box.closed_peers == []
        assert await a.direct.take("b") is None
        writer.close()

    run(test)


def test_a_greeting_that_never_began_leaves_nothing() -> None:
    """A connection is accepted in the very turn in which the peer ends: its socket is closed, too."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await offer_of(a, "b")
        with socket.create_connection(("127.0.0.1", b.port)) as stranger:
            stranger.settimeout(AT_ONCE_S)
            b.direct.listener._accept(b.direct.listener._sockets[0])
            b.direct.end()
            assert len(b.direct.listener._greeting) == 1
            await b.direct.close()
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""

    run(test)


def test_a_peer_that_ends_gives_no_offers() -> None:
    """Who asks it is refused, and its port is closed."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        port = b.port
        b.direct.end()
        with pytest.raises(Refusal, match="closing"):
            await a.direct._ask("b", b"")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)

    run(test)
