"""Which connections the listener lets in, and that the others cost next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import replace

import pytest

from p2p_diloco.net.framing import Accepted, Bulk, Message, Progress, Refused, encode
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.listener import I_SEND, TICKET_BYTES, WELCOME, Listener, Offer
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.tls import connect
from tests.net.clocks import by_hand
from tests.net.direct_peers import AT_ONCE_S, LIMITS, Start, let_in, offer_of, run
from tests.net.gates import answers
from tests.net.patience import plays, until


async def welcomed(offer: Offer, ticket: bytes, role: bytes = I_SEND) -> bool:
    """Whether the listener accepts a connection with this ticket."""
    reader, writer = await connect("127.0.0.1", offer.ports[0][1], socket.AF_INET, offer.certificate)
    try:
        writer.write(ticket + role)
        return await reader.read(1) == WELCOME
    except OSError:
        return False
    finally:
        writer.transport.abort()


@plays(run)
async def test_a_ticket_lets_one_connection_in(start: Start) -> None:
    """A ticket that was used, a wrong one and one with an unknown role are turned away, and counted."""
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


@plays(run)
async def test_the_ticket_says_which_peer_sends(start: Start) -> None:
    """A payload counts as sent by the peer for which the ticket was drawn, whatever its header says."""
    a, b = start("a"), start("b")
    _, writer = await let_in(a, "b")
    writer.write(encode(Bulk(b"from somebody else", 3)) + b"abc")
    await until(lambda: b.box.got)
    assert b.box.got == [("a", b"from somebody else", b"abc")]
    writer.transport.abort()


@plays(run)
async def test_while_no_ticket_is_valid_connections_are_closed_unread(start: Start) -> None:
    """They are closed before the handshake, and counted."""
    b = start("b")
    for count in (1, 2):
        reader, writer = await asyncio.open_connection("127.0.0.1", b.port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), AT_ONCE_S) == b""
        writer.close()
        assert b.direct.listener.turned_away == count


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\x16\x03\x01\x02\x00\x01"])
@plays(run)
async def test_a_connection_without_a_handshake_is_closed_at_its_deadline(
    start: Start, monkeypatch: pytest.MonkeyPatch, noise: bytes
) -> None:
    """Silence, another protocol, half a handshake: closed and counted, while other connections are served."""
    monkeypatch.setattr("p2p_diloco.net.listener.HANDSHAKE_S", 0.3)
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


@plays(run)
async def test_the_number_of_handshakes_is_limited(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection beyond `HANDSHAKES_MAX` is closed at once. When earlier ones have ended there is room again."""
    monkeypatch.setattr("p2p_diloco.net.listener.HANDSHAKES_MAX", 2)
    monkeypatch.setattr("p2p_diloco.net.listener.HANDSHAKE_S", 0.3)
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


@plays(run)
async def test_the_number_of_connections_from_a_peer_is_limited(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection beyond `CONNECTIONS_PER_PEER_MAX` is closed; another peer's is let in."""
    monkeypatch.setattr("p2p_diloco.net.listener.CONNECTIONS_PER_PEER_MAX", 1)
    a, b = start("a"), start("b")
    await a.send("b", b"takes the only one")
    offer = await offer_of(a, "b")
    assert not await welcomed(offer, offer.ticket)
    other = await offer_of(start("c"), "b")
    assert await welcomed(other, other.ticket)
    assert b.direct.listener.turned_away == 1


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"no frame at all", "no frame"),
        (encode(Message(b"hello")), "no place"),
        (encode(Accepted()), "no place"),
        (encode(Bulk(b"h", 1000)) + b"some", "no byte came"),
    ],
)
@plays(run)
async def test_a_protocol_error_ends_its_connection_alone(start: Start, sent: bytes, reason: str) -> None:
    """After a valid ticket: the sender is told why, the refusal is counted for its peer, and other peers are served."""
    impatient = replace(LIMITS, read_timeout_s=1.0, rate_bytes_per_s_min=10.0)
    a, b, c = start("a"), start("b", limits=impatient), start("c")
    await c.send("b", b"before")
    reader, writer = await let_in(a, "b")
    writer.write(sent)
    (frame,) = await answers(reader, 1)
    if isinstance(frame, Progress):
        (frame,) = await answers(reader, 1)
    assert isinstance(frame, Refused)
    assert reason in frame.reason
    writer.transport.abort()
    await c.send("b", b"after")
    assert b.traffic.peers["a"].refused == 1
    assert [payload for _, _, payload in b.box.got] == [b"before", b"after"]


@plays(run)
async def test_a_connection_accepted_while_closing_is_closed(start: Start) -> None:
    """The task that would greet it is cancelled before it begins, and its socket is closed nevertheless."""
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


@plays(run)
async def test_a_closed_channel_makes_no_offers(start: Start) -> None:
    """A peer that asks is refused, and the port is closed."""
    a, b = start("a"), start("b")
    port = b.port
    b.direct.end()
    with pytest.raises(Refusal, match="closing"):
        await a.direct._ask("b", b"")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


@plays(run)
async def test_a_connection_let_in_while_the_listener_ends_is_closed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener ends between the moment when a ticket was accepted and the moment when the connection is served."""
    a, b = start("a"), start("b")
    proved = Listener._proved

    async def proved_then_ended(listener: Listener, sock: socket.socket) -> tuple[str, bytes, Pipe]:
        result = await proved(listener, sock)
        asyncio.get_running_loop().call_soon(listener.end)
        return result

    monkeypatch.setattr(Listener, "_proved", proved_then_ended)
    reader, writer = await let_in(a, "b")
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), AT_ONCE_S) == b""
    writer.transport.abort()
    assert not b.direct.listener.ports
