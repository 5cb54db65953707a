"""Shares of a link, on a model of one that TCP divides unevenly."""

from __future__ import annotations

import asyncio
import math
import socket
import sys
import time

import pytest

from p2p_diloco.net import pacing
from p2p_diloco.net.pacing import FILLING, LEAP, LOOK_EVERY, READINGS, ROOM, SLOW, SPAN, TICK_S, Pacer, Shares, Took
from tests.net.test_direct import Start, run

MB = 1e6
LONG = 6000
"""Ticks."""


class Link:
    """What goes over a link of so many bytes a second: by weights, as TCP happens to have it, up to a pace and to what
    the other end takes."""

    def __init__(self, rate: float, weights: dict[str, float], takes: dict[str, float] | None = None) -> None:
        self.rate, self.weights, self.takes = rate, weights, takes or {}
        self.shares, self.paces = Shares(), dict[str, float]()

    def tick(self, *, held_up: float = 1.0) -> dict[str, float]:
        """The rates of a tick; paces follow."""
        most = {n: min(self.paces.get(n, math.inf), self.takes.get(n, math.inf)) for n in self.weights}
        rates, left, open_ = dict[str, float](), self.rate, set(self.weights)
        while open_:
            total = sum(self.weights[n] for n in open_)
            short = {n for n in open_ if most[n] <= left * self.weights[n] / total}
            for n in short or set(open_):
                rates[n] = most[n] if short else left * self.weights[n] / total
            left -= sum(rates[n] for n in short)
            open_ -= short or set(open_)
        took = {n: Took(round(rate * TICK_S), held_up * TICK_S) for n, rate in rates.items()}
        self.paces = self.shares.tick(took, TICK_S)
        return rates

    def run(self, ticks: int) -> dict[str, float]:
        """The mean rates of the last tenth of so many ticks."""
        all_ = [self.tick() for _ in range(ticks)][-ticks // 10 :]
        return {n: sum(rates[n] for rates in all_) / len(all_) for n in self.weights}


def test_nothing_is_held_back_before_there_is_a_reading() -> None:
    """And a reading takes a second or two in which the network held up both."""
    link = Link(12 * MB, {"a": 2.0, "b": 1.0})
    for _ in range(FILLING + SPAN - 1):
        link.tick()
        assert link.paces == {}
    link.tick()
    assert set(link.paces) == {"a", "b"}
    assert link.shares.link == pytest.approx(12 * MB)


@pytest.mark.parametrize("weights", [(2.0, 1.0), (5.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)])
def test_a_link_is_shared_evenly(weights: tuple[float, ...]) -> None:
    """However TCP would have it, and nothing of the link is left unused."""
    link = Link(12 * MB, dict(zip("abcd", weights, strict=False)))
    rates = link.run(LONG)
    assert sum(rates.values()) == pytest.approx(12 * MB, rel=1e-3)
    for rate in rates.values():
        assert rate == pytest.approx(12 * MB / len(rates), rel=0.06)


def test_what_a_slow_one_leaves_is_the_others() -> None:
    """One that takes a tenth holds nobody back, whichever way it came about."""
    link = Link(12 * MB, {"a": 1.0, "b": 1.0, "slow": 1.0}, {"slow": 0.5 * MB})
    rates = link.run(LONG)
    assert rates["slow"] == pytest.approx(0.5 * MB, rel=1e-3)
    assert sum(rates.values()) == pytest.approx(12 * MB, rel=0.01)
    link.takes = {}
    assert link.run(LONG)["slow"] == pytest.approx(4 * MB, rel=0.06)


def test_one_that_stands_still_holds_nobody_back() -> None:
    """A frozen receiver's share goes to the other."""
    link = Link(12 * MB, {"a": 1.0, "frozen": 1.0})
    link.run(300)
    link.takes = {"frozen": 0.0}
    assert link.run(300)["a"] == pytest.approx(12 * MB, rel=0.01)


def test_a_link_that_carries_more_is_found_out() -> None:
    """Soon, though nobody sends more than what was read: a look at it leads to leaps."""
    link = Link(2 * MB, {"a": 1.0, "b": 1.0})
    link.run(LONG)
    link.rate = 30 * MB
    ticks = SPAN * (LOOK_EVERY + 3 + math.ceil(math.log(15, LEAP)))
    for _ in range(ticks):
        link.tick()
    assert link.shares.link == pytest.approx(30 * MB, rel=0.03)


def test_a_link_that_has_become_slow_is_found_out() -> None:
    """After as many readings as are remembered, shares are even again."""
    link = Link(12 * MB, {"a": 3.0, "b": 1.0})
    link.run(LONG)
    link.rate = 3 * MB
    link.run(SPAN * (READINGS + 2))
    assert link.run(LONG)["a"] == pytest.approx(1.5 * MB, rel=0.06)


def test_a_fast_link_holds_nobody_back() -> None:
    """There the machines decide."""
    link = Link(1.01 * SLOW, {"a": 3.0, "b": 1.0})
    assert link.run(LONG)["a"] == pytest.approx(0.75 * 1.01 * SLOW, rel=1e-3)


def test_connections_that_wait_for_something_else_say_nothing_of_the_link() -> None:
    """What a peer has to send now and then must not become all that it may send."""
    link = Link(12 * MB, {"a": 1.0, "b": 1.0}, {"a": 0.1 * MB, "b": 0.1 * MB})
    for _ in range(LONG):
        link.tick(held_up=0.5)
    assert link.shares.link == 0.0


def test_one_alone_is_held_to_nothing() -> None:
    """It has the link for itself, whatever was read before."""
    link = Link(12 * MB, {"a": 1.0, "b": 1.0})
    link.run(300)
    link.weights = {"a": 1.0}
    for _ in range(2):
        link.tick()
    assert link.paces == {}
    assert link.shares.link == pytest.approx(12 * MB, rel=ROOM - 1)


class Wire:
    """A connection over which so much goes in each tick."""

    def __init__(self, rate: float) -> None:
        self.rate, self.began, self.paces = rate, time.monotonic(), list[float | None]()

    def took(self) -> Took:
        since = time.monotonic() - self.began
        return Took(round(self.rate * since), since)

    def pace(self, rate: float | None) -> None:
        self.paces.append(rate)


def test_connections_are_looked_at_while_something_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are paced; once one is over, the other isn't any more; once both are, nobody looks."""
    monkeypatch.setattr(pacing, "TICK_S", 0.005)

    async def life() -> None:
        pacer, a, b = Pacer(), Wire(2 * MB), Wire(1 * MB)
        pacer.begin("a", a)
        pacer.begin("b", b)
        while not (a.paces and a.paces[-1]):
            await asyncio.sleep(0.005)
        assert b.paces[-1] is not None
        pacer.over("b")
        while a.paces[-1] is not None:
            await asyncio.sleep(0.005)
        pacer.over("a")
        await asyncio.sleep(0.05)
        looked = len(a.paces)
        await asyncio.sleep(0.05)
        assert len(a.paces) == looked
        pacer.begin("a", a)
        await asyncio.sleep(0.05)
        assert len(a.paces) > looked
        pacer.end()
        await asyncio.sleep(0.05)
        looked = len(a.paces)
        await asyncio.sleep(0.05)
        assert len(a.paces) == looked

    asyncio.run(asyncio.wait_for(life(), 20))


def test_nobody_looks_at_connections_that_carry_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While payloads go to two peers both are looked at; after the next tick neither is."""
    monkeypatch.setattr(pacing, "TICK_S", 60.0)  # only when asked

    async def test(start: Start) -> None:
        a, _, _ = start("a"), start("b"), start("c")
        pacer = a.direct._pacer
        await asyncio.gather(*(a.send(peer, bytes(4 << 20)) for peer in "bcbc"))
        assert set(pacer._writing) == {"b", "c"}
        pacer.end()
        pacer._tick()
        assert not pacer._writing
        assert pacer._timer is None

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="TCP tells and takes it on Linux alone")
def test_a_connection_tells_what_went_over_it_and_keeps_to_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that have arrived, and as many a second as it was told."""
    monkeypatch.setattr(pacing, "TICK_S", 60.0)  # nobody else tells it

    async def test(start: Start) -> None:
        a, b = start("a"), start("b")
        await a.send("b", bytes(1 << 20))
        (line,) = a.direct._way("b").carried
        paced = line.stream.pipe.paced
        assert paced is not None
        before = paced.took()
        assert before.bytes >= 1 << 20
        paced.pace(8.0 * (1 << 20))
        began = time.monotonic()
        await a.send("b", bytes(4 << 20))
        assert time.monotonic() - began > 0.25
        after = paced.took()
        assert 4 << 20 <= after.bytes - before.bytes < 4.2 * (1 << 20)
        assert 0.25 < after.held_up_s - before.held_up_s < time.monotonic() - began + 0.1  # a coarse clock
        paced.pace(None)
        assert paced._sock.getsockopt(socket.SOL_SOCKET, 47) in (-1, 2**32 - 1)  # type: ignore[attr-defined]
        await b.close()

    run(test)


def test_a_system_that_knows_nothing_of_it_sends_as_it_did() -> None:
    """Where the kernel has no such accounts or paces, nothing is read, held back or logged."""

    class Bare:
        def getsockopt(self, *_: object) -> bytes:
            raise OSError("not here")

        setsockopt = getsockopt

    async def test(start: Start) -> None:
        a, _ = start("a"), start("b")
        await a.send("b", b"x")
        (line,) = a.direct._way("b").carried
        transport = line.stream.pipe._transport
        sock, transport._sock = transport._sock, Bare()  # type: ignore[attr-defined]
        assert line.stream.pipe.paced is not None
        before = line.stream.pipe.paced.took()
        line.stream.pipe.paced.pace(1.0)
        transport._sock = sock  # type: ignore[attr-defined]
        assert before.bytes < 1000
        await a.send("b", b"y")

    run(test)
