"""What a peer does with streams that misbehave, over socket pairs: refuse, count, close, and serve the
others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from p2p_diloco.net import framing
from p2p_diloco.net.exchange import Exchange, OnePerPeer
from p2p_diloco.net.framing import VERSION, Accepted, Bulk, Frame, FrameStream, Message, Progress, Refused, encode
from p2p_diloco.net.interface import Limits, Refusal, Traffic, Unreachable
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.receiving import TURN_S
from p2p_diloco.net.streams import Outgoing
from tests.net import direct_peers
from tests.net.clocks import ByHand, by_hand
from tests.net.direct_peers import HERE, Gate, Peer, Start, next_frame, pair, sent
from tests.net.inboxes import Box
from tests.net.patience import awaited, plays, until

LIMITS = Limits(read_timeout_s=30.0, write_timeout_s=30.0, payload_bytes_max=1 << 20, streams_max=2, links_max=2)
"""Deadlines that no test waits for, unless it turns the clock."""
AT_ONCE_S = LIMITS.read_timeout_s / 3
"""What has waited for no deadline takes less."""
SHORT = replace(LIMITS, read_timeout_s=0.4, rate_bytes_per_s_min=100.0)


class Stranger(FrameStream):
    """The far end of a stream."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(pipe, "", Limits(), Traffic())

    def say(self, data: bytes | Frame) -> None:
        self.pipe.write(data if isinstance(data, bytes) else encode(data))

    async def told(self, *said: bytes | Frame) -> Frame | None:
        """The next frame, after this was said."""
        for one in said:
            self.say(one)
        return await next_frame(self)

    async def refusal(self) -> str:
        """The reason that comes back before the stream is closed."""
        while isinstance(frame := await self.told(), Progress):
            pass
        assert isinstance(frame, Refused), frame
        self.pipe.close()
        return frame.reason


class Rig:
    """An exchange, and raw ends of streams to and from it."""

    def __init__(self, limits: Limits) -> None:
        self.box, self.traffic, self.far_ends = Box(), Traffic(), list[Stranger]()
        self.serving: list[asyncio.Task[None]] = []
        self.exchange = Exchange(self.box, limits=limits, traffic=self.traffic, dial=self.dial)

    async def dial(self, peer: str, *, around: bool = False) -> tuple[Pipe, str]:
        near, far = await pair()
        self.far_ends.append(Stranger(far))
        return near, HERE

    async def stranger(self, peer: str = "stranger") -> Stranger:
        """The far end of a stream that a peer opened to the exchange."""
        pipe, _ = await self.dial(peer)
        self.serving.append(asyncio.create_task(self.exchange.receiver.serve(peer, pipe)))
        return self.far_ends[-1]

    async def dialled(self, number: int = 1) -> Stranger:
        """The far end of the first stream that the exchange opens, or of a later one."""
        while len(self.far_ends) < number:
            await asyncio.sleep(0)
        return self.far_ends[-1]

    def sends(self, header: bytes, payload: bytes | None = b"x") -> asyncio.Task[None]:
        view = None if payload is None else memoryview(payload)
        return asyncio.create_task(self.exchange.send("far", header, view))


def play(test: Callable[..., Awaitable[None]], limits: Limits = LIMITS, *, turned: bool = False) -> None:
    """Run a test with a rig, and with its clock if it is to turn that."""

    async def life() -> None:
        with by_hand() if turned else contextlib.nullcontext() as clock:
            rig = Rig(limits)
            await test(rig, *([clock] if turned else []))
        await rig.exchange.close()

    asyncio.run(life())


rigged, rigged_on_a_clock = plays(play), plays(partial(play, limits=SHORT, turned=True), 2)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "no frame"),
        (framing.PREFIX.pack(framing.MAGIC, VERSION + 1, 0), f"version {VERSION + 1}, this peer speaks {VERSION}"),
        (framing.PREFIX.pack(framing.MAGIC, VERSION, 1 << 30), "bytes"),
        (framing.PREFIX.pack(framing.MAGIC, VERSION, 2) + b"\x91\x4d", "can't be read"),
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
@plays(partial(play, limits=SHORT))
async def test_a_protocol_error_ends_its_stream_alone(rig: Rig, sent: bytes, reason: str) -> None:
    """The sender is told why, the refusal is counted and the stream closed; another peer's link goes on."""
    friend, stranger = await rig.stranger("friend"), await rig.stranger()
    assert await friend.told(Message(b"before")) == Accepted()
    stranger.say(sent)
    if b"fine" in sent:
        assert await stranger.told() == Accepted()
    assert reason in await stranger.refusal()
    await asyncio.wait_for(rig.serving[1], AT_ONCE_S)
    assert rig.traffic.peers["stranger"].refused == rig.traffic.refused == 1
    assert await friend.told(Message(b"after")) == Accepted()
    assert [header for header in rig.box.headers if header != b"fine"] == [b"before", b"after"]


@pytest.mark.parametrize(
    ("first", "at_once", "trickles", "why"),
    [
        (Message(b"first"), b"", encode(Message(bytes(100)))[:90], "nothing came"),
        (Bulk(b"first", 0), encode(Bulk(b"h", 10)), bytes(9), "took longer"),
    ],
)
@rigged_on_a_clock
async def test_a_frame_must_be_complete_in_time_once_it_has_begun(
    rig: Rig, clock: ByHand, first: Frame, at_once: bytes, trickles: bytes, why: str
) -> None:
    """Bytes that trickle don't extend its deadline, nor a payload's. Between frames a stream may be idle."""
    stranger = await rig.stranger()
    assert await stranger.told(first) == Accepted()
    await clock.passes(10 * SHORT.read_timeout_s)
    assert not rig.serving[0].done()
    stranger.say(at_once)
    refusal, started = asyncio.create_task(stranger.refusal()), clock.now
    for byte in trickles:
        stranger.say(bytes([byte]))
        await clock.passes(0.1)
        if refusal.done():
            break
    assert why in await refusal
    assert 0.3 < clock.now - started < 0.8


@pytest.mark.parametrize("whole", [True, False])
@rigged
async def test_a_payload_is_under_way_until_all_of_it_has_come(rig: Rig, whole: bool) -> None:
    """The sender hears how far it has come, and then that it was taken; the inbox hears that the sender lives, and the
    node that a payload is coming. If its stream breaks nothing is delivered, and the node hears of it."""
    coming = list[bool]()

    @contextlib.contextmanager
    def receiving() -> Iterator[None]:
        coming.append(True)
        try:
            yield
        finally:
            coming.append(False)

    rig.traffic.receiving = receiving
    link, stranger = await rig.stranger(), await rig.stranger()
    assert await link.told(Message(b"no payload")) == Accepted()
    assert (coming, rig.box.moving_peers) == ([], [])
    assert await stranger.told(Bulk(b"h", 8), b"half") == Progress(4)
    assert (coming, rig.box.moving_peers) == ([True], ["stranger"])
    if whole:
        assert await stranger.told(b"full") == Accepted()
        assert rig.box.headers == [b"no payload", b"h"]
    else:
        stranger.pipe.close()
        await asyncio.wait_for(rig.serving[1], AT_ONCE_S)
        assert (rig.box.headers, rig.box.closed_peers) == ([b"no payload"], ["stranger"])
    assert coming == [True, False]


@rigged_on_a_clock
async def test_a_sender_tells_a_slow_receiver_from_a_frozen_one(rig: Rig, clock: ByHand) -> None:
    """Progress keeps a payload going beyond the read timeout; when it stops coming, `send` ends within one
    more."""
    sending = rig.sends(b"h", bytes(1000))
    slow = await rig.dialled()
    for count in range(1, 5):
        await clock.passes(0.25)
        slow.say(Progress(count))
        await clock.until(lambda count=count: len(rig.box.moving_peers) == count)
    assert not sending.done()
    assert 0.3 < await clock.over(sending, step_s=0.05) < 0.8
    with pytest.raises(Unreachable, match="nothing came"):
        await sending
    assert rig.box.moving_peers == ["far"] * 4


@pytest.mark.parametrize("answer", [b"nonsense", Message(b"")])
@pytest.mark.parametrize("payload", [None, bytes(1000)])
@rigged
async def test_who_answers_with_no_answer_is_unreachable(
    rig: Rig, answer: bytes | Frame, payload: bytes | None
) -> None:
    """At once, not at a deadline."""
    sending = rig.sends(b"h", payload)
    (await rig.dialled()).say(answer)
    with pytest.raises(Unreachable):
        await asyncio.wait_for(sending, AT_ONCE_S)


@rigged
async def test_a_surplus_answer_ends_the_link(rig: Rig) -> None:
    """A surplus answer would shift all that follow: the link is given up, and the next message opens
    another."""
    for number in (1, 2):
        sending = rig.sends(b"%d" % number, None)
        far = await rig.dialled(number)
        assert await far.told() == Message(b"%d" % number)
        far.say(encode(Accepted()) * (3 - number))
        await sending
    assert rig.box.closed_peers == ["far"]


@pytest.mark.parametrize("accepted", [False, True])
@plays(partial(play, limits=replace(LIMITS, links_max=3), turned=True), 2)
async def test_messages_of_one_grant_are_read_at_a_pace_if_they_are_refused_or_too_many(
    rig: Rig, clock: ByHand, accepted: bool
) -> None:
    """However many of its peers send them without pause; others' messages don't wait."""
    hasty, most = list[str](), 10
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
    for peer in ("xa", "xb", "other"):
        (await rig.stranger(peer)).say(most * encode(Message(b"hello")))
    await clock.until(lambda: len(rig.box.headers) == most)
    assert sorted(hasty) == ["xa", "xb"]
    for turns in range(1, 2 * most):
        await clock.passes(TURN_S)
        assert len(hasty) <= turns + 2
    await clock.passes(TURN_S)
    assert len(hasty) == 2 * most


@rigged
async def test_a_peer_has_one_link_and_all_peers_have_a_few(rig: Rig) -> None:
    """A newer link replaces the older one: the peer isn't reported as gone; the end of its last link is, once. A link
    more than allowed is refused with the reason; those that are there stay, and a place that is left is free."""
    older, newer, other, third = [await rig.stranger(name) for name in ("a", "a", "b", "c")]
    for link in (older, newer, other):
        assert await link.told(Message(b"hello")) == Accepted()
    assert await older.told() is None
    third.say(Message(b"hello"))
    assert "2 links" in await third.refusal()
    assert rig.box.closed_peers == []
    newer.pipe.close()
    await asyncio.wait_for(rig.serving[1], AT_ONCE_S)
    assert rig.box.closed_peers == ["a"]
    assert await (await rig.stranger("d")).told(Message(b"hello")) == Accepted()


@plays(partial(play, turned=True), 2)
async def test_payloads_under_way_are_limited_in_number(rig: Rig, clock: ByHand) -> None:
    """One more than allowed waits for its turn, and is told that this peer is busy if none comes."""
    *streams, one_more = [await rig.stranger(name) for name in ("a", "b", "c")]
    for stream in streams:
        stream.say(Bulk(b"h", 10))
    await clock.until(rig.exchange.receiver._receiving.locked)
    one_more.say(Bulk(b"h", 0))
    refusal = asyncio.create_task(one_more.refusal())
    assert 0.4 < await clock.over(refusal, step_s=0.5) / LIMITS.read_timeout_s < 0.6
    assert "busy" in await refusal
    for stream in streams:
        assert await stream.told(bytes(10)) == Accepted()
    assert await (await rig.stranger("d")).told(Bulk(b"h", 0)) == Accepted()


@rigged
async def test_refusals_of_one_peer_are_logged_once_a_minute(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A peer that sends refused messages again and again doesn't fill the log."""
    caplog.set_level("INFO")

    async def refuse(sender: str, header: bytes, payload: memoryview | None) -> None:
        raise Refusal("not today")

    rig.box.deliver = refuse  # type: ignore[method-assign]
    for peer in ("one", "other"):
        stranger = await rig.stranger(peer)
        for _ in range(5):
            assert isinstance(await stranger.told(Message(b"again")), Refused)
        stranger.pipe.close()
    assert rig.traffic.refused == 10
    assert [record.message.split()[4] for record in caplog.records] == ["one:", "other:"]


@rigged
async def test_a_payload_is_measured_at_both_ends(rig: Rig) -> None:
    """By the receiver's progress and by what has come; what is too short to say something is not."""
    size, both = LIMITS.payload_bytes_max, rig.traffic.bandwidth
    for meter in (both.up, both.down):
        meter.begin("another partner", asyncio.get_running_loop().time())
    sending = rig.sends(b"h", bytes(size))
    far = await rig.dialled()
    assert await far.told() == Bulk(b"h", size)
    far.say(Progress(size // 2))
    await far.read_payload(memoryview(bytearray(size)), stall_s=30.0, total_s=30.0)
    far.say(Accepted())
    await sending
    assert await (await rig.stranger()).told(Bulk(b"h", size), bytes(size)) == Accepted()
    assert [sum(meter._windows.values()) for meter in (both.up, both.down)] == pytest.approx([size, size])
    assert await (await rig.stranger()).told(Bulk(b"h", 1000), bytes(1000)) == Accepted()
    assert sum(both.down._windows.values()) == size


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


async def payloads(far: Stranger, count: int) -> list[bytes]:
    """The headers of the next payloads, of one byte each."""
    headers = []
    for _ in range(count):
        bulk = await far.told()
        assert isinstance(bulk, Bulk)
        headers.append(bulk.header)
        assert await far.discard(1, 30.0)
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


@pytest.mark.parametrize("breaks", ["at once", "later", "again"])
@rigged
async def test_a_payload_on_a_used_stream_that_breaks_is_sent_once_more(rig: Rig, breaks: str) -> None:
    """A stream that carried other payloads may have broken before, unseen. If the fresh one breaks too, the peer is
    unreachable; and so it is at once if it ends a stream before it has answered anything."""
    first = rig.sends(b"1")
    far = await rig.dialled()
    assert await payloads(far, 1) == [b"1"]
    if breaks == "at once":
        far.pipe.close()
        with pytest.raises(Unreachable, match="ended before"):
            await first
        assert (len(rig.far_ends), rig.box.closed_peers) == (1, ["far"])
        return
    far.say(Accepted())
    await first
    sends = [rig.sends(header) for header in (b"2", b"3")]
    assert await payloads(far, 2) == [b"2", b"3"]
    far.pipe.close()
    fresh = await rig.dialled(2)
    assert await payloads(fresh, 2) == [b"2", b"3"]
    assert rig.box.closed_peers == ["far", "far"]
    if breaks == "again":
        fresh.pipe.close()
        for send in sends:
            with pytest.raises(Unreachable, match="ended before"):
                await send
    else:
        fresh.say(encode(Accepted()) * 2)
        await asyncio.gather(*sends)
    assert len(rig.far_ends) == 2


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


@plays(partial(play, limits=replace(LIMITS, write_timeout_s=0.4)))
async def test_unread_answers_end_the_stream(rig: Rig) -> None:
    """Once they fill the stream no further payload is read, and then the stream is ended."""
    stranger, count = await rig.stranger(), 20_000
    stranger.pipe.transport.pause_reading()
    await until(lambda: len(rig.exchange.streams.pipes) == 1)
    for pipe in rig.exchange.streams.pipes:
        pipe.transport.set_write_buffer_limits(0)
    stranger.say(encode(Bulk(b"1", 0)) * count)
    await asyncio.wait(rig.serving)
    assert 0 < len(rig.box.headers) < count


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
