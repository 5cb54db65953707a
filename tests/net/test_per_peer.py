"""Payloads over libp2p on streams that are kept: many go on one, and nothing is lost with it.

The streams are socket pairs here; `test_hivemind` has real daemons.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from p2p_diloco.net.exchange import OnePerPeer
from p2p_diloco.net.framing import Accepted, Bulk, encode
from p2p_diloco.net.interface import Limits, Unreachable
from p2p_diloco.net.outgoing import Outgoing
from p2p_diloco.net.pipe import Pipe
from tests.net import direct_peers, test_exchange
from tests.net.clocks import by_hand
from tests.net.direct_peers import AT_ONCE_S, LIMITS, Peer
from tests.net.gates import LONG, Gate, sent
from tests.net.patience import awaited, plays, until
from tests.net.test_exchange import Rig, Stranger

Start = Callable[..., Peer]


def run(test: Callable[[Start], Awaitable[None]]) -> None:
    """As `direct_peers.run`, without direct connections."""

    async def plain(start: Start) -> None:
        def begin(name: str, limits: Limits = LIMITS) -> Peer:
            peer = start(name, hosts=(), limits=limits)
            peer.exchange.direct = None
            return peer

        await test(begin)

    direct_peers.run(plain)


def served(peer: Peer) -> list[Pipe]:
    """The streams that others keep open to this peer."""
    return [pipe for pipe in peer.exchange.streams.pipes if pipe.ended is None]


def to_far(rig: Rig, header: bytes, payload: bytes = b"x") -> asyncio.Task[None]:
    return asyncio.create_task(rig.exchange.send("far", header, memoryview(payload)))


async def payloads(far: Stranger, count: int) -> list[bytes]:
    """The headers of the next payloads, of one byte each."""
    headers = []
    for _ in range(count):
        bulk = await far.read()
        assert isinstance(bulk, Bulk)
        headers.append(bulk.header)
        far.take(1)
    return headers


# -- what goes well


# -- what breaks


@pytest.mark.parametrize("at_once", [1, 3])
@plays(run)
async def test_a_stream_that_broke_unused_is_replaced(start: Start, at_once: int) -> None:
    """The next payload goes on another stream, and the inbox isn't told."""
    a, b = start("a"), start("b")
    await a.send("b", b"first")
    for pipe in served(b):
        pipe.abort()
    await until(lambda: not served(a))
    await asyncio.gather(*(a.send("b", b"next") for _ in range(at_once)))
    assert [payload for _, _, payload in b.box.got] == [b"first", *at_once * [b"next"]]
    assert a.libp2p_streams == 2
    assert a.box.closed_peers == b.box.closed_peers == []


@pytest.mark.parametrize("breaks_again", [False, True])
@awaited
async def test_a_payload_on_a_used_stream_that_breaks_is_sent_once_more(breaks_again: bool) -> None:
    """A stream that carried other payloads may have broken before, unseen. If the fresh one breaks too, the peer is
    unreachable."""
    rig = Rig()
    first = to_far(rig, b"1")
    far = await rig.dialled()
    assert await payloads(far, 1) == [b"1"]
    far.write(Accepted())
    await first
    sends = [to_far(rig, header) for header in (b"2", b"3")]
    assert await payloads(far, 2) == [b"2", b"3"]
    far.writer.close()
    fresh = await rig.dialled()
    assert await payloads(fresh, 2) == [b"2", b"3"]
    assert rig.box.closed_peers == ["far", "far"]
    if breaks_again:
        fresh.writer.close()
        for send in sends:
            with pytest.raises(Unreachable, match="ended before"):
                await send
    else:
        fresh.write(Accepted())
        fresh.write(Accepted())
        await asyncio.gather(*sends)
    assert len(rig.far_ends) == 2
    await rig.exchange.close()


@awaited
async def test_a_payload_on_a_fresh_stream_that_breaks_is_not_sent_again() -> None:
    """A peer that ends a stream before it has answered anything is unreachable at once."""
    rig = Rig()
    send = to_far(rig, b"1")
    far = await rig.dialled()
    assert await far.read() == Bulk(b"1", 1)
    far.writer.close()
    with pytest.raises(Unreachable, match="ended before"):
        await send
    assert (len(rig.far_ends), rig.box.closed_peers) == (1, ["far"])
    await rig.exchange.close()


# -- how long it is kept


@plays(run)
async def test_a_stream_is_kept_for_its_life_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its life time a stream ends at both ends, used or not. Waiting sends get answers; later payloads dial
    again."""
    monkeypatch.setattr("p2p_diloco.net.exchange.STREAM_LIFE_S", 0.3)
    with by_hand() as clock:
        a, b = start("a"), start("b")
        await a.send("b", b"first")
        (kept,) = served(a)
        gate = Gate(b)
        sends = sent(a, b"1")
        await clock.until(lambda: gate.come == [b"1"])
        await clock.passes(0.4)
        assert kept.ended is None
        gate.open.set()
        await asyncio.gather(*sends)
        assert kept.ended
        assert a.libp2p_streams == 1
        await a.send("b", b"next")
        assert a.libp2p_streams == 2
        await clock.passes(0.4)
        await clock.until(lambda: not served(a) and not served(b))
    assert not a.exchange._over_libp2p._opened
    assert not b.traffic.refused


@awaited
async def test_a_receiver_ends_a_stream_without_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that keeps a stream open for longer than allowed, and sends nothing, is told why it ends."""
    monkeypatch.setattr("p2p_diloco.net.receiving.NEXT_PAYLOAD_S", 0.4)
    rig = Rig()
    stranger = await rig.stranger()
    stranger.write(encode(Bulk(b"1", 1)) + b"x")
    assert await stranger.read() == Accepted()
    assert "nothing came" in await stranger.refusal()
    await rig.exchange.close()


@awaited
async def test_unread_answers_end_the_stream() -> None:
    """Once they fill the stream no further payload is read, and then the stream is ended."""
    rig = Rig(limits=replace(test_exchange.LIMITS, write_timeout_s=0.4))
    stranger = await rig.stranger()
    stranger.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await until(lambda: len(rig.exchange.streams.pipes) == 1)
    for pipe in rig.exchange.streams.pipes:
        pipe.transport.set_write_buffer_limits(0)
    count = 20_000
    stranger.write(encode(Bulk(b"1", 0)) * count)
    await asyncio.wait(rig.serving)
    assert 0 < len(rig.box.headers) < count
    await rig.exchange.close()


@plays(run)
async def test_the_number_of_kept_streams_is_limited(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than allowed is ended when it has its answer, and what follows goes on another; those that are there
    stay, and a place that is left is free."""
    monkeypatch.setattr("p2p_diloco.net.receiving.LINGER_S", 0.5)
    limits = replace(LIMITS, links_max=2)
    with by_hand() as clock:
        b = start("b", limits=limits)
        peers = [start(name) for name in "acd"]
        for peer in peers:
            await peer.send("b", b"x")
        await clock.passes(0.3)
        assert len(served(peers[2])) == 1  # its answer might still be on its way
        await clock.passes(0.3)
        await clock.until(lambda: sum(len(served(peer)) for peer in peers) == 2)
        for peer in peers[::-1]:
            await peer.send("b", b"y")
        assert [peer.libp2p_streams for peer in peers] == [1, 1, 2]
        assert all(peer.box.closed_peers == [] for peer in peers)
        await peers[0].close()
        await clock.until(lambda: b.exchange.receiver._awaiting_payloads == 1)
        await clock.passes(0.6)
        await clock.until(lambda: not served(peers[2]))
        await peers[2].send("b", b"z")
        await clock.until(lambda: b.exchange.receiver._awaiting_payloads == 2)
        await clock.passes(0.8)  # longer than who has its answer is left to hang up
        streams = peers[2].libp2p_streams
        await peers[2].send("b", b"z")
        assert peers[2].libp2p_streams == streams


@pytest.mark.parametrize("waits_for", ["an answer", "its turn", "a stream"])
@plays(run)
async def test_closing_leaves_no_stream(start: Start, waits_for: str) -> None:
    """Neither a kept one nor one that is being opened, and none is opened afterwards."""
    dialling = waits_for == "a stream"
    a, b = start("a"), start("b")
    gate = Gate(b)
    if dialling:
        a.exchange._dial = lambda peer: asyncio.sleep(LIMITS.read_timeout_s)  # type: ignore[assignment,return-value]
    sends = sent(a, b"1", b"2", b"3", nbytes=LONG if waits_for == "its turn" else 1)
    if dialling:
        sends.append(asyncio.create_task(a.exchange.send("b", b"message", None)))
        await asyncio.sleep(0)  # all have begun
    else:
        await until(lambda: gate.come == [b"1"])
    began = time.monotonic()
    await a.close()
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert [type(result) for result in results] == [Unreachable] * len(sends)
    assert time.monotonic() - began < AT_ONCE_S
    assert a.libp2p_streams == (0 if dialling else 1)
    assert not served(a)
    assert a.box.closed_peers == []
    gate.open.set()
    await until(lambda: not served(b))


# -- one of a kind for each peer


@awaited
async def test_a_cancelled_caller_does_not_cancel_the_opening() -> None:
    """The others go on waiting; when all openings are ended they get `Unreachable`."""
    may = asyncio.Event()

    async def open(peer: str) -> Outgoing:
        await may.wait()
        return Outgoing.__new__(Outgoing)

    kept = OnePerPeer(open)
    gone, waits = (asyncio.create_task(kept.to("a")) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    assert gone.cancelled()
    may.set()
    await waits
    may.clear()
    last = asyncio.create_task(kept.to("b"))
    await asyncio.sleep(0)
    kept.end()
    with pytest.raises(Unreachable, match="closing"):
        await last
    with pytest.raises(Unreachable, match="closing"):
        await kept.to("c")
