"""A link's bandwidth, measured from payloads under way, and its shares; on clocks that tests turn."""

from __future__ import annotations

import math

import pytest

from p2p_diloco.net.bandwidth import FAST, Bandwidth, Meter, steady
from p2p_diloco.net.tcp import (
    FILLING,
    LEAP,
    LOOK_EVERY,
    SPAN,
    TICK_S,
    Pacer,
    Shares,
    Took,
)
from tests.net.clocks import ByHand, by_hand
from tests.net.patience import awaited

MB = 1e6


def send(meter: Meter, now: float, seconds: float, rate: float, every_s: float = 0.25) -> float:
    """Payloads to two that move steadily, at this rate together, and are told of every so often; when they are over."""
    payloads, told = [meter.begin(partner, now) for partner in "ab"], 0.0
    while told < seconds:
        told = min(seconds, told + every_s)
        for payload in payloads:
            payload.reached(round(rate * told / 2), now + told)
    for payload in payloads:
        payload.end(now + seconds)
    return now + seconds


def test_what_a_meter_measures_and_a_peer_tells() -> None:
    # Bytes that came without a second partner do not count. A late report covers time in which the clock stood;
    # that part, here ten times as much, is left out.
    meter = Meter()
    lone = meter.begin("a", 0.0)
    for second in range(40):
        other = meter.begin("b", second + 0.9)
        other.reached(round(0.4 * MB), second + 1.0)
        lone.reached(round(8 * MB * (second + 1)), second + 1.0)
        other.end(second + 1.0)
    assert meter.rate == pytest.approx(12 * MB, rel=0.01)

    # A late report is spread over the time before it. A payload that reports rarely counts in the windows in
    # which its bytes came.
    meter = Meter()
    slow, quick = meter.begin("a", 0.0), meter.begin("b", 0.0)
    for tick in range(1, 43):
        quick.reached(round(tick / 4 * 1 * MB), tick / 4)
        if tick % 7 == 0:
            slow.reached(round(tick / 4 * 9 * MB), tick / 4)
            assert meter.rate == 0 or meter.rate == pytest.approx(10 * MB, rel=1e-3)
    assert meter.rate > 0

    # The slower direction counts. A contribution has to come as well as go; above a gigabit all links are alike.
    both = Bandwidth()
    send(both.up, 0.0, 5.0, 2 * MB)
    assert both.rate == pytest.approx(2 * MB, rel=1e-3)
    send(both.down, 0.0, 5.0, 1 * MB)
    assert both.rate == pytest.approx(1 * MB, rel=1e-3)
    fast = Bandwidth()
    send(fast.up, 0.0, 5.0, 10 * FAST)
    assert fast.rate == FAST

    # A single high reading does not count. The system's clock may have jumped.
    meter = Meter()
    now = send(meter, 0.0, 5.0, 2 * MB)
    send(meter, now, 1.0, 50 * MB)
    assert meter.rate == pytest.approx(2 * MB, rel=1e-3)

    # The told bandwidth ignores small changes. The bandwidth is announced once it is known, and later only if it
    # clearly differs.
    assert steady(0.0, 1234567.0) == 1.23e6
    assert steady(0.0, 0.0) == 0.0
    assert steady(1e6, 1.2e6) == 1e6
    assert steady(1e6, 0.85e6) == 1e6
    assert steady(1e6, 1.3e6) == 1.3e6
    assert steady(1e6, 0.5e6) == 0.5e6
    assert steady(1e6, 0.0) == 1e6


# -- shares of a link, on a model of one that TCP divides unevenly


LONG = 6000
"""Ticks."""
FIRST = FILLING + SPAN
"""The ticks until there is a reading."""
GAPS = 0.94
"""What goes over a connection of what it may: now and then it waits for the machine, as little as `FULL` lets pass."""


class Link:
    """What goes over a link of so many bytes a second: by weights, as TCP happens to have it, up to a pace, of which a
    part stays unused, and to what the other end takes."""

    def __init__(
        self, rate: float, weights: dict[str, float], takes: dict[str, float] | None = None, used: float = 1.0
    ) -> None:
        self.rate, self.weights, self.takes, self.used = rate, weights, takes or {}, used
        self.shares, self.paces = Shares(), dict[str, float]()

    def tick(self, seconds: float = TICK_S, held_up: dict[str, float] | None = None) -> dict[str, float]:
        """The rates of a tick; paces follow. `held_up`: the part of it in which the network held one up, if not all."""
        most = {n: min(self.used * self.paces.get(n, math.inf), self.takes.get(n, math.inf)) for n in self.weights}
        rates, left, open_ = dict[str, float](), self.rate, set(self.weights)
        while open_:
            total = sum(self.weights[n] for n in open_)
            short = {n for n in open_ if most[n] <= left * self.weights[n] / total}
            for n in short or set(open_):
                rates[n] = most[n] if short else left * self.weights[n] / total
            left -= sum(rates[n] for n in short)
            open_ -= short or set(open_)
        parts = dict.fromkeys(self.weights, 1.0) | (held_up or {})
        took = {n: Took(round(rate * seconds), parts[n] * seconds) for n, rate in rates.items()}
        self.paces = self.shares.tick(took, seconds)
        return rates

    def run(self, ticks: int) -> dict[str, float]:
        """The mean rates of the last tenth of so many ticks."""
        all_ = [self.tick() for _ in range(ticks)][-math.ceil(ticks / 10) :]
        return {n: sum(rates[n] for rates in all_) / len(all_) for n in self.weights}


@pytest.mark.parametrize("weights", [(2.0, 1.0), (5.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)])
def test_a_link_is_shared_evenly(weights: tuple[float, ...]) -> None:
    """Whatever TCP would give to each, and no part of the link is left unused."""
    link = Link(12 * MB, dict(zip("abcd", weights, strict=False)))
    rates = link.run(LONG)
    assert sum(rates.values()) == pytest.approx(12 * MB, rel=1e-3)
    for rate in rates.values():
        assert rate == pytest.approx(12 * MB / len(rates), rel=0.06)


@pytest.mark.parametrize("others", ["a", "ab"])
def test_the_rest_of_a_slow_connections_share_goes_to_the_others(others: str) -> None:
    """A connection that takes little holds back no other, for whatever reason it is slow."""
    link = Link(12 * MB, dict.fromkeys([*others, "slow"], 1.0), {"slow": 0.5 * MB})
    rates = link.run(LONG)
    assert rates["slow"] == pytest.approx(0.5 * MB, rel=1e-3)
    assert sum(rates.values()) == pytest.approx(12 * MB, rel=0.01)
    link.takes = {}
    assert link.run(LONG)["slow"] == pytest.approx(12 * MB / len(rates), rel=0.06)


@pytest.mark.parametrize("used", [1.0, GAPS])
def test_a_faster_link_is_noticed(used: float) -> None:
    """Soon, though no connection sends more than its share: a probe leads to leaps."""
    link = Link(2 * MB, {"a": 1.0, "b": 1.0}, used=used)
    link.run(LONG)
    link.rate = 30 * MB
    link.run(SPAN * (LOOK_EVERY + 3 + math.ceil(math.log(15, LEAP * used))))
    assert link.shares.link == pytest.approx(30 * MB, rel=0.03)


@pytest.mark.parametrize("waiting", ["a", "ab"])
def test_a_connection_that_waits_for_its_peer_gives_no_reading(waiting: str) -> None:
    """What a peer sends now and then must limit neither itself nor another connection."""
    link = Link(12 * MB, {"a": 1.0, "b": 1.0}, dict.fromkeys(waiting, 0.1 * MB))
    for _ in range(LONG):
        link.tick(held_up=dict.fromkeys(waiting, 0.8))
    assert link.shares.link == 0.0
    assert link.paces == {}


class Wire:
    """A connection over which so many bytes go each second, held up by the network."""

    def __init__(self, clock: ByHand, rate: float) -> None:
        self.clock, self.rate, self.read_at = clock, rate, clock.now
        self.paces = list[float | None]()

    def took(self) -> Took:
        seconds, self.read_at = self.clock.now - self.read_at, self.clock.now
        return Took(round(self.rate * seconds), seconds)

    def pace(self, rate: float | None) -> None:
        self.paces.append(rate)


@awaited
async def test_connections_are_paced_while_payloads_are_written() -> None:
    """Both are paced; once one is over the other isn't any more; once both are, the ticks stop until one begins."""
    with by_hand() as clock:
        a, b, pacer = Wire(clock, 2 * MB), Wire(clock, 1 * MB), Pacer()
        pacer.begin("a", a)
        pacer.begin("b", b)

        async def ticks(count: int) -> None:
            for _ in range(2 * count):
                await clock.passes(0.5 * TICK_S)

        await ticks(FIRST - 1)
        assert a.paces == b.paces == [None] * (FIRST - 1)
        await ticks(1)
        assert a.paces[-1] is not None
        assert b.paces[-1] is not None
        pacer.over("b")
        await ticks(2)
        assert (a.paces[-1], len(a.paces), len(b.paces)) == (None, FIRST + 2, FIRST + 1)
        pacer.over("a")
        await ticks(3)
        pacer.over("a")  # also of another connection to that peer
        assert len(a.paces) == FIRST + 3
        pacer.begin("a", a)
        pacer.over("a")
        pacer.begin("a", a)  # the next payload, at once
        await ticks(2)
        assert len(a.paces) == FIRST + 5
        pacer.end()
