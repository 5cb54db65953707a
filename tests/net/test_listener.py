"""Which connections the listener lets in, and that the others cost next to nothing; offers, and their knocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest

from p2p_diloco.net.framing import Accepted, Bulk, FrameError, encode
from p2p_diloco.net.listener import (
    KNOCK_BYTES,
    KNOCK_LIFE_S,
    KNOCKS_MAX,
    KNOCKS_PER_PEER_MAX,
    PORTS_MAX,
    Knocks,
    Listener,
    Offer,
)
from p2p_diloco.net.pipe import Pipe
from tests.net.clocks import by_hand
from tests.net.direct_peers import AT_ONCE_S, Peer, Start, answers, let_in, offer_of, run
from tests.net.patience import plays, until


async def welcomed(asker: Peer, knock: bytes) -> bool:
    """Whether b takes a payload on a connection of the asker that begins with this knock."""
    try:
        pipe = await let_in(asker, "b", Offer((), knock))
    except OSError:
        return False
    try:
        pipe.write(encode(Bulk(b"h", 0)))
        return await answers(pipe, 1) == [Accepted()]
    finally:
        pipe.abort()


@plays(run)
async def test_a_knock_lets_its_peer_in_once(start: Start) -> None:
    """One that was used, a wrong one, and another peer's are turned away, and counted."""
    a, b, c = start("a"), start("b"), start("c")
    used, stolen, _ = [(await offer_of(a, "b")).knock for _ in range(3)]
    assert await welcomed(a, used)
    for asker, knock in ((a, used), (a, os.urandom(KNOCK_BYTES)), (c, stolen), (a, stolen)):
        assert not await welcomed(asker, knock)
    await until(lambda: b.direct.listener.turned_away == 4)
    await a.send("b", b"still served")
    assert b.box.got == [("a", b"h", b""), ("a", b"h", b"still served")]


@plays(run)
async def test_while_no_knock_is_valid_connections_are_closed_unread(start: Start) -> None:
    """They are closed before the handshake, and counted."""
    b = start("b")
    for count in (1, 2):
        reader, writer = await asyncio.open_connection("127.0.0.1", b.port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), AT_ONCE_S) == b""
        writer.close()
        assert b.direct.listener.turned_away == count


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\x16\x03\x01\x02\x00\x01"])
@plays(run)
async def test_a_connection_needs_a_handshake(start: Start, monkeypatch: pytest.MonkeyPatch, noise: bytes) -> None:
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
    assert await welcomed(a, (await offer_of(a, "b")).knock) is False
    c = start("c")
    assert await welcomed(c, (await offer_of(c, "b")).knock)
    assert b.direct.listener.turned_away == 1


@plays(run)
async def test_a_connection_let_in_at_the_end_is_closed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener ends between the moment when its peer was proven and the moment when the connection is served."""
    a, b = start("a"), start("b")
    proved = Listener._proved

    async def proved_then_ended(listener: Listener, sock: socket.socket) -> tuple[str, bool, Pipe]:
        result = await proved(listener, sock)
        asyncio.get_running_loop().call_soon(listener.end)
        return result

    monkeypatch.setattr(Listener, "_proved", proved_then_ended)
    pipe = await let_in(a, "b")
    assert not await pipe.more(AT_ONCE_S)
    assert not b.direct.listener.ports


# -- offers and knocks

OFFER = Offer(((4, 1), (6, 65535)), bytes(KNOCK_BYTES))


def test_an_offer_is_unpacked_as_it_was_packed() -> None:
    """Also with the most ports."""
    for offer in (OFFER, Offer(((4, 80),) * PORTS_MAX, b"k" * KNOCK_BYTES)):
        assert Offer.unpack(offer.pack()) == offer


@pytest.mark.parametrize("ports", [(), ((4, 1),) * (PORTS_MAX + 1), ((5, 1),), ((4, 0),)], ids=str)
def test_an_offer_with_ports_out_of_range_is_an_error(ports: tuple[tuple[int, int], ...]) -> None:
    """One such port is enough."""
    with pytest.raises(FrameError):
        Offer.unpack(Offer(ports, bytes(KNOCK_BYTES)).pack())


def test_knocks_expire_and_are_limited() -> None:
    # A knock expires. While any knock is valid, connections are expected.
    now = 100.0
    knocks = Knocks(lambda: now)
    assert not knocks
    early = knocks.draw("a", sends=False)
    now += KNOCK_LIFE_S - 1
    late = knocks.draw("a", sends=False)
    assert knocks
    now += 2
    assert knocks.use(early) is None
    assert knocks.use(late) == ("a", False)
    assert not knocks

    # The number of knocks is limited. A peer's newest replaces its own oldest only; beyond the total limit the
    # oldest of all goes.
    knocks = Knocks(lambda: 100.0)
    other = knocks.draw("other", sends=False)
    drawn = [knocks.draw("greedy", sends=False) for _ in range(KNOCKS_PER_PEER_MAX + 1)]
    assert knocks.use(drawn[0]) is None
    assert knocks.use(other) == ("other", False)
    for number in range(KNOCKS_MAX):
        knocks.draw(f"peer {number}", sends=False)
    assert knocks.use(drawn[1]) is None
    assert len(knocks._open) == KNOCKS_MAX
