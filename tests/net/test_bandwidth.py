"""A link's bandwidth, measured from payloads under way; the test advances the clock."""

from __future__ import annotations

import pytest

from p2p_diloco.net.bandwidth import FAST, Bandwidth, Meter, steady

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


def test_a_single_partner_gives_no_reading() -> None:
    """Its own link may be the slow one. Beside others, only the time counts in which two transfer."""
    meter = Meter()
    lone = meter.begin("a", 0.0)
    for tick in range(1, 41):
        lone.reached(round(tick / 4 * 5 * MB), tick / 4)
    assert meter.rate == 0.0
    other, tick = meter.begin("b", 10.1), 40
    for tick in range(41, 81):
        lone.reached(round(tick / 4 * 5 * MB), tick / 4)
        other.reached(round((tick / 4 - 10.1) * 7 * MB), tick / 4)
    assert meter.rate == pytest.approx(12 * MB, rel=1e-3)


def test_bytes_that_came_without_a_second_partner_do_not_count() -> None:
    """A late report covers time in which the clock stood; that part, here ten times as much, is left out."""
    meter = Meter()
    lone = meter.begin("a", 0.0)
    for second in range(40):
        other = meter.begin("b", second + 0.9)
        other.reached(round(0.4 * MB), second + 1.0)
        lone.reached(round(8 * MB * (second + 1)), second + 1.0)
        other.end(second + 1.0)
    assert meter.rate == pytest.approx(12 * MB, rel=0.01)


def test_a_late_report_is_spread_over_the_time_before_it() -> None:
    """A payload that reports rarely counts in the windows in which its bytes came."""
    meter = Meter()
    slow, quick = meter.begin("a", 0.0), meter.begin("b", 0.0)
    for tick in range(1, 43):
        quick.reached(round(tick / 4 * 1 * MB), tick / 4)
        if tick % 7 == 0:
            slow.reached(round(tick / 4 * 9 * MB), tick / 4)
            assert meter.rate == 0 or meter.rate == pytest.approx(10 * MB, rel=1e-3)
    assert meter.rate > 0


def test_the_slower_direction_counts() -> None:
    """A contribution has to come as well as go; above a gigabit all links are alike."""
    both = Bandwidth()
    send(both.up, 0.0, 5.0, 2 * MB)
    assert both.rate == pytest.approx(2 * MB, rel=1e-3)
    send(both.down, 0.0, 5.0, 1 * MB)
    assert both.rate == pytest.approx(1 * MB, rel=1e-3)
    fast = Bandwidth()
    send(fast.up, 0.0, 5.0, 10 * FAST)
    assert fast.rate == FAST


def test_a_single_high_reading_does_not_count() -> None:
    """The system's clock may have jumped."""
    meter = Meter()
    now = send(meter, 0.0, 5.0, 2 * MB)
    send(meter, now, 1.0, 50 * MB)
    assert meter.rate == pytest.approx(2 * MB, rel=1e-3)


def test_the_told_bandwidth_ignores_small_changes() -> None:
    """The bandwidth is announced once it is known, and later only if it clearly differs."""
    assert steady(0.0, 1234567.0) == 1.23e6
    assert steady(0.0, 0.0) == 0.0
    assert steady(1e6, 1.2e6) == 1e6
    assert steady(1e6, 0.85e6) == 1e6
    assert steady(1e6, 1.3e6) == 1.3e6
    assert steady(1e6, 0.5e6) == 0.5e6
    assert steady(1e6, 0.0) == 1e6
