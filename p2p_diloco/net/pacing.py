"""How fast payloads go to each of several peers, so that they share this peer's link evenly.

TCP shares a link among connections as it happens: for seconds one has twice what another has. A round waits for the
last one, and while that ends, the link rests. So each connection is held to an even share of what the link was seen to
carry, and to whatever the others leave of theirs.

Law: `Shares` is pure; bytes and seconds are arguments. What a link carries is read only while the network holds up
every connection. Nothing is held back before there is a reading, nor on a fast link.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

TICK_S = 0.1
"""How often the shares are looked at."""
FULL = 0.9
"""The part of a tick in which the network must have held up a connection to have decided how much went over it."""
FILLING, SPAN = 5, 10
"""After so many such ticks in a row, in which what lies between here and there fills, each further so many make a
reading of the link."""
READINGS = 20
"""How many are remembered: that a link has become slow is found out after as many."""
ROOM, LOOK, LEAP = 1.03, 1.1, 1.3
"""How much more than the most that was read is shared out: as a rule, when looking whether the link carries more, and
once it did."""
LOOK_EVERY = 20
"""It looks once in so many readings: where several hold themselves back, none of them would find out otherwise. And as
often as readings are forgotten: connections use a little less than they may, which must not be shared out in turn."""
HIGHER = 1.02
"""A reading that is higher than the most before by so much is no chance."""
GROWTH = 1.25
"""How much more than lately is kept for a connection that took less than its share: so it may grow into that."""
LATELY = 0.2
"""The weight of the latest tick in what a connection took lately."""
SLOW = float(2**25)
"""Bytes a second (a quarter of a gigabit) above which nothing is held back: there machines decide more than links."""


class Took(NamedTuple):
    """What went over a connection: bytes that arrived, and the seconds in which the network held it up."""

    bytes: int
    held_up_s: float


@dataclass(slots=True)
class Shares:
    """The shares of one link."""

    _readings: deque[float] = field(default_factory=lambda: deque(maxlen=READINGS))
    _room: float = ROOM
    _until_look: int = 1
    """Readings."""
    _run: list[float] = field(default_factory=list)
    """The link's rate in each of the latest ticks in which the network held up every connection."""
    _lately: dict[str, float] = field(default_factory=dict)

    @property
    def link(self) -> float:
        """Bytes a second that the link carries, as far as is known: the most that was read lately; 0 before that."""
        return max(self._readings, default=0.0)

    def tick(self, took: Mapping[str, Took], seconds: float) -> dict[str, float]:
        """The bytes a second that each connection may take from now on, after a tick in which they took this; none are
        given where they may take what they can."""
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
    """A connection that can be held to a pace."""

    def took(self) -> Took:
        """What has gone over it so far."""

    def pace(self, rate: float | None) -> None:
        """Take no more than so many bytes a second; None: what it can."""


@dataclass(slots=True)
class _Writing:
    """A connection on which something is written."""

    connection: Paced
    took: Took
    """What had gone over it at the last tick."""
    over: bool = False


class Pacer:
    """Looks at connections while something is written on them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._shares = Shares()
        self._writing: dict[str, _Writing] = {}
        self._ticked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, peer: str, connection: Paced) -> None:
        """Something is written to a peer from now on, until `over`."""
        one = self._writing.get(peer)
        if one is None or one.connection is not connection:
            one = self._writing[peer] = _Writing(connection, connection.took())
        one.over = False
        if self._timer is None:
            self._ticked_at = self._loop.time()
            self._timer = self._loop.call_later(TICK_S, self._tick)

    def over(self, peer: str) -> None:
        """For now, nothing is."""
        if (one := self._writing.get(peer)) is not None:
            one.over = True

    def end(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        now, went = self._loop.time(), dict[str, Took]()
        for peer, one in self._writing.items():
            before, one.took = one.took, one.connection.took()
            went[peer] = Took(one.took.bytes - before.bytes, one.took.held_up_s - before.held_up_s)
        rates = self._shares.tick(went, now - self._ticked_at)
        for peer, one in self._writing.items():
            one.connection.pace(rates.get(peer))
        self._writing = {peer: one for peer, one in self._writing.items() if not one.over}
        self._ticked_at = now
        self._timer = self._loop.call_later(TICK_S, self._tick) if self._writing else None
