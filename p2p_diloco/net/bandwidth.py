"""What this peer's link carries, measured by the payloads that it sends and receives anyway.

Law: pure; time is an argument. A measurement is a lower bound: a slow partner, the quiet end of a round or an answer on
its way make bytes come more slowly than the link could carry them; nothing makes them come faster. So the best of many
windows of time counts.

Only time with two partners or more counts. With a single partner that one's link, shared with others, often sets the
speed: two peers that fetch a state from the same peer would each measure half of its link, get less to reduce for it,
and so never measure more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 1.0
"""How long payloads with two partners or more must be under way to make one reading."""
READINGS = 60
"""How many readings are kept: a link that has become slow shows after a minute of transfers."""
LARGE_BYTES = 256 * 1024
"""Shorter payloads aren't counted: their time is mostly delay."""
FAST = float(2**27)
"""Bytes a second (a gigabit) above which links count as equal: there the machines set the speed, and a measurement
tells mostly what else they do."""
CLEARLY = 1.25
"""The told bandwidth changes when the measured one differs by this factor: elections shouldn't follow each fluctuation.
"""


@dataclass(slots=True)
class Meter:
    """One direction. Its clock runs while payloads with two partners or more are under way. A payload's new bytes are
    spread evenly over the time since its last report. A window becomes a reading once all payloads in it have reported.
    """

    _readings: deque[float] = field(default_factory=lambda: deque(maxlen=READINGS))
    _under_way: list[Payload] = field(default_factory=list)
    _windows: dict[int, float] = field(default_factory=dict)
    """The bytes of the windows that are no readings yet, by number."""
    _several: bool = False
    """Whether the payloads under way have two partners or more."""
    _clock_s: float = 0.0
    _at: float = 0.0

    def begin(self, partner: str, now: float, payload_bytes: int = LARGE_BYTES) -> Payload:
        """A payload that is under way until its `end`. One that is too short to say anything isn't counted."""
        if payload_bytes < LARGE_BYTES:
            return Meter().begin(partner, now)
        payload = Payload(self, partner, self.clock(now), now)
        self._under_way.append(payload)
        self._count_partners()
        return payload

    def end(self, payload: Payload, now: float) -> None:
        """The payload is complete, or given up."""
        self.clock(now)
        self._under_way.remove(payload)
        self._count_partners()
        self._read()

    def _count_partners(self) -> None:
        self._several = len({payload.partner for payload in self._under_way}) > 1

    def clock(self, now: float) -> float:
        """Seconds for which payloads have been under way with several partners, up to now."""
        if self._several:
            self._clock_s += now - self._at
        self._at = now
        return self._clock_s

    def spread(self, count: float, since: float, until: float) -> None:
        """So many bytes arrived between two times of `clock`, the second of which is later."""
        first, last = int(since / WINDOW_S), int(until / WINDOW_S)
        for window in range(first, last + 1):
            inside = min(until, (window + 1) * WINDOW_S) - max(since, window * WINDOW_S)
            self._windows[window] = self._windows.get(window, 0.0) + count * inside / (until - since)
        self._read()

    @property
    def rate(self) -> float:
        """Bytes a second that the link carries at least: the second best reading, for the best may come from a clock's
        jump; 0 while there are fewer than two."""
        return sorted(self._readings)[-2] if len(self._readings) > 1 else 0.0

    def _read(self) -> None:
        told = min((payload.at for payload in self._under_way), default=self._clock_s)
        for window in sorted(self._windows):
            if (window + 1) * WINDOW_S <= told:
                self._readings.append(self._windows.pop(window) / WINDOW_S)


@dataclass(slots=True, eq=False)
class Payload:
    """A payload under way, which reports to a meter. `at`: the meter's clock at the last report, made at `told_at`."""

    meter: Meter
    partner: str
    at: float
    told_at: float
    _bytes: int = 0

    def reached(self, total_bytes: int, now: float) -> None:
        """So many bytes of it have arrived in all."""
        since, count, seconds = self.at, total_bytes - self._bytes, now - self.told_at
        self.at, self.told_at, self._bytes = self.meter.clock(now), now, total_bytes
        if self.at > since:
            self.meter.spread(count * (self.at - since) / seconds, since, self.at)

    def end(self, now: float) -> None:
        """No more bytes of it will arrive."""
        self.meter.end(self, now)


@dataclass(slots=True)
class Bandwidth:
    """The meters of both directions."""

    up: Meter = field(default_factory=Meter)
    down: Meter = field(default_factory=Meter)

    @property
    def rate(self) -> float:
        """Bytes a second of the slower known direction, at most FAST; 0 while neither is known."""
        known = [meter.rate for meter in (self.up, self.down) if meter.rate > 0]
        return min([*known, FAST]) if known else 0.0


def steady(told: float, found: float) -> float:
    """The bandwidth to tell: the one told before, unless the measured one clearly differs."""
    if not found or (told and told / CLEARLY < found < told * CLEARLY):
        return told
    return float(f"{found:.3g}")
