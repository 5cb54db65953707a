"""Dialling for direct connections: at which addresses, whom the dialler trusts, and dialling back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import replace

import pytest

from p2p_diloco.net.direct import DIALLED_BACK_MAX, places_of
from p2p_diloco.net.framing import Accepted, encode
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.listener import Listener
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.tls import Certificate
from tests.net.direct_peers import Start, ask_to_dial_back, changed_offers, run
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
async def test_a_listener_with_another_certificate_receives_nothing(start: Start) -> None:
    """The listener gets neither the ticket nor a payload."""
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
    with changed_offers(a):
        await a.send("b", b"secret")
    assert b.box.got == [("a", b"h", b"secret")]
    assert b"".join(heard) == b""
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("certificate", [b"\x30\x82", os.urandom(500), Certificate().der])
@plays(run)
async def test_after_a_bad_offer_the_payload_goes_over_libp2p(start: Start, certificate: bytes) -> None:
    """The certificate can't be read, or is not the one that the listener shows."""
    a, b = start("a"), start("b")
    a.told = lambda offer: replace(offer, certificate=certificate)
    with changed_offers(a):
        await a.send("b", b"x")
    assert (a.libp2p_streams, b.box.got) == (1, [("a", b"h", b"x")])
    assert a.traffic.ways() == {"b": "libp2p"}


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
    for _ in range(DIALLED_BACK_MAX):
        await ask_to_dial_back(a, "b")
    with pytest.raises(Refusal, match="too many"):
        await ask_to_dial_back(a, "b")
    await until(lambda: len(lent) == DIALLED_BACK_MAX)
    for pipe in lent:
        pipe.abort()
    await until(lambda: not b.direct._dialled_back)


@pytest.mark.parametrize("request_", [b"nonsense", encode(Accepted())])
@plays(run)
async def test_an_unreadable_request_to_dial_back_is_refused(start: Start, request_: bytes) -> None:
    """It is answered, and nothing is dialled."""
    a, _ = start("a"), start("b")
    with pytest.raises(Refusal, match="an offer can't be read"):
        await a.direct._ask("b", request_)
