"""The TCP sockets of direct connections: their options and counters; and pacing, which limits the rates at which
payloads go to several peers, so that these peers share this peer's link evenly.

TCP shares a link unevenly: for seconds one connection has twice the rate of another. A round waits for the last
payload, and meanwhile the link is partly idle. So each connection is limited to an even share of the link's measured
rate, plus the unused part of the other connections' shares.

Law: knows nothing of TLS. `Shares` is pure arithmetic: bytes and seconds are its arguments. The link is measured only
while the network limits every connection. No connection is limited before the first reading, nor on a fast link.
Counters, pacing and `wake_for` work only on Linux: elsewhere nothing is counted, no connection is limited, and every
packet wakes the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

UNSENT_BYTES = 256 * 1024
"""The most unsent bytes in the kernel's buffer. By default it holds megabytes: payloads written one after the other
would then share a slow link, and the first would arrive as late as the last."""

WAKE_BYTES = 32 * 1024
"""While a payload is received, the kernel wakes this process once this many bytes are there. Otherwise each packet on a
slow link would wake it, and a wake-up takes much longer than decrypting a packet. This is half of the window with which
a connection begins on Linux. With as many bytes as the window has, the kernel did not enlarge the window, and long
paths became very slow."""
RECORD_BYTES = 16 * 1024
"""The longest TLS record. Up to this many of a payload's missing bytes may have come already, in an incomplete
record."""

_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPALIVE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""Keep-alive options, in seconds; the last is a count. Without probes, routers would forget a connection that is idle
between two rounds."""
_UNPACED, _PACE_MAX = -1, 2**31 - 1
"""The value that means no limit to Linux, and the highest rate in bytes a second."""
_SO_MAX_PACING_RATE = 47
"""The number of the socket option, for which Python has no name."""
_TCP_INFO = struct.Struct("16xI4xI40xI48xQ20xI16xQQ")
"""Fields of Linux's `tcp_info`: bytes of a packet; packets not acknowledged; round trip time, in microseconds; bytes
acknowledged; the shortest round trip time; microseconds in which bytes were unsent or unacknowledged; and the part of
these in which the receiver's window was full."""


def set_up(sock: socket.socket) -> None:
    """Set the options of a direct connection's socket: send small packets at once, keep few unsent bytes in the kernel,
    and send probes while the connection is idle."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


class TcpSocket:
    """A TCP connection whose progress can be read and whose rate can be limited (a `pacing.Paced`)."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._total = Took(0, 0.0)
        self._wake_bytes = 1

    def took(self) -> Took:
        """The connection's progress since the last call, by TCP's counters; none if the kernel doesn't tell them."""
        before = self._total
        if (info := self._info()) is not None:
            _, _, _, acknowledged, _, busy_us, awaited_us = info
            self._total = Took(acknowledged, (busy_us - awaited_us) / 1e6)
        return Took(self._total.bytes - before.bytes, self._total.held_up_s - before.held_up_s)

    def path_bytes(self) -> float:
        """Estimate how many of the connection's bytes are on their way now, without those that wait in queues: the
        unacknowledged bytes, multiplied by the shortest round trip time and divided by the present one. 0 if the kernel
        tells nothing, or the connection has ended."""
        if (info := self._info()) is None:
            return 0.0
        packet_bytes, unacknowledged, rtt_us, _, shortest_us, _, _ = info
        return packet_bytes * unacknowledged * min(1.0, shortest_us / max(1, rtt_us))

    def _info(self) -> tuple[int, ...] | None:
        with contextlib.suppress(OSError, ValueError):
            if sys.platform == "linux":
                fields = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                if len(fields) == _TCP_INFO.size:
                    return _TCP_INFO.unpack(fields)
        return None

    def wake_for(self, missing_bytes: int) -> None:
        """Let the kernel wake this process once `WAKE_BYTES` have come, or fewer near a payload's end, where no more
        may follow. `missing_bytes`: the payload's bytes that are not decrypted yet. Does nothing where the kernel
        can't."""
        wake_bytes = max(1, min(WAKE_BYTES, missing_bytes - RECORD_BYTES))
        if wake_bytes != self._wake_bytes:
            self._wake_bytes = wake_bytes
            with contextlib.suppress(OSError, ValueError):
                if sys.platform == "linux":
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)

    def pace(self, rate: float | None) -> None:
        """Limit TCP to `rate` bytes a second; None: no limit. Does nothing if the kernel can't limit it."""
        pace = _UNPACED if rate is None else max(1, min(round(rate), _PACE_MAX))
        with contextlib.suppress(OSError, ValueError):
            if sys.platform == "linux":
                self._sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, pace)


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
