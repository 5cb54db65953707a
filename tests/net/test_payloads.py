"""Payloads on direct connections: their order, their answers, their deadlines, their memory; also if sends fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from p2p_diloco.net import direct as direct_module
from p2p_diloco.net.direct import Way
from p2p_diloco.net.framing import Accepted, Frame, FrameStream, Progress, Refused, encode
from p2p_diloco.net.interface import Limits, Refusal, Traffic, Unreachable
from p2p_diloco.net.streams import Outgoing, Verdict
from tests.net.clocks import by_hand
from tests.net.direct_peers import LIMITS, LONG, Gate, Start, pair, run, sent
from tests.net.patience import plays, until


@plays(run)
async def test_the_next_payload_arrives_while_the_inbox_takes_one(start: Start) -> None:
    """One connection carries them all, and the inbox gets them in order, with their own bytes. The second counts as
    under way until the inbox takes it: the third already fills the system's buffers, and if only the time of reading it
    counted, the link would seem faster than it is."""
    a, b = start("a"), start("b")
    gate, down = Gate(b), b.traffic.bandwidth.down
    sends = sent(a, b"1", b"2", b"3", nbytes=LONG)
    await until(lambda: gate.come == [b"1"] and b.traffic.bytes_received > 2 * LONG)  # the second is here
    await asyncio.sleep(0.05)
    assert [payload._bytes for payload in down._under_way] == [LONG]
    assert not any(send.done() for send in sends)
    gate.open.set()
    await asyncio.gather(*sends)
    assert not down._under_way
    assert [(header, payload) for _, header, payload in b.box.got] == [(h, h * LONG) for h in (b"1", b"2", b"3")]
    assert (a.talks, a.libp2p_streams) == (1, 0)


# -- one stream of payloads by itself, at the sender: deadlines, answers, and when it may be written on


def alone(test: Callable[[Outgoing, FrameStream], Awaitable[None]]) -> None:
    """A stream of payloads and its far end."""

    async def between(start: Start) -> None:
        near, far = await pair()
        try:
            stream = Outgoing(FrameStream(near, "b", LIMITS, Traffic()), "direct")
            reading = asyncio.create_task(stream.read(LIMITS.read_timeout_s))
            await test(stream, FrameStream(far, "a", LIMITS, Traffic()))
        finally:
            near.abort()
            far.abort()
            await reading

    run(between)


def sending(
    stream: Outgoing, nbytes: int, limits: Limits = LIMITS, reached: Callable[[int], None] = lambda count: None
) -> asyncio.Task[Verdict]:
    payload = memoryview(bytes(nbytes))
    return asyncio.create_task(
        stream.send(b"h", payload, limits=limits, over=lambda written: written.cancelled(), reached=reached)
    )


@pytest.mark.parametrize(
    ("said", "outcome", "reached", "fit"),
    [
        ([Progress(3), Accepted()], Accepted(), [3, 10], True),
        ([Progress(3), Refused("no")], Refused("no"), [3], True),  # it may not have arrived as a whole
        # even half a frame behind an answer would be taken for the beginning of the next answer
        ([encode(Accepted()) + b"p2d"], Accepted(), [10], False),
        ([encode(Accepted()) * 2], Accepted(), [10], False),
        # progress must grow, and not exceed the payload
        ([Progress(3), Progress(3)], None, [3], False),
        ([Progress(3), Progress(2)], None, [3], False),
        ([Progress(11)], None, [], False),
    ],
)
@plays(alone, 2)
async def test_what_comes_back_for_a_payload(
    stream: Outgoing, far: FrameStream, said: list[bytes | Frame], outcome: Frame | None, reached: list[int], fit: bool
) -> None:
    """Its verdict, what of it is reported as arrived, and whether the stream may carry others; what was not asked for
    ends the stream."""
    told: list[int] = []
    send = sending(stream, 10, reached=told.append)
    await asyncio.sleep(0.01)
    for one in said:
        far.pipe.write(one if isinstance(one, bytes) else encode(one))
    if outcome is None:
        with pytest.raises(Unreachable, match="not asked for"):
            await send
        assert stream.ended
    else:
        assert await send == outcome
    assert (told, stream.fit) == (reached, fit)


@plays(alone, 2)
async def test_later_payloads_do_not_extend_a_deadline(stream: Outgoing, far: FrameStream) -> None:
    """A payload ends at its own deadline, whatever progress is reported, and the later ones end with it."""
    limits = replace(LIMITS, read_timeout_s=0.5, rate_bytes_per_s_min=10_000.0)
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


# -- anything at any moment

NUMBER_OF_SENDS, NUMBER_OF_BREAKS = 40, 4
FATES = (b"taken", b"taken", b"refused", b"unread")
SIZES = (0, 1, 1000, 100_000, 1 << 20, 3 << 20)


@pytest.mark.parametrize("way", ["direct", "several", "libp2p"])
@pytest.mark.parametrize("seed", range(4))
def test_random_faults_never_mix_up_answers(monkeypatch: pytest.MonkeyPatch, seed: int, way: str) -> None:
    """On one direct connection, on several, or over libp2p: payloads both ways, of any length, to slow inboxes; refused
    before or after they are read, cancelled at any moment, on connections that break at any moment. A send that returns
    was delivered with its own bytes, a refused one gets its own reason, none hangs, and nothing is left. Only where
    streams over libp2p break may a payload be lost."""
    monkeypatch.setattr(direct_module, "RETRY_S", 0.05)
    monkeypatch.setattr(direct_module, "RETRY_S_MAX", 0.05)
    if way == "several":
        monkeypatch.setattr(Way, "wanted", 4)
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
            peer.exchange.direct = peer.direct if way != "libp2p" else None
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
            if carrying := pipes if way != "libp2p" else streams:
                draw.choice(carrying).transport.abort()

        for peer in peers.values():
            peer.box.admit, peer.box.deliver = admit, deliver  # type: ignore[method-assign]
        breaks = [cut() for _ in range(NUMBER_OF_BREAKS if seed % 2 else 0)]
        await asyncio.wait_for(asyncio.gather(*map(send, range(NUMBER_OF_SENDS)), *breaks), 60.0)
        for peer in peers.values():
            exchange, both = peer.exchange, peer.traffic.bandwidth
            await until(lambda exchange=exchange: exchange.receiver._receiving._value == LIMITS.streams_max)
            await until(lambda both=both: not both.up._under_way + both.down._under_way)
            assert exchange._sending._value == LIMITS.streams_max
            assert not any(turns.locked() for turns in exchange._writing.values())
            kept = [one for way in peer.direct._ways.values() for one in way.connections]
            assert not any(stream.awaited for stream in kept)
            assert len(kept) <= (4 if way == "several" else 1)
            assert way != "several" or seed % 2 or len(kept) > 1
        await peers["a"].send("b", body(b"last", 1000), b"last")
        assert b"last" in taken

    run(test)
