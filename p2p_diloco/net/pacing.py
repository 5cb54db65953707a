"""Pacing limits the rates at which payloads go to several peers, so that these peers share this peer's link evenly.

TCP shares a link unevenly: for seconds one connection has twice the rate of another. A round waits for the last
payload, and meanwhile the link is partly idle. So each connection is limited to an even share of the link's measured
rate, plus the unused part of the other connections' shares.

Law: `Shares` is pure arithmetic: bytes and seconds are its arguments. The link is measured only while the network
limits every connection. No connection is limited before the first reading, nor on a fast link.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

TICK_S = 0.1
"""Seconds between two computations of the shares."""
FULL = 0.9
"""The network limits a connection in a tick if it delays the connection for at least this fraction of the tick."""
FILLING, SPAN = 5, 10
"""Of consecutive ticks in which the network limits every connection, the first FILLING only fill the buffers on the
way. After them, every SPAN ticks make a reading of the link."""
READINGS = 20
"""How many readings are kept: a link that becomes slow is noticed after this many readings."""
ROOM, LOOK, LEAP = 1.03, 1.1, 1.3
"""The rate that is shared out, as a multiple of the best reading: usually ROOM; LOOK, to probe whether the link carries
more; LEAP, after a reading showed that it does."""
LOOK_EVERY = 20
"""One reading in this many is a probe. Without probes, paced peers on a shared link would never learn that it carries
more, and the shares would shrink, because connections use a little less than their share. As `READINGS` is the same,
one of the kept readings is always a probe."""
HIGHER = 1.02
"""A reading that exceeds the best one by this factor shows a faster link, not noise."""
GROWTH = 1.25
"""A connection that took less than its share keeps this multiple of its recent rate, so that it can grow."""
LATELY = 0.2
"""The weight of the latest tick in a connection's recent rate."""
SLOW = float(2**25)
"""Bytes a second (a quarter of a gigabit) above which no connection is limited: there the machines, not the link, set
the rates."""


class Took(NamedTuple):
    """The progress of a connection in some time: the bytes that have arrived, and the seconds for which the network has
    delayed the connection."""

    bytes: int
    held_up_s: float


@dataclass(slots=True)
class Shares:
    """Computes each connection's share of this peer's link."""

    _readings: deque[float] = field(default_factory=lambda: deque(maxlen=READINGS))
    _room: float = ROOM
    _until_look: int = 1
    """How many readings remain until the next probe."""
    _run: list[float] = field(default_factory=list)
    """The link's rate in each of the latest consecutive ticks in which the network limited every connection."""
    _lately: dict[str, float] = field(default_factory=dict)

    @property
    def link(self) -> float:
        """The link's rate in bytes a second: the highest of the kept readings; 0 before the first reading."""
        return max(self._readings, default=0.0)

    def tick(self, took: Mapping[str, Took], seconds: float) -> dict[str, float]:
        """Compute the rate, in bytes a second, that each connection may use from now on. `took`: each connection's
        progress in the last tick, which lasted `seconds`. An empty result limits no connection."""
        self._read(took, seconds)
        rates = {name: one.bytes / seconds for name, one in took.items()}
        before = self._lately
        self._lately = {name: r + (1 - LATELY) * (before.get(name, r) - r) for name, r in rates.items()}
        shared = self.link * self._room
        if len(took) < 2 or not 0 < self.link <= SLOW:
            return {}
        fair = shared / len(took)
        kept = {name: min(fair, GROWTH * lately) for name, lately in self._lately.items()}
        return {name: shared - (sum(kept.values()) - kept[name]) for name in took}

    def _read(self, took: Mapping[str, Took], seconds: float) -> None:
        if len(took) < 2 or any(one.held_up_s < FULL * seconds for one in took.values()):
            self._run.clear()
            return
        self._run.append(sum(one.bytes for one in took.values()) / seconds)
        if len(self._run) == FILLING + SPAN:
            rate = sum(self._run[FILLING:]) / SPAN
            self._until_look -= 1
            if rate >= HIGHER * self.link > 0:
                self._room = LEAP
            elif self._until_look <= 0:
                self._room, self._until_look = LOOK, LOOK_EVERY
            else:
                self._room = ROOM
            self._readings.append(rate)
            del self._run[FILLING:]


class Paced(Protocol):
    """A connection whose progress can be read, and whose rate can be limited."""

    def took(self) -> Took:
        """How many bytes have arrived since the last call, and for how long the network has delayed the connection."""

    def pace(self, rate: float | None) -> None:
        """Send at most `rate` bytes a second; None: no limit."""


class Pacer:
    """Measures connections and limits their rates while payloads are written on them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._shares = Shares()
        self._writing: dict[str, Paced] = {}
        self._over = set[str]()
        self._ticked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, peer: str, connection: Paced) -> None:
        """Record that a payload is being written to a peer, until `over` is called."""
        if self._writing.get(peer) is not connection:
            self._writing[peer] = connection
            connection.took()  # what came before doesn't count
        self._over.discard(peer)
        if self._timer is None:
            self._ticked_at = self._loop.time()
            self._timer = self._loop.call_later(TICK_S, self._tick)

    def over(self, peer: str) -> None:
        """Record that the writing of payloads to the peer has ended. After the next tick its connection is neither
        measured nor limited."""
        self._over.add(peer)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        took = {peer: connection.took() for peer, connection in self._writing.items()}
        rates = self._shares.tick(took, now - self._ticked_at)
        for peer, connection in self._writing.items():
            connection.pace(rates.get(peer))
        self._writing = {peer: one for peer, one in self._writing.items() if peer not in self._over}
        self._over.clear()
        self._ticked_at = now
        self._timer = self._loop.call_later(TICK_S, self._tick) if self._writing else None
