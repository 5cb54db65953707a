"""What a peer does with streams that misbehave, over socket pairs: refuse, count, close, and serve the
others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from p2p_diloco.net.exchange import Exchange, OnePerPeer
from p2p_diloco.net.framing import (
    MAGIC,
    PREFIX,
    VERSION,
    Accepted,
    Bulk,
    Frame,
    FrameDecoder,
    Message,
    Progress,
    Refused,
    encode,
)
from p2p_diloco.net.interface import Limits, Refusal, Traffic, Unreachable
from p2p_diloco.net.outgoing import Outgoing
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.receiving import TURN_S
from tests.net import direct_peers
from tests.net.clocks import by_hand
from tests.net.direct_peers import Gate, Peer, Start, sent
from tests.net.inboxes import Box
from tests.net.patience import awaited, plays, until

LIMITS = Limits(read_timeout_s=30.0, write_timeout_s=30.0, payload_bytes_max=1 << 20, streams_max=2, links_max=2)
"""Deadlines that no test waits for, unless it turns the clock."""
AT_ONCE_S = LIMITS.read_timeout_s / 3
"""What has waited for no deadline takes less."""
SHORT = replace(LIMITS, read_timeout_s=0.4)


@dataclass
class Rig:
    """An exchange, and raw ends of streams to and from it."""

    limits: Limits = LIMITS
    box: Box = field(default_factory=Box)
    traffic: Traffic = field(default_factory=Traffic)
    far_ends: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)
    serving: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exchange = Exchange(self.box, limits=self.limits, traffic=self.traffic, dial=self.dial)

    async def dial(self, peer: str, *, around: bool = False) -> tuple[Pipe, str]:
        near, far = socket.socketpair()
        self.far_ends.append(await asyncio.open_connection(sock=far))
        return await Pipe.adopt(*await asyncio.open_connection(sock=near)), "/ip4/127.0.0.1/tcp/1"

    async def stranger(self, peer: str = "stranger") -> Stranger:
        """The far end of a stream that a peer opened to the exchange."""
        pipe, _ = await self.dial(peer)
        self.serving.append(asyncio.create_task(self.exchange.receiver.serve(peer, pipe)))
        return Stranger(*self.far_ends[-1])

    async def dialled(self) -> Stranger:
        """The far end of the stream that the exchange opens next."""
        count = len(self.far_ends)
        while len(self.far_ends) == count:
            await asyncio.sleep(0)
        return Stranger(*self.far_ends[-1])


class Stranger:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.buffer = bytearray()
        self.decoder = FrameDecoder(self.buffer, header_bytes_max=1000)

    def write(self, data: bytes | Frame) -> None:
        self.writer.write(data if isinstance(data, bytes) else encode(data))

    def take(self, count: int) -> bytes:
        """At most so many of the bytes after the last frame."""
        taken = bytes(self.buffer[:count])
        del self.buffer[:count]
        return taken

    async def read(self) -> Frame | None:
        while (frame := self.decoder.next_frame()) is None:
            with contextlib.suppress(ConnectionError):
                if data := await asyncio.wait_for(self.reader.read(1 << 16), 30):
                    self.buffer += data
                    continue
            return None
        return frame

    async def refusal(self) -> str:
        """The reason that comes back before the stream is closed."""
        while isinstance(frame := await self.read(), Progress):
            pass
        assert isinstance(frame, Refused), frame
        self.writer.close()
        return frame.reason


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "no frame"),
        (PREFIX.pack(MAGIC, VERSION + 1, 0), f"version {VERSION + 1}, this peer speaks {VERSION}"),
        (PREFIX.pack(MAGIC, VERSION, 1 << 30), "bytes"),
        (PREFIX.pack(MAGIC, VERSION, 2) + b"\x91\x4d", "can't be read"),
        (encode(Accepted()), "no place"),
        (encode(Message(b"fine")) + encode(Accepted()), "no place"),
        (encode(Message(b"fine")) + encode(Bulk(b"h", 1)) + b"x", "no place"),
        (encode(Bulk(b"fine", 1)) + b"x" + encode(Message(b"lost")), "no place"),
        (encode(Message(b"cut short"))[:-1], "nothing came"),
        (b"", "nothing came"),
        (encode(Bulk(b"h", (1 << 20) + 1)), "at most 1048576"),
        (encode(Bulk(b"h", 2**64 - 1)), "at most 1048576"),
        (encode(Bulk(b"h", 1000)) + b"some", "no byte came"),
    ],
)
@awaited
async def test_a_protocol_error_ends_its_stream_alone(sent: bytes, reason: str) -> None:
    """The sender is told why, the refusal is counted and the stream closed; another peer's link goes on."""
    rig = Rig(limits=replace(SHORT, rate_bytes_per_s_min=10.0))
    friend, stranger = await rig.stranger("friend"), await rig.stranger()
    friend.write(Message(b"before"))
    assert await friend.read() == Accepted()
    stranger.write(sent)
    if b"fine" in sent:
        assert await stranger.read() == Accepted()
    assert reason in await stranger.refusal()
    await asyncio.wait_for(rig.serving[1], AT_ONCE_S)
    assert rig.traffic.peers["stranger"].refused == rig.traffic.refused == 1
    friend.write(Message(b"after"))
    assert await friend.read() == Accepted()
    assert [header for header in rig.box.headers if header != b"fine"] == [b"before", b"after"]
    await rig.exchange.close()


@awaited
async def test_a_frame_must_be_complete_in_time_once_it_has_begun() -> None:
    """Bytes that trickle don't extend its deadline. Between frames a link may be idle for any time."""
    with by_hand() as clock:
        rig = Rig(limits=SHORT)
        stranger = await rig.stranger()
        stranger.write(Message(b"first"))
        assert await stranger.read() == Accepted()
        await clock.passes(10 * SHORT.read_timeout_s)
        assert not rig.serving[0].done()
        frame = encode(Message(bytes(100)))
        refusal, started = asyncio.create_task(stranger.refusal()), clock.now
        for byte in frame[:90]:
            stranger.write(bytes([byte]))
            await clock.passes(0.05)
            if refusal.done():
                break
        assert "nothing came" in await refusal
        assert 0.3 < clock.now - started < 0.8
    await rig.exchange.close()


@awaited
async def test_a_payload_slower_than_the_least_rate_is_cut_off() -> None:
    """Bytes that keep coming, but too slowly, end at the payload's own deadline."""
    with by_hand() as clock:
        rig = Rig(limits=replace(SHORT, rate_bytes_per_s_min=1e6))
        stranger = await rig.stranger()
        stranger.write(Bulk(b"h", 1000))
        refusal, started = asyncio.create_task(stranger.refusal()), clock.now
        while not refusal.done():
            stranger.write(b"x")
            await clock.passes(0.05)
        assert "took longer" in await refusal
        assert 0.3 < clock.now - started < 0.8
    await rig.exchange.close()


@pytest.mark.parametrize("whole", [True, False])
@awaited
async def test_a_payload_is_under_way_until_all_of_it_has_come(whole: bool) -> None:
    """The sender hears how far it has come, and then that it was taken; the inbox hears that the sender lives, and the
    node that a payload is coming. If its stream breaks nothing is delivered, and the node hears of it."""
    rig, coming = Rig(), list[bool]()

    @contextlib.contextmanager
    def receiving() -> Iterator[None]:
        coming.append(True)
        try:
            yield
        finally:
            coming.append(False)

    rig.traffic.receiving = receiving
    link, stranger = await rig.stranger(), await rig.stranger()
    link.write(Message(b"no payload"))
    assert await link.read() == Accepted()
    assert (coming, rig.box.moving_peers) == ([], [])
    stranger.write(encode(Bulk(b"h", 8)) + b"half")
    assert await stranger.read() == Progress(4)
    assert (coming, rig.box.moving_peers) == ([True], ["stranger"])
    if whole:
        stranger.write(b"full")
        assert await stranger.read() == Accepted()
        assert rig.box.headers == [b"no payload", b"h"]
    else:
        stranger.writer.close()
        await asyncio.wait_for(rig.serving[1], AT_ONCE_S)
        assert (rig.box.headers, rig.box.closed_peers) == ([b"no payload"], ["stranger"])
    assert coming == [True, False]
    await rig.exchange.close()


@awaited
async def test_a_sender_tells_a_slow_receiver_from_a_frozen_one() -> None:
    """Progress keeps a payload going beyond the read timeout; when it stops coming, `send` ends within one
    more."""
    rig = Rig(limits=replace(SHORT, rate_bytes_per_s_min=100.0))
    with by_hand() as clock:
        sending = asyncio.create_task(rig.exchange.send("slow", b"h", memoryview(bytes(1000))))
        slow = await rig.dialled()
        for count in range(1, 5):
            await clock.passes(0.25)
            slow.write(Progress(count))
            await clock.until(lambda count=count: len(rig.box.moving_peers) == count)
        assert not sending.done()
        assert 0.3 < await clock.over(sending, step_s=0.05) < 0.8
        with pytest.raises(Unreachable, match="nothing came"):
            await sending
    assert rig.box.moving_peers == ["slow"] * 4
    await rig.exchange.close()


@pytest.mark.parametrize("answer", [b"nonsense", encode(Message(b""))])
@pytest.mark.parametrize("payload", [None, memoryview(bytes(1000))])
@awaited
async def test_a_frame_that_is_no_answer_makes_the_receiver_unreachable(
    answer: bytes, payload: memoryview | None
) -> None:
    """At once, not at a deadline."""
    rig = Rig()
    sending = asyncio.create_task(rig.exchange.send("odd", b"h", payload))
    (await rig.dialled()).write(answer)
    with pytest.raises(Unreachable):
        await asyncio.wait_for(sending, AT_ONCE_S)
    await rig.exchange.close()


@awaited
async def test_a_surplus_answer_ends_the_link() -> None:
    """A surplus answer would shift all that follow: the link is given up, and the next message opens
    another."""
    rig = Rig()
    sending = asyncio.create_task(rig.exchange.send("odd", b"1", None))
    odd = await rig.dialled()
    assert await odd.read() == Message(b"1")
    odd.write(encode(Accepted()) + encode(Accepted()))
    await sending
    sending = asyncio.create_task(rig.exchange.send("odd", b"2", None))
    second = await rig.dialled() if len(rig.far_ends) == 1 else Stranger(*rig.far_ends[-1])
    assert await second.read() == Message(b"2")
    second.write(Accepted())
    await sending
    assert rig.box.closed_peers == ["odd"]
    await rig.exchange.close()


@pytest.mark.parametrize("accepted", [False, True])
@awaited
async def test_messages_of_one_grant_are_read_at_a_pace_if_they_are_refused_or_too_many(accepted: bool) -> None:
    """However many of its peers send them without pause; others' messages don't wait."""
    rig, hasty, most = Rig(limits=replace(LIMITS, links_max=3)), list[str](), 10
    rig.exchange.streams.groups = lambda peer: peer[0]

    async def deliver(sender: str, header: bytes, payload: memoryview | None) -> bool:
        if sender == "other":
            rig.box.got.append((sender, header, None))
            return False
        hasty.append(sender)
        if not accepted:
            raise Refusal("no")
        return True

    rig.box.deliver = deliver  # type: ignore[method-assign]
    with by_hand() as clock:
        for peer in ("xa", "xb", "other"):
            stranger = await rig.stranger(peer)
            stranger.write(most * encode(Message(b"hello")))
        await clock.until(lambda: len(rig.box.headers) == most)
        assert sorted(hasty) == ["xa", "xb"]
        for turns in range(1, 2 * most):
            await clock.passes(TURN_S)
            assert len(hasty) <= turns + 2
        await clock.passes(TURN_S)
        assert len(hasty) == 2 * most
    await rig.exchange.close()


@awaited
async def test_a_peer_has_one_link_and_all_peers_have_a_few() -> None:
    """A newer link replaces the older one: the peer isn't reported as gone; the end of its last link is, once. A link
    more than allowed is refused with the reason; those that are there stay, and a place that is left is free."""
    rig = Rig()
    older, newer, other, third = [await rig.stranger(name) for name in ("a", "a", "b", "c")]
    for link in (older, newer, other):
        link.write(Message(b"hello"))
        assert await link.read() == Accepted()
    assert await older.read() is None
    third.write(Message(b"hello"))
    assert "2 links" in await third.refusal()
    assert rig.box.closed_peers == []
    newer.writer.close()
    await asyncio.wait_for(rig.serving[1], AT_ONCE_S)
    assert rig.box.closed_peers == ["a"]
    late = await rig.stranger("d")
    late.write(Message(b"hello"))
    assert await late.read() == Accepted()
    await rig.exchange.close()


@awaited
async def test_payloads_under_way_are_limited_in_number() -> None:
    """One more than allowed waits for its turn, and is told that this peer is busy if none comes."""
    rig = Rig()
    streams = [await rig.stranger(name) for name in ("a", "b", "c")]
    for stream in streams[:2]:
        stream.write(Bulk(b"h", 10))
    with by_hand() as clock:
        await clock.until(rig.exchange.receiver._receiving.locked)
        streams[2].write(Bulk(b"h", 0))
        refusal = asyncio.create_task(streams[2].refusal())
        assert 0.4 < await clock.over(refusal, step_s=0.5) / LIMITS.read_timeout_s < 0.6
        assert "busy" in await refusal
    for stream in streams[:2]:
        stream.write(bytes(10))
        assert await stream.read() == Accepted()
    last = await rig.stranger("d")
    last.write(Bulk(b"h", 0))
    assert await last.read() == Accepted()
    await rig.exchange.close()


@awaited
async def test_refusals_of_one_peer_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that sends refused messages again and again doesn't fill the log."""
    caplog.set_level("INFO")
    rig = Rig()

    async def refuse(sender: str, header: bytes, payload: memoryview | None) -> None:
        raise Refusal("not today")

    rig.box.deliver = refuse  # type: ignore[method-assign]
    for peer in ("one", "other"):
        stranger = await rig.stranger(peer)
        for _ in range(5):
            stranger.write(Message(b"again"))
            assert isinstance(await stranger.read(), Refused)
        stranger.writer.close()
    assert rig.traffic.refused == 10
    await rig.exchange.close()
    assert [record.message.split()[4] for record in caplog.records] == ["one:", "other:"]


@awaited
async def test_a_payload_is_measured_at_both_ends() -> None:
    """By the receiver's progress and by what has come; what is too short to say something is not."""
    rig = Rig()
    size, both = LIMITS.payload_bytes_max, rig.traffic.bandwidth
    for meter in (both.up, both.down):
        meter.begin("another partner", asyncio.get_running_loop().time())
    sending = asyncio.create_task(rig.exchange.send("a", b"h", memoryview(bytes(size))))
    far = await rig.dialled()
    assert await far.read() == Bulk(b"h", size)
    far.write(Progress(size // 2))
    await asyncio.wait_for(far.reader.readexactly(size - len(far.take(size))), 30.0)
    far.write(Accepted())
    await sending
    stranger = await rig.stranger()
    stranger.write(Bulk(b"h", size))
    stranger.write(bytes(size))
    assert await stranger.read() == Accepted()
    assert [sum(meter._windows.values()) for meter in (both.up, both.down)] == pytest.approx([size, size])
    stranger = await rig.stranger()
    stranger.write(Bulk(b"h", 1000))
    stranger.write(bytes(1000))
    assert await stranger.read() == Accepted()
    assert sum(both.down._windows.values()) == size
    await rig.exchange.close()


# -- payloads over libp2p on streams that are kept


def run(test: Callable[[Start], Awaitable[None]]) -> None:
    """As `direct_peers.run`, without direct connections."""

    async def plain(start: Start) -> None:
        def begin(name: str, **options: Any) -> Peer:
            peer = start(name, hosts=(), **options)
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
async def test_unread_answers_end_the_stream() -> None:
    """Once they fill the stream no further payload is read, and then the stream is ended."""
    rig = Rig(limits=replace(LIMITS, write_timeout_s=0.4))
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
    limits = replace(direct_peers.LIMITS, links_max=2)
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


@plays(run)
async def test_closing_ends_what_waits_for_a_stream(start: Start) -> None:
    """A message and a payload, at once."""
    a, _ = start("a"), start("b")
    hangs: Any = lambda peer, **_: asyncio.sleep(direct_peers.LIMITS.read_timeout_s)  # noqa: E731
    a.exchange._dial = a.exchange.links._dial = hangs
    sends = [asyncio.create_task(a.exchange.send("b", b"h", payload)) for payload in (memoryview(b"x"), None)]
    await asyncio.sleep(0)  # both have begun
    await asyncio.wait_for(a.close(), AT_ONCE_S)
    ended = await asyncio.wait_for(asyncio.gather(*sends, return_exceptions=True), AT_ONCE_S)
    assert [type(end) for end in ended] == [Unreachable] * 2


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
