"""The bandwidth of this peer's network link, measured from the payloads that it sends and receives anyway.

Law: reads no clock: time is an argument. Each measurement is a lower bound: bytes come more slowly than the link could
carry them when a partner is slow, a round ends or a sender awaits an answer; they never come faster. So one of the
highest readings counts, not their mean (`Meter.rate`).

Only time with two or more partners counts. With a single partner, the partner's link often sets the speed: two peers
that fetch a state from the same peer would each measure half of its link, would therefore be given less to aggregate,
and would never measure more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 1.0
"""Seconds of transfers with two or more partners that make one reading."""
READINGS = 60
"""How many readings are kept: a link that becomes slow is noticed after a minute of transfers."""
LARGE_BYTES = 64 * 1024
"""Shorter payloads aren't counted: latency, not bandwidth, sets their time."""
FAST = float(2**27)
"""Bytes a second (a gigabit) above which links count as equal: above it the machines' other work sets the speed."""
CLEARLY = 1.25
"""The announced bandwidth changes only when the measured one differs by this factor, so that the choice of
owners doesn't follow each fluctuation."""


@dataclass(slots=True)
class Meter:
    """Measures the bandwidth of one direction. Its clock runs only while payloads to or from at least two peers are
    under way. When a payload reports new bytes, they are spread evenly over the time since its last report. Each second
    of the clock (`WINDOW_S`) gives one reading: the bytes of that second. It is read as soon as no payload
    under way can add bytes to it: when each of them has reported since the second ended."""

    _readings: deque[float] = field(default_factory=lambda: deque(maxlen=READINGS))
    _under_way: list[Payload] = field(default_factory=list)
    _windows: dict[int, float] = field(default_factory=dict)
    """Bytes of each window that has not made a reading yet, by the window's number."""
    _several: bool = False
    """Whether the payloads under way have two or more partners."""
    _clock_s: float = 0.0
    _at: float = 0.0

    def begin(self, partner: str, now: float, payload_bytes: int = LARGE_BYTES) -> Payload:
        """Start to measure a payload; its `end` stops the measurement. A payload shorter than `LARGE_BYTES` isn't
        counted."""
        if payload_bytes < LARGE_BYTES:
            return Meter().begin(partner, now)
        payload = Payload(self, partner, self.clock(now), now)
        self._under_way.append(payload)
        self._count_partners()
        return payload

    def end(self, payload: Payload, now: float) -> None:
        """Stop measuring a payload that is complete or was given up."""
        self.clock(now)
        self._under_way.remove(payload)
        self._count_partners()
        self._read()

    def _count_partners(self) -> None:
        self._several = len({payload.partner for payload in self._under_way}) > 1

    def clock(self, now: float) -> float:
        """Advance the meter's clock to the time `now`, and return it: the seconds in which payloads with at least two
        partners were under way."""
        if self._several:
            self._clock_s += now - self._at
        self._at = now
        return self._clock_s

    def spread(self, count: float, since: float, until: float) -> None:
        """Count `count` bytes as if they had arrived evenly between two times of the meter's clock, `since` and
        `until`."""
        first, last = int(since / WINDOW_S), int(until / WINDOW_S)
        for window in range(first, last + 1):
            inside = min(until, (window + 1) * WINDOW_S) - max(since, window * WINDOW_S)
            self._windows[window] = self._windows.get(window, 0.0) + count * inside / (until - since)
        self._read()

    @property
    def rate(self) -> float:
        """A lower bound of the link's rate, in bytes a second: the second highest reading. The highest reading may be
        wrong, because the system's clock may have jumped. 0 while there are fewer than two readings."""
        return sorted(self._readings)[-2] if len(self._readings) > 1 else 0.0

    def _read(self) -> None:
        told = min((payload.at for payload in self._under_way), default=self._clock_s)
        for window in sorted(self._windows):
            if (window + 1) * WINDOW_S <= told:
                self._readings.append(self._windows.pop(window) / WINDOW_S)


@dataclass(slots=True, eq=False)
class Payload:
    """A payload under way, which reports its progress to a meter. `at` and `told_at` are the time of its last report:
    `at` by the meter's clock, `told_at` by the caller's."""

    meter: Meter
    partner: str
    at: float
    told_at: float
    _bytes: int = 0

    def reached(self, total_bytes: int, now: float) -> None:
        since, count, seconds = self.at, total_bytes - self._bytes, now - self.told_at
        self.at, self.told_at, self._bytes = self.meter.clock(now), now, total_bytes
        if self.at > since:
            self.meter.spread(count * (self.at - since) / seconds, since, self.at)

    def end(self, now: float) -> None:
        self.meter.end(self, now)


@dataclass(slots=True)
class Bandwidth:
    """The bandwidth meters of both directions."""

    up: Meter = field(default_factory=Meter)
    down: Meter = field(default_factory=Meter)

    @property
    def rate(self) -> float:
        """The rate of the slower direction in bytes a second, at most `FAST`. A direction without a rate yet is left
        out; 0 if neither direction has one."""
        known = [meter.rate for meter in (self.up, self.down) if meter.rate > 0]
        return min([*known, FAST]) if known else 0.0


def steady(told: float, found: float) -> float:
    """Choose the bandwidth to announce: the value `told` that was announced last (0: none yet), unless the measured
    value `found` (0: nothing measured) clearly differs from it."""
    if not found or (told and told / CLEARLY < found < told * CLEARLY):
        return told
    return float(f"{found:.3g}")
