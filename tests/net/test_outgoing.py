"""One stream of payloads by itself: deadlines, answers, and when it may be written on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from p2p_diloco.net.framing import Accepted, FrameStream, Progress, Refused, encode
from p2p_diloco.net.interface import Limits, Traffic, Unreachable
from p2p_diloco.net.outgoing import Outgoing, Verdict
from tests.net.clocks import by_hand
from tests.net.direct_peers import LIMITS, Start, pair, run
from tests.net.patience import plays


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


@pytest.mark.parametrize("goes_on", [True, False])
@plays(alone, 2)
async def test_a_cancelled_payload_extends_the_deadline_of_the_next(
    stream: Outgoing, far: FrameStream, goes_on: bool
) -> None:
    """A short payload behind a long, cancelled one waits as long as both may take, and no longer."""
    limits = replace(LIMITS, read_timeout_s=0.5, rate_bytes_per_s_min=10_000.0)
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


@pytest.mark.parametrize("rest", [b"p2d", encode(Accepted())])
@plays(alone, 2)
async def test_bytes_after_an_answer_make_a_stream_unfit(stream: Outgoing, far: FrameStream, rest: bytes) -> None:
    """Even half a frame would be taken for the beginning of the next answer."""
    send = sending(stream, 10)
    await asyncio.sleep(0.01)
    far.pipe.write(encode(Accepted()) + rest)
    assert await send == Accepted()
    assert not stream.fit


@pytest.mark.parametrize("counts", [(3, 3), (3, 2), (11,)])
@plays(alone, 2)
async def test_wrong_progress_ends_the_stream(stream: Outgoing, far: FrameStream, counts: tuple[int, ...]) -> None:
    """Progress must grow, and not exceed the payload."""
    reached: list[int] = []
    send = sending(stream, 10, reached=reached.append)
    for count in counts:
        far.write(Progress(count))
    with pytest.raises(Unreachable, match="not asked for"):
        await send
    assert reached == list(counts[:-1])
    assert stream.ended


@pytest.mark.parametrize("verdict", [Accepted(), Refused("no")])
@plays(alone, 2)
async def test_only_an_accepted_payload_is_reported_as_arrived(
    stream: Outgoing, far: FrameStream, verdict: Accepted | Refused
) -> None:
    """A refused one may not have arrived as a whole."""
    reached: list[int] = []
    send = sending(stream, 10, reached=reached.append)
    far.write(Progress(3))
    far.write(verdict)
    assert await send == verdict
    assert reached == ([3, 10] if verdict == Accepted() else [3])


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
