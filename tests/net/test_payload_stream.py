"""Several payloads on one connection: each answer finds its payload, whatever becomes of the others."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from p2p_diloco.net import direct as direct_module
from p2p_diloco.net.frame_stream import FrameStream
from p2p_diloco.net.framing import Accepted, Bulk, Frame, FrameDecoder, Progress, Refused, encode
from p2p_diloco.net.interface import Limits, Refusal, Traffic, Unreachable
from p2p_diloco.net.payload_stream import PayloadStream, Verdict
from p2p_diloco.net.pipe import Pipe
from tests.net.clocks import by_hand
from tests.net.test_direct import AT_ONCE_S, LIMITS, Peer, Start, let_in, pair, run, until

LONG = 4 << 20
"""Longer than what the system takes of a payload before anybody reads it."""


class Gate:
    """Holds what an inbox takes, until it is opened; refuses what is named."""

    def __init__(self, peer: Peer, refused: bytes = b"") -> None:
        self.open, self.come = asyncio.Event(), list[bytes]()
        self._box, self._refused, self._deliver = peer.box, refused, peer.box.deliver
        peer.box.deliver = self.deliver  # type: ignore[method-assign]

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        self.come.append(header)
        await self.open.wait()
        if header == self._refused:
            raise Refusal(f"no {header.decode()}")
        await self._deliver(sender, header, payload)


def sent(peer: Peer, *headers: bytes, nbytes: int = 1000) -> list[asyncio.Task[None]]:
    """Payloads to b, of their header's bytes, all at once."""
    return [asyncio.create_task(peer.send("b", header * nbytes, header)) for header in headers]


async def answers(reader: asyncio.StreamReader, count: int) -> list[Frame]:
    """The next frames on a connection of a test's own."""
    decoder, frames = FrameDecoder(header_bytes_max=1000), list[Frame]()
    while len(frames) < count:
        decoder.feed(await asyncio.wait_for(reader.readexactly(1), 30.0))
        if (frame := decoder.next_frame()) is not None:
            frames.append(frame)
    return frames


def serving(peer: Peer) -> int:
    """How much of the payload that is coming is here."""
    return max((pipe.filled_bytes for pipe in peer.direct.listener._serving), default=0)


async def all_that_comes(pipe: Pipe) -> bytes:
    """What of a payload has come once no more comes."""
    come = -1
    while come < pipe.filled_bytes:
        come = pipe.filled_bytes
        await asyncio.sleep(0.1)
    assert pipe.ended is None
    assert pipe._target is not None
    return bytes(pipe._target[:come])


def test_the_next_one_comes_while_one_is_taken() -> None:
    """One connection carries them all, and the inbox gets them in order, with their own bytes."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        gate = Gate(b)
        sends = sent(a, b"1", b"2", b"3", nbytes=LONG)
        await until(lambda: gate.come == [b"1"] and b.traffic.bytes_received > 2 * LONG)  # the second is here
        assert not any(send.done() for send in sends)
        gate.open.set()
        await asyncio.gather(*sends)
        assert [(header, payload) for _, header, payload in b.box.got] == [(h, h * LONG) for h in (b"1", b"2", b"3")]
        assert (a.talks, a.libp2p_streams) == (1, 0)

    run(test)


def test_what_waits_behind_another_is_under_way() -> None:
    """While the inbox takes the one before, a third comes as far as the system's memory: measured from when it is read
    alone, the link would seem faster than it is."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        gate, down = Gate(b), b.traffic.bandwidth.down
        sends = sent(a, b"1", b"2", nbytes=LONG)
        await until(lambda: gate.come == [b"1"] and b.traffic.bytes_received > 2 * LONG)
        await asyncio.sleep(0.05)
        assert [payload._bytes for payload in down._under_way] == [LONG]
        gate.open.set()
        await asyncio.gather(*sends)
        assert not down._under_way

    run(test)


def test_what_comes_in_one_piece_is_told_apart() -> None:
    """The end of a payload, a frame and the next one's beginning may come together."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        reader, writer = await let_in(a, "b")
        writer.write(encode(Bulk(b"1", 3)) + b"abc" + encode(Bulk(b"2", 0)) + encode(Bulk(b"3", 4)) + b"de")
        writer.write(b"fg")
        assert await reader.readexactly(3 * len(encode(Accepted()))) == 3 * encode(Accepted())
        assert b.box.got == [("a", b"1", b"abc"), ("a", b"2", b""), ("a", b"3", b"defg")]
        writer.transport.abort()

    run(test)


@pytest.mark.parametrize("refused", [b"1", b"2", b"3"])
def test_a_refusal_is_told_to_whom_it_is_for(refused: bytes) -> None:
    """The others are taken, on the same connection."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        Gate(b, refused).open.set()
        headers = (b"1", b"2", b"3")
        results = await asyncio.gather(*sent(a, *headers), return_exceptions=True)
        assert [isinstance(result, Refusal) for result in results] == [header == refused for header in headers]
        assert [header for _, header, _ in b.box.got] == [header for header in headers if header != refused]
        assert (a.talks, a.libp2p_streams) == (1, 0)

    run(test)


def test_too_long_a_payload_is_refused_in_its_turn() -> None:
    """It is refused before it is read, but not before the one before it has its answer."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        gate = Gate(b)
        b.box.admitted_bytes = 2000
        before, long, after = sent(a, b"1"), sent(a, b"2", nbytes=3000), sent(a, b"3")
        await until(lambda: gate.come == [b"1"])
        await asyncio.sleep(0.1)
        gate.open.set()
        with pytest.raises(Refusal, match="at most 2000"):
            await long[0]
        await asyncio.gather(*before, *after)
        assert [header for _, header, _ in b.box.got] == [b"1", b"3"]

    run(test)


@pytest.mark.parametrize("cancelled", [(0,), (1,), (0, 1), (2,), (0, 1, 2)])
def test_who_is_cancelled_leaves_the_others_answers_alone(cancelled: tuple[int, ...]) -> None:
    """Written payloads whose senders have gone are answered nevertheless, and nobody takes these answers for theirs."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await a.send("b", b"first")
        gate = Gate(b, refused=b"123"[cancelled[-1] : cancelled[-1] + 1])
        sends = sent(a, b"1", b"2", b"3")
        await until(lambda: gate.come)
        stream = a.direct._way("b").stream
        assert stream is not None
        writing = a.exchange.sender._writing["b"]
        await until(lambda: len(stream._may_take_s) == 3 and not writing.locked())  # all are written
        for place in cancelled:
            sends[place].cancel()
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(*(send for place, send in enumerate(sends) if place not in cancelled))
        await a.send("b", b"4", b"4")
        assert [header for _, header, _ in b.box.got][-1] == b"4"
        assert (a.talks, a.libp2p_streams) == (1, 0)

    run(test)


def test_half_a_payload_ends_the_connection_after_the_others_answers() -> None:
    """Whose sender goes midway is the last on it; what was written before is answered, what comes after goes on
    another."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        gate = Gate(b)
        before = sent(a, b"1")
        await until(lambda: gate.come)
        (pipe,) = b.direct.listener._serving
        half = sent(a, b"2", nbytes=48 << 20)
        await until(lambda: serving(b) > 1 << 20)
        half[0].cancel()
        await asyncio.wait(half)
        after = sent(a, b"3")
        await until(lambda: gate.come == [b"1", b"3"])
        assert pipe.ended is None
        gate.open.set()
        await asyncio.gather(*before, *after)
        await until(lambda: pipe.ended)
        assert (a.talks, a.libp2p_streams, a.connected("b")) == (2, 0, True)

    run(test)


def test_what_is_not_sent_when_its_sender_goes_never_is() -> None:
    """The memory is its owner's again, who may change it at once, though the connection lives on for the others."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        gate = Gate(b)
        before = sent(a, b"1")
        await until(lambda: gate.come)
        memory = bytearray(b"o" * (48 << 20))
        half = asyncio.create_task(a.exchange.send("b", b"2", memoryview(memory)))
        await until(lambda: serving(b) > 1 << 20)
        (pipe,) = b.direct.listener._serving
        pipe._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)  # until the system takes no more
        half.cancel()
        await asyncio.wait([half])
        memory[:] = b"n" * len(memory)
        pipe._transport.resume_reading()  # type: ignore[attr-defined]
        assert b"n" not in await all_that_comes(pipe)
        gate.open.set()
        await asyncio.gather(*before)

    run(test)


def test_silence_ends_all_that_wait() -> None:
    """They are given up together, not one after the other, and none is sent again."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        gate = Gate(b)
        with by_hand() as clock:
            sends = sent(a, b"1", b"2", b"3")
            await clock.until(lambda: gate.come)
            assert await clock.over(*sends, step_s=0.5) < 2 * LIMITS.read_timeout_s
            results = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(result) for result in results] == [Unreachable] * 3
        assert a.libp2p_streams == 0
        gate.open.set()

    run(test)


def test_a_break_sends_all_that_wait_over_libp2p() -> None:
    """None of them is lost."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        gate = Gate(b)
        sends = sent(a, b"1", b"2", b"3")
        await until(lambda: gate.come)
        for pipe in list(b.direct.listener._serving):
            pipe._transport.abort()
        gate.open.set()
        await asyncio.gather(*sends)
        assert {header for _, header, _ in b.box.got} == {b"1", b"2", b"3"}
        assert a.libp2p_streams == 1

    run(test)


def test_progress_is_not_told_before_its_turn() -> None:
    """It would be taken for that of the payload before."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        gate = Gate(b)
        reader, writer = await let_in(a, "b")
        writer.write(encode(Bulk(b"1", 3)) + b"abc" + encode(Bulk(b"2", 4)) + b"de")
        await until(lambda: gate.come == [b"1"])
        await asyncio.sleep(0.3)  # longer than from one progress to the next
        gate.open.set()
        assert await answers(reader, 1) == [Accepted()]
        writer.write(b"f")
        assert await answers(reader, 1) == [Progress(3)]
        writer.write(b"g")
        assert await answers(reader, 1) == [Accepted()]
        writer.transport.abort()

    run(test)


def test_a_payloads_memory_is_the_inboxs_alone() -> None:
    """What it has let go of is given back, though the connection stays open and nothing else comes on it."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        come: list[weakref.ref[object]] = []

        async def deliver(sender: str, header: bytes, payload: memoryview | None) -> None:
            assert payload is not None
            come.append(weakref.ref(payload.obj))

        b.box.deliver = deliver  # type: ignore[method-assign]
        await a.send("b", bytes(1000))
        gc.collect()
        assert [memory() is None for memory in come] == [True]
        assert not any(pipe.ended for pipe in b.direct.listener._serving)

    run(test)


def test_closing_ends_also_what_is_not_written_on_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for an answer on a connection that has carried enough doesn't wait longer than the others."""
    monkeypatch.setattr(direct_module, "CARRIED_BYTES_MAX", 1)

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        gate = Gate(b)
        sends = sent(a, b"1", b"2")
        await until(lambda: len(gate.come) == 2)
        began = time.monotonic()
        await a.close()
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(result) for result in results] == [Unreachable] * 2
        assert a.libp2p_streams == 0
        assert time.monotonic() - began < AT_ONCE_S
        gate.open.set()

    run(test)


def test_what_ends_a_connection_is_told_after_the_answers() -> None:
    """A payload that came before the nonsense is taken and answered first."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        gate = Gate(b)
        reader, writer = await let_in(a, "b")
        writer.write(encode(Bulk(b"1", 3)) + b"abc" + b"nonsense")
        await until(lambda: gate.come == [b"1"])
        await asyncio.sleep(0.05)
        gate.open.set()
        first, second = await answers(reader, 2)
        assert first == Accepted()
        assert isinstance(second, Refused)
        writer.transport.abort()

    run(test)


def test_what_was_refused_unread_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows is in step, however its bytes come, and all are counted; one that doesn't come ends all."""
    monkeypatch.setattr("p2p_diloco.net.receiving.LINGER_S", 0.2)

    async def test(start: Start) -> None:
        with by_hand() as clock:
            a, b = start("a"), start("b")
            b.box.admitted_bytes = 2
            reader, writer = await let_in(a, "b")
            before = b.traffic.bytes_received
            pieces = [
                encode(Bulk(b"1", 3)) + b"abc" + encode(Bulk(b"2", 4)) + b"d",
                b"efg" + encode(Bulk(b"3", 2)) + b"hi",
            ]
            for piece in pieces:
                writer.write(piece)
                await clock.passes(0.02)
            verdicts = await answers(reader, 3)
            assert [type(verdict) for verdict in verdicts] == [Refused, Refused, Accepted]
            assert [payload for _, _, payload in b.box.got] == [b"hi"]
            assert b.traffic.bytes_received - before == sum(map(len, pieces))
            writer.write(encode(Bulk(b"4", 3)) + b"j")
            await clock.until(lambda: b.traffic.refused == 3)
            await clock.passes(0.1)
            assert b.direct.listener._serving
            await clock.passes(0.2)
            await clock.until(lambda: not b.direct.listener._serving)
        writer.transport.abort()

    run(test)


def test_new_limits_are_those_of_what_begins_then() -> None:
    """Also on a connection that was made before."""

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await a.send("b", b"first")
        gate = Gate(b)
        a.exchange.streams.limits = replace(LIMITS, read_timeout_s=0.2)
        with by_hand() as clock:
            (sending,) = sent(a, b"second")
            assert await clock.over(sending, step_s=0.05) < 1.0
            with pytest.raises(Unreachable):
                await sending
        gate.open.set()

    run(test)


# -- anything at any moment

NUMBER_OF_SENDS, NUMBER_OF_BREAKS = 40, 4
FATES = (b"taken", b"taken", b"refused", b"unread")
SIZES = (0, 1, 1000, 100_000, 1 << 20, 3 << 20)


@pytest.mark.parametrize("way", ["direct", "libp2p"])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_each_answer_is_its_own(monkeypatch: pytest.MonkeyPatch, seed: int, way: str) -> None:
    """Payloads both ways, of any length, to slow inboxes; refused before or after they are read, cancelled at any
    moment, on connections that break at any moment. What returns was taken with its own bytes, what is refused hears
    its own reason, nothing hangs, and nothing is left behind. Only where streams over libp2p break may one be lost."""
    monkeypatch.setattr(direct_module, "RETRY_S", 0.05)
    monkeypatch.setattr(direct_module, "RETRY_S_MAX", 0.05)
    draw = random.Random(seed)

    async def some_time() -> None:
        if draw.random() < 0.5:
            for _ in range(draw.randrange(30)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(draw.uniform(0.0, 0.05))

    def body(header: bytes, nbytes: int) -> bytes:
        return (header * (nbytes // len(header) + 1))[:nbytes]

    async def test(start: Start) -> None:
        peers = {name: start(name) for name in "ab"}
        for peer in peers.values():
            peer.exchange.sender.direct = peer.direct if way == "direct" else None
        may_lose = way == "libp2p" and seed % 2
        taken: set[bytes] = set()

        def admit(sender: str, header: bytes) -> int:
            if b"unread" in header:
                raise Refusal(f"no {header.decode()}")
            return 64 << 20

        async def deliver(sender: str, header: bytes, payload: memoryview | None) -> None:
            assert payload is not None
            if draw.random() < 0.3:
                await some_time()
            if b"refused" in header:
                raise Refusal(f"no {header.decode()}")
            assert bytes(payload) == body(header, len(payload))
            taken.add(header)

        async def send(number: int) -> None:
            sender, to = draw.sample("ab", 2)
            header = f"{number}{sender}{to} ".encode() + draw.choice(FATES)
            await some_time()
            sending = asyncio.create_task(peers[sender].send(to, body(header, draw.choice(SIZES)), header))
            if draw.random() < 0.3:
                await some_time()
                sending.cancel()
            await asyncio.wait({sending})
            if sending.cancelled():
                return
            match sending.exception():
                case None:
                    assert header in taken
                case Refusal(reason=reason):
                    assert reason == f"no {header.decode()}"
                    assert b"taken" not in header
                case Unreachable() if may_lose:
                    pass
                case error:
                    raise AssertionError(header) from error

        async def cut() -> None:
            await some_time()
            streams = [pipe for peer in peers.values() for pipe in peer.exchange.streams.pipes if pipe.ended is None]
            pipes = [pipe for peer in peers.values() for pipe in peer.direct.listener._serving]
            pipes += [stream.frames.pipe for peer in peers.values() for stream in peer.direct._connections]
            if carrying := pipes if way == "direct" else streams:
                draw.choice(carrying)._transport.abort()

        for peer in peers.values():
            peer.box.admit, peer.box.deliver = admit, deliver  # type: ignore[method-assign]
        breaks = [cut() for _ in range(NUMBER_OF_BREAKS if seed % 2 else 0)]
        await asyncio.wait_for(asyncio.gather(*map(send, range(NUMBER_OF_SENDS)), *breaks), 60.0)
        for peer in peers.values():
            exchange, both = peer.exchange, peer.traffic.bandwidth
            await until(lambda exchange=exchange: exchange.receiver._receiving._value == LIMITS.streams_max)
            await until(lambda both=both: not both.up._under_way + both.down._under_way)
            assert exchange.sender._sending._value == LIMITS.streams_max
            assert not any(turns.locked() for turns in exchange.sender._writing.values())
            kept = [stream for way in peer.direct._ways.values() if (stream := way.stream)]
            assert all(not stream._waiting for stream in peer.direct._connections)
            assert all(stream.ended for stream in peer.direct._connections if stream not in kept)
            assert len(kept) <= 1
        await peers["a"].send("b", body(b"last", 1000), b"last")
        assert b"last" in taken

    run(test)


# -- one stream by itself


def alone(test: Callable[[PayloadStream, FrameStream], Awaitable[None]]) -> None:
    """A stream of payloads and its far end."""

    async def between(start: Start) -> None:
        near, far = await pair()
        try:
            stream = PayloadStream(FrameStream(near, "b", LIMITS, Traffic()), "direct")
            await test(stream, FrameStream(far, "a", LIMITS, Traffic()))
        finally:
            near.abort()
            far.abort()

    run(between)


def sending(
    stream: PayloadStream, nbytes: int, limits: Limits = LIMITS, reached: Callable[[int], None] = lambda count: None
) -> asyncio.Task[Verdict]:
    payload = memoryview(bytes(nbytes))
    return asyncio.create_task(
        stream.send(b"h", payload, limits=limits, over=lambda written: written.cancelled(), reached=reached)
    )


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_nobody_waits_for_may_take_its_time(goes_on: bool) -> None:
    """A short payload behind a long one, whose sender has gone and which comes slowly, is not given up for that; nor is
    it waited for for ever."""
    limits = replace(LIMITS, read_timeout_s=0.5, rate_bytes_per_s_min=10_000.0)

    async def test(stream: PayloadStream, far: FrameStream) -> None:
        with by_hand() as clock:
            long = sending(stream, 10_000, limits)  # 1.5 s
            await clock.passes(0.01)
            long.cancel()
            began = clock.now
            short = sending(stream, 0, limits)
            while not short.done():
                await clock.passes(0.05)
                far.write(Progress(1))
                if goes_on and clock.now - began > 0.9:
                    far.write(Accepted())
                    far.write(Accepted())
            if goes_on:
                assert await short == Accepted()
            else:
                with pytest.raises(Unreachable, match=r"took longer|nothing came"):
                    await short
                assert 1.9 < clock.now - began < 2.5

    alone(test)


def test_what_is_retired_ends_with_its_last_answer() -> None:
    """No more is written on it; who waits has the answer, and then nothing keeps it open."""

    async def test(stream: PayloadStream, far: FrameStream) -> None:
        sends = [sending(stream, 10) for _ in range(2)]
        await asyncio.sleep(0.01)
        stream.retire()
        assert not stream.fit
        for verdict in (Accepted(), Refused("no")):
            assert not stream.ended
            far.write(verdict)
            assert await sends.pop(0) == verdict
        assert stream.ended

    alone(test)


def test_a_stream_that_is_over_is_not_fit() -> None:
    """Though payloads are on it that were never answered."""

    async def test(stream: PayloadStream, far: FrameStream) -> None:
        gone = sending(stream, 10)
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.wait({gone})
        assert stream.fit
        far.pipe.abort()
        await until(lambda: stream.ended)
        assert not stream.fit

    alone(test)


@pytest.mark.parametrize("ended", [False, True])
def test_a_stream_is_fresh_until_it_is_used(ended: bool) -> None:
    """Until the first payload, though it has ended: that one finds out. Not while it is under way, nor afterwards."""

    async def test(stream: PayloadStream, far: FrameStream) -> None:
        if ended:
            far.pipe.abort()
            await until(lambda: stream.ended)
        assert stream.fresh
        send = sending(stream, 10)
        await asyncio.sleep(0.01)
        assert not stream.fresh
        far.write(Accepted())
        assert await send == (None if ended else Accepted())
        assert not stream.fresh

    alone(test)


def test_what_is_retired_is_not_fresh() -> None:
    """Nothing is written on it, though nothing ever was."""

    async def test(stream: PayloadStream, far: FrameStream) -> None:
        stream.retire()
        assert not stream.fresh
        assert stream.ended

    alone(test)


@pytest.mark.parametrize("rest", [b"p2d", encode(Accepted())])
def test_what_comes_with_an_answer_makes_unfit(rest: bytes) -> None:
    """Even half a frame that nobody asked for would be taken for the next answer."""

    async def test(stream: PayloadStream, far: FrameStream) -> None:
        send = sending(stream, 10)
        await asyncio.sleep(0.01)
        far.pipe.write(encode(Accepted()) + rest)
        assert await send == Accepted()
        assert not stream.fit

    alone(test)


@pytest.mark.parametrize("counts", [(3, 3), (3, 2), (11,)])
def test_progress_must_be_some(counts: tuple[int, ...]) -> None:
    """What tells of nothing new, or of more than there is, is no sign of life but no answer."""

    async def test(stream: PayloadStream, far: FrameStream) -> None:
        reached: list[int] = []
        send = sending(stream, 10, reached=reached.append)
        for count in counts:
            far.write(Progress(count))
        with pytest.raises(Unreachable, match="not asked for"):
            await send
        assert reached == list(counts[:-1])
        assert stream.ended

    alone(test)


@pytest.mark.parametrize("verdict", [Accepted(), Refused("no")])
def test_what_is_refused_has_not_come(verdict: Accepted | Refused) -> None:
    """Only what is accepted is known to have arrived as a whole."""

    async def test(stream: PayloadStream, far: FrameStream) -> None:
        reached: list[int] = []
        send = sending(stream, 10, reached=reached.append)
        far.write(Progress(3))
        far.write(verdict)
        assert await send == verdict
        assert reached == ([3, 10] if verdict == Accepted() else [3])

    alone(test)


@pytest.mark.parametrize("verdict", [Accepted(), Refused("no")])
def test_an_answer_midway_ends_the_stream(verdict: Accepted | Refused) -> None:
    """The rest is not written, and nothing else could follow it."""

    async def test(stream: PayloadStream, far: FrameStream) -> None:
        send = sending(stream, LONG)
        far.write(verdict)
        assert await asyncio.wait_for(send, 0.5 * LIMITS.write_timeout_s) == verdict
        assert stream.ended

    alone(test)


def test_nobody_is_given_the_time_of_those_behind() -> None:
    """However long what follows may take, and however much is told: it ends at its own deadline, and all with it."""
    limits = replace(LIMITS, read_timeout_s=0.5, rate_bytes_per_s_min=10_000.0)

    async def test(stream: PayloadStream, far: FrameStream) -> None:
        patience: list[float | None] = []
        read = stream.frames.read

        async def noted(*, idle_s: float | None, frame_s: float) -> Frame | None:
            patience.append(idle_s)
            return await read(idle_s=idle_s, frame_s=frame_s)

        stream.frames.read = noted  # type: ignore[method-assign]
        with by_hand() as clock:
            first, *sends = [sending(stream, nbytes, limits) for nbytes in (10, 100, 10_000)]  # 0.5 s, 0.51 s and 1.5 s
            await clock.passes(0.01)
            far.write(Accepted())
            await first
            told = 0
            while not sends[0].done():
                far.write(Progress(told := told + 1))
                await clock.passes(0.1)
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(result) for result in results] == [Unreachable] * 2
        assert told < 10
        assert patience == sorted(patience, reverse=True)
        assert patience[-1] < 0.5 < patience[0] + 0.1

    alone(test)
