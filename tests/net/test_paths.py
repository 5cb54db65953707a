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


def refused(why: str = "refused") -> Unreachable:
    return Unreachable(why, refused=True)


async def outcome(dialling: asyncio.Task[Any]) -> Unreachable:
    with pytest.raises(Unreachable) as caught:
        await dialling
    return caught.value


@plays(run, 2)
async def test_a_direct_dial_has_a_head_start(start: Start, clock: ByHand) -> None:
    """Relays are asked only after it; a direct stream that comes first counts, and the relayed dial ends."""
    sides = start()
    dialling = sides.dial()
    await clock.passes(0.9 * HEAD_START_S)
    assert (len(sides.direct), len(sides.relayed)) == (1, 0)
    await clock.passes(0.2 * HEAD_START_S)
    assert sides.asked == [("b", "/p", "linked")]
    stream = sides.succeed(sides.direct[0], DIRECTLY)
    assert await dialling == (stream, DIRECTLY)
    assert sides.aborted() == [False]


@plays(run, 2)
async def test_both_streams_at_once_leave_only_the_direct_one(start: Start, clock: ByHand) -> None:
    """The other one is aborted."""
    sides = start()
    dialling = sides.dial()
    await clock.passes(1.1 * HEAD_START_S)
    relayed = sides.succeed(sides.relayed[0], RELAYED)
    direct = sides.succeed(sides.direct[0], DIRECTLY)
    assert await dialling == (direct, DIRECTLY)
    await clock.passes(0.0)
    assert (relayed.aborted, direct.aborted) == (True, False)


@plays(run, 2)
async def test_a_peer_that_announces_no_relay_and_refuses_is_not_sought(start: Start, clock: ByHand) -> None:
    """Its machine answers, so no relay is asked: not after the head start either."""
    sides = start()
    dialling = sides.dial()
    await clock.passes(0.0)
    sides.direct[0].set_exception(refused("nothing listens there"))
    error = await outcome(dialling)
    assert (error.refused, str(error), sides.asked) == (True, "nothing listens there", [])
    dialling = sides.dial()
    await clock.passes(1.1 * HEAD_START_S)
    sides.direct[1].set_exception(refused())
    assert (await outcome(dialling)).refused


@plays(run, 2)
async def test_a_peer_that_announces_relays_is_sought_there_after_a_refusal(start: Start, clock: ByHand) -> None:
    """What refuses may be its router. If the relays fail too, that proves no death."""
    sides = start(announced=True)
    dialling = sides.dial()
    await clock.passes(0.0)
    sides.direct[0].set_exception(refused("nothing listens there"))
    await clock.passes(0.0)
    assert sides.asked == [("b", "/p", "relay", "linked")]
    sides.relayed[0].set_exception(Unreachable("no relay knows it"))
    error = await outcome(dialling)
    assert (error.refused, str(error)) == (False, "nothing listens there; no relay knows it")


@plays(run, 2)
async def test_without_relays_the_direct_dial_decides(start: Start, clock: ByHand) -> None:
    """However long it takes; a refusal counts, even of a peer that announces relays."""
    sides = start(announced=True, relays=False)
    dialling = sides.dial()
    await clock.passes(10 * HEAD_START_S)
    sides.direct[0].set_exception(refused())
    assert (await outcome(dialling)).refused
    assert sides.asked == []


@plays(run, 2)
async def test_a_relay_that_lost_the_peer_decides(start: Start, clock: ByHand) -> None:
    """The direct dial may go on for long: a relay's word that the peer's connection has ended counts as a refusal."""
    sides = start(announced=True)
    dialling = sides.dial()
    await clock.passes(1.1 * HEAD_START_S)
    sides.relayed[0].set_exception(refused("gone"))
    error = await outcome(dialling)
    assert (error.refused, str(error)) == (True, "gone")


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


@plays(run, 2)
async def test_a_broken_path_is_avoided_until_the_peer_answers_on_it(
    start: Start, clock: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon would open streams on the dead connection at once, and nothing would pass."""
    answering: list[bool] = [False, False, True]

    async def answers(daemon: object, peer: str, within_s: float) -> bool:
        return answering.pop(0)

    monkeypatch.setattr(paths, "answers", answers)
    sides = start()
    dial = asyncio.create_task(sides.paths.open("b", "/p", timeout_s=5.0, around=True))
    await clock.passes(0.01)
    stream = sides.succeed(sides.relayed[0], RELAYED)
    assert await dial == (stream, RELAYED)
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
    assert len(sides.direct) == 1
    sides.succeed(sides.direct[0], DIRECTLY)
    await healed
    await sides.paths.close()


@plays(run, 2)
async def test_a_broken_path_is_tried_if_no_relay_is_left(start: Start, clock: ByHand) -> None:
    """The relay may have ended, and the path may work again."""
    sides = start()
    dial = asyncio.create_task(sides.paths.open("b", "/p", timeout_s=5.0, around=True))
    await clock.passes(0.01)
    sides.succeed(sides.relayed[0], RELAYED)
    await dial
    again = sides.dial()
    await clock.passes(0.01)
    sides.relayed[1].set_exception(Unreachable("the relay has ended"))
    await clock.passes(0.01)
    stream = sides.succeed(sides.direct[0], DIRECTLY)
    assert await again == (stream, DIRECTLY)
    await sides.paths.close()
