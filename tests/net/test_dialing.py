"""Dialling for direct connections: at which addresses, whom the dialler trusts, and dialling back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace

import pytest

from p2p_diloco.net.direct import places_of
from p2p_diloco.net.framing import Accepted, encode
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.listener import CONNECTIONS_PER_PEER_MAX, KNOCK_BYTES, Listener
from p2p_diloco.net.pipe import Pipe
from tests.net.direct_peers import AT_ONCE_S, Start, ask_to_dial_back, changed_offers, run
from tests.net.patience import plays, until


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


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
@plays(run)
async def test_a_peer_that_listens_on_ipv6_alone_is_reached(start: Start) -> None:
    """A peer that listens on ::1 alone is reached there."""
    a, b = start("a"), start("b", hosts=("::1",))
    if not b.direct.listener.ports:
        pytest.skip("this machine has no ::1")
    b.known_at = "/ip6/::1/tcp/1"
    await a.send("b", b"six")
    assert a.traffic.ways() == {"b": "direct"}


@plays(run)
async def test_a_listener_that_is_another_peer_receives_nothing(start: Start) -> None:
    """It is of the same run, and gets the knock, but no payload."""
    a, b, impostor = start("a"), start("b"), start("impostor")
    heard: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(KNOCK_BYTES)
        pipe = await Pipe.adopt(reader, writer)
        with contextlib.suppress(OSError):
            inside = await impostor.direct._tls.secured(pipe, "a", server=False)
            await inside.more(AT_ONCE_S)
            heard.append(bytes(inside.unread))
        pipe.abort()

    server = await asyncio.start_server(hear, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    a.told = lambda offer: replace(offer, ports=((4, port),))
    with changed_offers(a):
        await a.send("b", b"secret")
    assert b.box.got == [("a", b"h", b"secret")]
    assert a.traffic.ways() == {"b": "libp2p"}
    server.close()
    await server.wait_closed()
    await until(lambda: heard in ([], [b""]))


@plays(run)
async def test_a_peer_that_does_not_listen_dials_back(start: Start) -> None:
    """It gets its payloads on connections that it has dialled."""
    a, b = start("a"), start("b", hosts=())
    for number in range(3):
        await a.send("b", bytes([number]))
        await b.send("a", bytes([number]))
    assert a.traffic.ways() == {"b": "direct"}
    assert b.traffic.ways() == {"a": "direct"}
    assert (a.libp2p_streams, b.libp2p_streams) == (0, 0)
    assert [p for _, _, p in b.box.got] == [p for _, _, p in a.box.got] == [b"\0", b"\1", b"\2"]
    assert b.box.got[0][0] == "a"


@plays(run)
async def test_a_peer_that_cannot_be_reached_dials_back(start: Start) -> None:
    """A peer that listens on an unreachable port gets its payloads on connections that it dials."""
    a, b = start("a"), start("b")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        b.direct.listener.__class__ = type("Odd", (Listener,), {"ports": ((4, closed.getsockname()[1]),)})
        await a.send("b", b"x")
    assert a.traffic.ways() == {"b": "direct"}


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


@pytest.mark.parametrize("request_", [b"nonsense", encode(Accepted())])
@plays(run)
async def test_an_unreadable_request_to_dial_back_is_refused(start: Start, request_: bytes) -> None:
    """It is answered, and nothing is dialled."""
    a, _ = start("a"), start("b")
    with pytest.raises(Refusal, match="an offer has another length"):
        await a.direct._ask("b", request_)
