"""The direct connections to one peer: how many there should be, and which connection carries the next payload. All
connections to the peer are measured as one.

One TCP connection carries at most its window in a round trip, and the kernel limits the window to a few megabytes. On a
path that is long and fast several connections carry more.

Law: knows connections, not how they are opened. `connections_for` is pure.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2p_diloco.net.outgoing import Outgoing
from p2p_diloco.net.pacing import Took
from p2p_diloco.net.tcp import TcpSocket

CONNECTIONS_MAX = 8
"""The most connections to one peer."""
EACH_CARRIES_BYTES = 3 << 19
"""The bytes of the path (bandwidth × delay) that one connection is to carry: 1.5 MiB. This is half of the
window that Linux allows a connection by default (`tcp_wmem` of 4 MiB, `tcp_rmem` of 6 MiB), so connections are added
before the window is the limit."""
READINGS = 100
"""How many readings of the path are kept. Each tick of the pacer makes a reading while payloads are written."""


def connections_for(path_bytes: float) -> int:
    """The number of connections that a path needs if `path_bytes` are on their way on it at a time."""
    return min(1 + int(path_bytes / EACH_CARRIES_BYTES), CONNECTIONS_MAX)


@dataclass(slots=True)
class Way:
    """The direct connections to one peer, and the present attempt to open more of them. All times are the loop's.
    `patient_until`: when payloads stop waiting for the first connection; `failures`: how often in a row connecting or
    sending failed; `retry_at`: the earliest time of the next attempt."""

    connections: list[Outgoing] = field(default_factory=list)
    """The connections on which payloads may be written, the least recently used first."""
    attempt: asyncio.Task[None] | None = None
    patient_until: float = 0.0
    failures: int = 0
    retry_at: float = 0.0
    given_back: asyncio.Event = field(default_factory=asyncio.Event)
    _path_bytes: deque[float] = field(default_factory=lambda: deque(maxlen=READINGS))

    # -- measured and paced as one

    def took(self) -> Took:
        """The progress of all connections together since the last call: their bytes, and the delay of the connection
        that was delayed longest."""
        took = [each.took() for each in self._sockets]
        return Took(sum(each.bytes for each in took), max((each.held_up_s for each in took), default=0.0))

    def pace(self, rate: float | None) -> None:
        """Limit all connections together to `rate` bytes a second, in equal parts. Also read how many of their bytes
        are on their way."""
        sockets = self._sockets
        self._path_bytes.append(sum(each.path_bytes() for each in sockets))
        for each in sockets:
            each.pace(None if rate is None else rate / len(sockets))

    @property
    def _sockets(self) -> list[TcpSocket]:
        return [each.frames.pipe.paced for each in self.connections if each.frames.pipe.paced is not None]

    @property
    def wanted(self) -> int:
        """The number of connections that the path needs, judging by the most bytes on their way in any kept reading."""
        return connections_for(max(self._path_bytes, default=0.0))

    # -- which carries the next payload

    def fit(self) -> Sequence[Outgoing]:
        """Drop the connections on which payloads may no longer be written; returns the others."""
        for one in self.connections[:]:
            if not one.fit:
                self.drop(one)
        return self.connections

    @property
    def missing(self) -> int:
        return self.wanted - len(self.connections)

    @property
    def has_room(self) -> bool:
        return any(not one.lent and one.fit for one in self.connections)

    def add(self, stream: Outgoing) -> None:
        """Add a new connection. It will be the first to carry a payload."""
        self.connections.insert(0, stream)

    def lend(self) -> Outgoing | None:
        """Lend the least recently used free connection; None if payloads are being written on all connections."""
        for one in self.fit():
            if not one.lent:
                self.connections.remove(one)
                self.connections.append(one)
                one.lent = True
                return one
        return None

    def give_back(self, one: Outgoing, sent_bytes: int, bytes_max: int) -> None:
        """Take back a lent connection, on which `sent_bytes` were written. Drop it if it has carried `bytes_max`, or if
        the path needs fewer connections."""
        one.lent = False
        one.carried_bytes += sent_bytes
        if one.carried_bytes >= bytes_max or not one.fit or self.missing < 0:
            self.drop(one)
        self.given_back.set()

    def drop(self, one: Outgoing) -> None:
        """Stop using a connection for payloads. It is closed once all answers have come."""
        if one in self.connections:
            self.connections.remove(one)
            one.retire()

    def drop_all(self) -> None:
        """Drop every connection to the peer, each as `drop` does."""
        for one in self.connections[:]:
            self.drop(one)
