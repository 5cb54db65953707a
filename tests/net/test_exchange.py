"""What a peer does with streams that misbehave, over socket pairs: refuse, count, close, and serve the
others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from p2p_diloco.net.exchange import Exchange
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
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.receiving import TURN_S
from tests.net.clocks import by_hand
from tests.net.inboxes import Quiet
from tests.net.patience import awaited

LIMITS = Limits(read_timeout_s=30.0, write_timeout_s=30.0, payload_bytes_max=1 << 20, streams_max=2, links_max=2)
"""Deadlines that no test waits for, unless it turns the clock."""
AT_ONCE_S = LIMITS.read_timeout_s / 3
"""What has waited for no deadline takes less."""
SHORT = replace(LIMITS, read_timeout_s=0.4)


class Box(Quiet):
    def __init__(self) -> None:
        self.headers: list[bytes] = []
        self.closed_peers: list[str] = []
        self.moving_peers: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        await self.gate.wait()
        self.headers.append(header)

    def moving(self, peer: str) -> None:
        self.moving_peers.append(peer)

    def closed(self, peer: str) -> None:
        self.closed_peers.append(peer)


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


@awaited
async def test_progress_is_reported_while_a_payload_comes() -> None:
    """The sender hears how far its payload has come, and then that it was taken. The receiver's inbox hears that the
    sender lives."""
    rig = Rig()
    stranger = await rig.stranger()
    stranger.write(Bulk(b"h", 6))
    stranger.write(b"abc")
    assert rig.box.moving_peers == []
    assert await stranger.read() == Progress(3)
    assert rig.box.moving_peers == ["stranger"]
    stranger.write(b"def")
    assert await stranger.read() == Accepted()
    assert rig.box.headers == [b"h"]
    await rig.exchange.close()


@pytest.mark.parametrize("whole", [True, False])
@awaited
async def test_traffic_receiving_is_entered_while_a_payload_comes(whole: bool) -> None:
    """From the moment at which it may come until all of it has, or its stream has broken: then nothing is delivered,
    and the node hears of it."""
    rig, coming = Rig(), list[bool]()

    @contextlib.contextmanager
    def receiving() -> Iterator[None]:
        coming.append(True)
        try:
            yield
        finally:
            coming.append(False)

    rig.traffic.receiving = receiving
    link = await rig.stranger()
    link.write(Message(b"no payload"))
    assert await link.read() == Accepted()
    stranger = await rig.stranger()
    stranger.write(encode(Bulk(b"h", 8)) + b"half")
    while not coming:
        await asyncio.sleep(0.001)
    assert coming == [True]
    if whole:
        stranger.write(b"full")
        assert await stranger.read() == Accepted()
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
            rig.box.headers.append(header)
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
async def test_a_newer_link_replaces_the_older_one() -> None:
    """A peer that comes back isn't reported as gone; the end of its last link is, once."""
    rig = Rig()
    first, second = await rig.stranger(), await rig.stranger()
    for link in (first, second):
        link.write(Message(b"hello"))
        assert await link.read() == Accepted()
    assert await first.read() is None
    assert rig.box.closed_peers == []
    second.writer.close()
    await asyncio.wait_for(rig.serving[1], AT_ONCE_S)
    assert rig.box.closed_peers == ["stranger"]
    await rig.exchange.close()


@awaited
async def test_links_are_limited_in_number() -> None:
    """One more than allowed is refused with the reason; those that are there stay, and a place that is left
    is free."""
    rig = Rig()
    links = [await rig.stranger(name) for name in ("a", "b", "c")]
    for link in links:
        link.write(Message(b"hello"))
    assert [await link.read() for link in links[:2]] == [Accepted(), Accepted()]
    assert "2 links" in await links[2].refusal()
    links[0].writer.close()
    await asyncio.wait_for(rig.serving[0], AT_ONCE_S)
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
