"""Direct connections: which payloads go over them, how many there are, who dials where; what breaks, and what then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from dataclasses import replace

import pytest

from p2p_diloco.net import direct as direct_module
from p2p_diloco.net.dial_back import PORTS_MAX
from p2p_diloco.net.direct import places_of
from p2p_diloco.net.framing import Bulk, encode
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.listener import CONNECTIONS_PER_PEER_MAX, Listener
from p2p_diloco.net.pipe import Pipe
from tests.net.clocks import by_hand
from tests.net.direct_peers import AT_ONCE_S, Start, ask_to_dial_back, changed_offers, let_in, offer_of, pair, run
from tests.net.patience import plays, until


@pytest.mark.parametrize("relayed", [False, True])
def test_only_where_libp2p_has_found_the_asker_is_it_dialled_back(relayed: bool) -> None:
    """A peer that claims the address of a third party can't make others dial it. If its request came through a relay,
    libp2p is asked where it has found the peer."""
    proven = "/ip4/127.0.0.1/tcp/2"

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        with socket.create_server(("127.0.0.2", a.port)) as third_party:
            third_party.settimeout(0.2)
            a.known_at = "/ip4/127.0.0.2/tcp/1"
            a.seen_at = "/ip4/127.0.0.1/tcp/9/p2p/relay/p2p-circuit" if relayed else proven
            b.direct._found_at = found
            await ask_to_dial_back(a, "b")
            await until(lambda: a.connected("b"))
            assert asked == (["a"] if relayed else [])
            with pytest.raises(TimeoutError):
                third_party.accept()

    asked: list[str] = []

    async def found(peer: str) -> list[str]:
        asked.append(peer)
        return [proven]

    run(test)


@plays(run)
async def test_a_request_to_dial_back_that_is_not_followed_is_answered(start: Start) -> None:
    """One that can't be read; and one from a host that had so many of its ports dialled lately: others may share it."""
    a, b = start("a", hosts=()), start("b")
    with pytest.raises(Refusal, match="an offer has another length"):
        await a.direct._ask("b", b"nonsense")
    assert b.direct._budget.spend([("127.0.0.1", port) for port in range(20_000, 20_000 + PORTS_MAX)])
    mine = start("c").direct.listener.offer("b", sends=True)
    assert mine is not None
    with pytest.raises(Refusal, match="too many ports"):
        await a.direct._ask("b", mine.pack())


@plays(run)
async def test_a_knock_is_worth_nothing_once_its_peer_is_no_member(start: Start) -> None:
    """It was drawn before the revocation; what comes on the connection is not read."""
    a, b = start("a"), start("b")
    offer = await offer_of(a, "b")
    b.exchange.streams.admits = lambda peer: peer != "a"
    pipe = await let_in(a, "b", offer)
    pipe.write(encode(Bulk(b"h", 3)) + b"abc")
    assert not await pipe.more(AT_ONCE_S)
    assert b.box.got == []


@plays(run)
async def test_a_connection_is_replaced_after_so_many_bytes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key may encrypt only so much: after `CARRIED_BYTES_MAX` a new connection takes over."""
    monkeypatch.setattr(direct_module, "CARRIED_BYTES_MAX", 250)
    a, _ = start("a"), start("b")
    for _ in range(6):
        await a.send("b", bytes(100))
    assert (a.talks, a.libp2p_streams) == (2, 0)


@plays(run)
async def test_the_least_recently_used_connection_is_closed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `OPEN_MAX` connections open, a new one replaces the one that was used longest ago."""
    monkeypatch.setattr(direct_module, "OPEN_MAX", 2)
    a = start("a")
    for name in "bcd":
        start(name)
    for name in "bcb":
        await a.send(name, b"x")
    await a.send("d", b"x")
    assert [a.connected(name) for name in "bcd"] == [True, False, True]


@plays(run)
async def test_a_surplus_connection_is_closed(start: Start) -> None:
    """The second one to a peer, whichever end dialled, unless the first has ended; and any once this peer closes."""
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


@plays(run)
async def test_the_connection_of_a_peer_that_is_gone_is_dropped_when_another_is_made(start: Start) -> None:
    """So its buffers, a third of a megabyte, aren't kept until this peer sends to that one again, which it never will
    if that one is dead."""
    a, b = start("a"), start("b")
    start("c")
    await a.send("b", b"x")
    (lost,) = a.direct._way("b").connections
    await b.close()
    await until(lambda: lost.ended)
    await a.send("c", b"x")
    assert [a.connected(name) for name in "bc"] == [False, True]


@plays(run)
async def test_the_number_of_remembered_peers_is_limited(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond `PEERS_COUNTED_MAX` a peer without a connection, or an attempt to make one, is forgotten."""
    monkeypatch.setattr(direct_module, "PEERS_COUNTED_MAX", 3)
    a, _ = start("a"), start("b")
    await a.send("b", b"x")
    a.direct._way("c").attempt = asyncio.create_task(asyncio.sleep(0))
    for name in "defg":
        a.direct._way(name)
    assert list(a.direct._ways) == ["b", "c", "g"]


# -- where no direct connection can be made


@plays(run)
async def test_without_listeners_all_payloads_go_over_libp2p(start: Start) -> None:
    """If neither peer listens, every payload arrives, and no further attempt is made at once."""
    a, b = start("a", hosts=()), start("b", hosts=())
    for _ in range(3):
        await a.send("b", b"x")
    assert (a.libp2p_streams, a.talks, len(b.box.got)) == (1, 1, 3)
    assert a.traffic.ways() == {"b": "libp2p"}


@plays(run)
async def test_a_mute_address_delays_one_payload_briefly(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first payload waits a tenth of the time to connect, later ones don't wait. After the attempt has failed the
    next one comes after a while, and no payload waits for it. An answered payload clears the failure."""
    monkeypatch.setattr(direct_module, "PATIENCE_PART", 0.1)
    monkeypatch.setattr(direct_module, "DIAL_S", 3.0)
    with socket.socket() as hole, by_hand() as clock:
        a, b = start("a"), start("b")
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        a.told = lambda offer: replace(offer, ports=((4, hole.getsockname()[1]),))
        with changed_offers(a):
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
        assert way.failures == 1
        await a.send("b", b"direct")
        assert (way.failures, way.retry_at) == (0, 0.0)
        assert a.libp2p_streams == 1
        assert a.traffic.ways() == {"b": "direct"}
        assert len(b.box.got) == 6


@plays(run)
async def test_each_failure_doubles_the_wait(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to a limit. Several failures at the same time count as one. The log has the first one, and names the peer and
    each reason once."""
    caplog.set_level("INFO")
    a = start("a")
    now = 1000.0
    monkeypatch.setattr(a.direct, "_clock", lambda: now)
    way, waits = a.direct._way("b"), []
    for _ in range(7):
        a.direct.failed("b", "b: b: why; b: why; b: how")
        a.direct.failed("b", "why")
        waits.append(way.retry_at - now)
        now = way.retry_at
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    assert "payloads to b go over libp2p for the next 30 s: why; how" in caplog.messages


# -- connections that break, stand still or are closed while payloads are under way


@plays(run)
async def test_a_payload_on_a_broken_connection_goes_over_libp2p(start: Start) -> None:
    """The receiver's end is cut within a payload: it arrives over libp2p, the inbox is told of the break, and no direct
    connection is tried for a while."""
    a, b = start("a"), start("b")
    await a.send("b", b"first")
    sending = asyncio.create_task(a.send("b", bytes(48 << 20)))
    await until(lambda: any(p.filled_bytes > 1 << 20 for p in b.direct.listener._serving))
    for pipe in list(b.direct.listener._serving):
        pipe.transport.abort()
    await sending
    assert [len(payload) for _, _, payload in b.box.got] == [5, 48 << 20]
    assert (a.box.closed_peers, a.libp2p_streams) == (["b"], 1)
    assert 48 << 20 < a.traffic.bytes_sent < 49 << 20  # what broke was not a message
    await a.send("b", b"over libp2p")
    assert (a.libp2p_streams, a.talks) == (1, 1)
    assert a.traffic.ways() == {"b": "libp2p"}


@plays(run)
async def test_flipped_bits_are_never_delivered(start: Start) -> None:
    """They break the connection; the payload arrives whole over libp2p."""
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
    with changed_offers(a):
        await a.send("b", payload)
    assert passed > 1 << 20
    assert b.box.got == [("a", b"h", payload)]
    assert a.libp2p_streams == 1
    server.close()
    await until(lambda: len(asyncio.all_tasks()) < 50)
    await asyncio.sleep(0.1)


# -- dialling: at which addresses, whom the dialler trusts, and dialling back


@pytest.mark.parametrize(
    ("addresses", "places"),
    [
        (["/ip4/10.0.0.5/tcp/4001"], [("10.0.0.5", 40, socket.AF_INET)]),
        (["/ip6/::1/tcp/4001/p2p/Qm"], [("::1", 60, socket.AF_INET6)]),
        (["/dns4/box/tcp/1"], [("box", 40, socket.AF_INET)]),
        (["/dns6/box/tcp/1"], [("box", 60, socket.AF_INET6)]),
        (["/dns/box/tcp/1"], [("box", 40, socket.AF_INET), ("box", 60, socket.AF_INET6)]),
        (["/ip4/10.0.0.5/tcp/1", "/ip4/10.0.0.5/udp/2/quic-v1"], [("10.0.0.5", 40, socket.AF_INET)]),
        (["/ip4/10.0.0.5/tcp/1/p2p/Qm/p2p-circuit"], []),
        (["/p2p-circuit", "/unix/tmp", "", "nonsense"], []),
    ],
    ids=str,
)  # fmt: skip
def test_places_are_known_hosts_with_offered_ports(addresses: list[str], places: list[tuple[str, int, int]]) -> None:
    """Each host at which the peer is known, with the ports of its IP version. A relay's address leads to another peer
    and is left out."""
    assert places_of([(4, 40), (6, 60)], addresses) == places


@pytest.mark.parametrize("listens", [True, False])
@plays(run)
async def test_a_peer_that_cannot_be_dialled_dials_back(start: Start, listens: bool) -> None:
    """Whether it listens at an unreachable port or not at all, it gets its payloads on connections that it dials."""
    a, b = start("a"), start("b", hosts=("127.0.0.1",) if listens else ())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        if listens:
            b.direct.listener.__class__ = type("Odd", (Listener,), {"ports": ((4, closed.getsockname()[1]),)})
        for number in range(3):
            await a.send("b", bytes([number]))
            await b.send("a", bytes([number]))
    assert (a.traffic.ways(), b.traffic.ways()) == ({"b": "direct"}, {"a": "direct"})
    assert (a.libp2p_streams, b.libp2p_streams) == (0, 0)
    assert [p for _, _, p in b.box.got] == [p for _, _, p in a.box.got] == [b"\0", b"\1", b"\2"]
    assert b.box.got[0][0] == "a"


@plays(run)
async def test_the_number_of_connections_dialled_back_is_limited(start: Start) -> None:
    """A peer can't make another one dial without end. Connections that have ended don't count."""
    a, b = start("a"), start("b")
    lent = list[Pipe]()
    a.direct.listener._lend = lambda _, pipe: lent.append(pipe)
    for _ in range(CONNECTIONS_PER_PEER_MAX):
        await ask_to_dial_back(a, "b")
    with pytest.raises(Refusal, match="too many"):
        await ask_to_dial_back(a, "b")
    await until(lambda: len(lent) == CONNECTIONS_PER_PEER_MAX)
    for pipe in lent:
        pipe.abort()
    await until(lambda: not b.direct.listener._serving)
