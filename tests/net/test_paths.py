"""Which path a stream takes: directly where that works, else through a relay; and no stream is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from p2p_diloco.net import paths
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.paths import HEAD_START_S, RELAYED_FOR_S, REMEMBERED_MAX, Paths
from tests.net.clocks import ByHand, timed
from tests.net.patience import plays

DIRECTLY, RELAYED = "/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/1/p2p/relay/p2p-circuit"


class Stream:
    """A stand-in for a pipe."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class Sides:
    """A daemon and circuits whose dials a test ends."""

    def __init__(self, *, announced: bool, relays: bool) -> None:
        self.announced, self.relays = announced, relays
        self.direct: list[asyncio.Future[Any]] = []
        self.relayed: list[asyncio.Future[Any]] = []
        self.asked: list[tuple[str, ...]] = []
        self.streams: list[Stream] = []
        self.paths = Paths(self, self, lambda: ["linked"])  # type: ignore[arg-type]

    async def open_stream(self, peer: str, protocol: str, *, timeout_s: float) -> Any:
        self.direct.append(asyncio.get_running_loop().create_future())
        return await self.direct[-1]

    async def open(self, peer: str, protocol: str, relays: list[str]) -> Any:
        self.asked.append((peer, protocol, *relays))
        self.relayed.append(asyncio.get_running_loop().create_future())
        return await self.relayed[-1]

    def relays_of(self, peer: str) -> tuple[str, ...]:
        return ("relay",) if self.announced else ()

    def relays_to(self, peer: str, linked: list[str]) -> list[str]:
        return [*self.relays_of(peer), *linked] if self.relays else []

    def dial(self, peer: str = "b") -> asyncio.Task[Any]:
        return asyncio.create_task(self.paths.open(peer, "/p", timeout_s=5.0))

    def succeed(self, dial: asyncio.Future[Any], at: str) -> Stream:
        self.streams.append(Stream())
        dial.set_result((self.streams[-1], at))
        return self.streams[-1]

    def aborted(self) -> list[bool]:
        return [stream.aborted for stream in self.streams]


Start = Callable[..., Sides]


def run(test: Callable[[Start, ByHand], Awaitable[None]]) -> None:
    """Run a test on a clock that it turns; afterwards no dial is under way, and no task is left."""
    all_sides: list[Sides] = []

    def start(*, announced: bool = False, relays: bool = True) -> Sides:
        all_sides.append(Sides(announced=announced, relays=relays))
        return all_sides[-1]

    timed(partial(test, start))
    for sides in all_sides:
        assert all(dial.done() for dial in sides.direct + sides.relayed)


def refused(why: str) -> Unreachable:
    return Unreachable(why, refused=True)


@pytest.mark.parametrize("at_once", [True, False])
@plays(run, 2)
async def test_a_direct_dial_has_a_head_start(start: Start, clock: ByHand, at_once: bool) -> None:
    """Relays are asked only after it. A direct stream that comes first counts, and the relayed dial ends; so does one
    that comes at the same moment, and the relayed one is aborted."""
    sides = start()
    dialling = sides.dial()
    await clock.passes(0.9 * HEAD_START_S)
    assert (len(sides.direct), len(sides.relayed)) == (1, 0)
    await clock.passes(0.2 * HEAD_START_S)
    assert sides.asked == [("b", "/p", "linked")]
    if at_once:
        sides.succeed(sides.relayed[0], RELAYED)
    stream = sides.succeed(sides.direct[0], DIRECTLY)
    assert await dialling == (stream, DIRECTLY)
    await clock.passes(0.0)
    assert sides.aborted() == [True] * at_once + [False]


@pytest.mark.parametrize(
    ("announced", "relays", "after", "direct", "relayed", "told", "asked"),
    [
        # it announces no relay, and its machine answers: it is not sought, not after the head start either
        (False, True, 0.0, refused("nobody"), None, (True, "nobody"), []),
        (False, True, 1.1, refused("nobody"), None, (True, "nobody"), ["linked"]),
        # what refuses may be its router; if the relays fail too, that proves no death
        (True, True, 0.0, refused("nobody"), Unreachable("unknown"), (False, "nobody; unknown"), ["relay", "linked"]),
        # without relays the direct dial decides, however long it takes
        (True, False, 10.0, refused("nobody"), None, (True, "nobody"), []),
        # a relay's word that the peer's connection has ended counts, however long the direct dial may go on
        (True, True, 1.1, None, refused("gone"), (True, "gone"), ["relay", "linked"]),
    ],
)
@plays(run, 2)
async def test_what_failed_dials_tell(
    start: Start, clock: ByHand, announced: bool, relays: bool, after: float, direct: Unreachable | None,
    relayed: Unreachable | None, told: tuple[bool, str], asked: list[str],
) -> None:  # fmt: skip
    """Whether the peer is dead, and which relays are asked."""
    sides = start(announced=announced, relays=relays)
    dialling = sides.dial()
    await clock.passes(after * HEAD_START_S)
    for dials, error in ((sides.direct, direct), (sides.relayed, relayed)):
        if error is not None:
            dials[0].set_exception(error)
            await clock.passes(0.0)
    with pytest.raises(Unreachable) as caught:
        await dialling
    assert (caught.value.refused, str(caught.value)) == told
    assert sides.asked == ([("b", "/p", *asked)] if asked else [])


@plays(run, 2)
async def test_after_a_relay_was_faster_there_is_no_head_start(start: Start, clock: ByHand) -> None:
    """Until `RELAYED_FOR_S` have passed, or a direct dial succeeds; for other peers there is."""
    sides = start()

    async def relays_asked_at_once(peer: str = "b", *, succeeds: str = "relayed") -> bool:
        dialling = sides.dial(peer)
        await clock.passes(0.0)
        at_once = len(sides.relayed) == len(sides.direct)
        await clock.passes(1.1 * HEAD_START_S)
        at = RELAYED if succeeds == "relayed" else DIRECTLY
        sides.succeed(getattr(sides, succeeds)[-1], at)
        await dialling
        return at_once

    assert not await relays_asked_at_once()
    assert await relays_asked_at_once()
    assert not await relays_asked_at_once("c")
    await clock.passes(RELAYED_FOR_S)
    assert not await relays_asked_at_once()
    assert await relays_asked_at_once(succeeds="direct")
    assert not await relays_asked_at_once()
    assert not any(sides.aborted())


@plays(run, 2)
async def test_what_is_remembered_is_bounded(start: Start, clock: ByHand) -> None:
    """The peer that has been remembered longest is forgotten."""
    paths = start().paths
    for number in range(REMEMBERED_MAX + 10):
        paths._remember(str(number), clock.now + 1.0)
    assert len(paths._relayed_until) == REMEMBERED_MAX
    assert "0" not in paths._relayed_until
    assert str(REMEMBERED_MAX + 9) in paths._relayed_until


async def broken(start: Start, clock: ByHand) -> Sides:
    """A direct path was given up, and the peer was dialled through a relay."""
    sides = start()
    dial = asyncio.create_task(sides.paths.open("b", "/p", timeout_s=5.0, around=True))
    await clock.passes(0.01)
    stream = sides.succeed(sides.relayed[0], RELAYED)
    assert await dial == (stream, RELAYED)
    return sides


@plays(run, 2)
async def test_a_broken_path_is_avoided(start: Start, clock: ByHand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon would open streams on the dead connection at once, and nothing would pass."""
    answering: list[bool] = [False, False, True]

    async def answers(daemon: object, peer: str, within_s: float) -> bool:
        return answering.pop(0)

    monkeypatch.setattr(paths, "answers", answers)
    sides = await broken(start, clock)
    again = sides.dial()
    await clock.passes(0.01)
    sides.succeed(sides.relayed[1], RELAYED)
    await again
    assert sides.direct == []
    for _ in range(4):
        await clock.passes(paths.LOOK_EVERY_S)
    assert answering == []
    healed = sides.dial()
    await clock.passes(0.01)
    sides.succeed(sides.direct[0], DIRECTLY)
    await healed
    await sides.paths.close()


@plays(run, 2)
async def test_a_broken_path_is_tried_if_no_relay_is_left(start: Start, clock: ByHand) -> None:
    """The relay may have ended, and the path may work again."""
    sides = await broken(start, clock)
    again = sides.dial()
    await clock.passes(0.01)
    sides.relayed[1].set_exception(Unreachable("the relay has ended"))
    await clock.passes(0.01)
    stream = sides.succeed(sides.direct[0], DIRECTLY)
    assert await again == (stream, DIRECTLY)
    await sides.paths.close()
