"""What this peer's link carries, found out from the payloads that it sends and receives anyway.

Law: pure; time is an argument. Only ever a lower bound is measured: a slow partner, a round's quiet end or an answer on
its way make bytes come more slowly than the link could carry them, and nothing makes them come faster. So of many
windows of time the best one counts, whoever the partners were.

And only the time counts in which there are two partners or more. With one alone it is often the partner's link, shared
with others, that sets the speed: two that fetch a state from one peer would each find half of what that one finds, get
less to reduce for it, and so never have cause to find more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 1.0
"""How long payloads must have been under way, with two partners or more at a time, for one more reading."""
READINGS = 60
"""How many readings are remembered: a link that has become slow is found out after a minute of transfers."""
LARGE_BYTES = 256 * 1024
"""A payload that is shorter tells more about delays than about the link."""
FAST = float(2**27)
"""Bytes a second (a gigabit) above which links count as equal: there the machines decide, and what is measured says
more about what else they do."""
CLEARLY = 1.25
"""What is told is told anew when it is off by this factor: elections should not follow every breath."""


@dataclass(slots=True)
class Meter:
    """One direction. Its clock runs while payloads are under way with two partners or more; the bytes that one is told
    of are spread evenly over the time since it was told of last, and a window is read once all that were under way in
    it have told."""

    _readings: deque[float] = field(default_factory=lambda: deque(maxlen=READINGS))
    _under_way: list[Payload] = field(default_factory=list)
    _windows: dict[int, float] = field(default_factory=dict)
    """The bytes of those not read yet, by number."""
    _several: bool = False
    """Whether they have two partners or more."""
    _clock_s: float = 0.0
    _at: float = 0.0

    def begin(self, partner: str, now: float) -> Payload:
        """A payload is under way, until its `end`."""
        payload = Payload(self, partner, self.clock(now), now)
        self._under_way.append(payload)
        self._count_partners()
        return payload

    def begin_large(self, partner: str, payload_bytes: int, now: float) -> Payload:
        """As `begin`, but a payload that is too short to say anything isn't counted."""
        return (self if payload_bytes >= LARGE_BYTES else Meter()).begin(partner, now)

    def end(self, payload: Payload, now: float) -> None:
        """It is over, for good or ill."""
        self.clock(now)
        self._under_way.remove(payload)
        self._count_partners()
        self._read()

    def _count_partners(self) -> None:
        self._several = len({payload.partner for payload in self._under_way}) > 1

    def clock(self, now: float) -> float:
        """Seconds that payloads have been under way with several, by now."""
        if self._several:
            self._clock_s += now - self._at
        self._at = now
        return self._clock_s

    def spread(self, count: float, since: float, until: float) -> None:
        """So many bytes have come to their end between two readings of the clock, of which the second is later."""
        first, last = int(since / WINDOW_S), int(until / WINDOW_S)
        for window in range(first, last + 1):
            inside = min(until, (window + 1) * WINDOW_S) - max(since, window * WINDOW_S)
            self._windows[window] = self._windows.get(window, 0.0) + count * inside / (until - since)
        self._read()

    @property
    def rate(self) -> float:
        """Bytes a second that the link carries at least: the second best reading, for one may be a fluke of a clock; 0
        while there are fewer than two."""
        return sorted(self._readings)[-2] if len(self._readings) > 1 else 0.0

    def _read(self) -> None:
        told = min((payload.at for payload in self._under_way), default=self._clock_s)
        for window in sorted(self._windows):
            if (window + 1) * WINDOW_S <= told:
                self._readings.append(self._windows.pop(window) / WINDOW_S)


@dataclass(slots=True, eq=False)
class Payload:
    """A payload on its way, of which a meter hears. `at`: the meter's clock when it was told last, at `told_at`."""

    meter: Meter
    partner: str
    at: float
    told_at: float
    _bytes: int = 0

    def reached(self, total_bytes: int, now: float) -> None:
        """So much of it has come to its end by now."""
        since, count, seconds = self.at, total_bytes - self._bytes, now - self.told_at
        self.at, self.told_at, self._bytes = self.meter.clock(now), now, total_bytes
        if self.at > since:
            self.meter.spread(count * (self.at - since) / seconds, since, self.at)

    def end(self, now: float) -> None:
        """No more of it comes."""
        self.meter.end(self, now)


@dataclass(slots=True)
class Bandwidth:
    """Both directions."""

    up: Meter = field(default_factory=Meter)
    down: Meter = field(default_factory=Meter)

    @property
    def rate(self) -> float:
        """Of the slower direction, bytes a second, at most FAST; 0 while neither is known."""
        known = [meter.rate for meter in (self.up, self.down) if meter.rate > 0]
        return min([*known, FAST]) if known else 0.0


def steady(told: float, found: float) -> float:
    """What to tell of a bandwidth: what was told, unless something clearly different is found."""
    if not found or (told and told / CLEARLY < found < told * CLEARLY):
        return told
    return float(f"{found:.3g}")
