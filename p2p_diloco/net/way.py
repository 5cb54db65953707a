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
from typing import Protocol

from p2p_diloco.net.pacing import Paced, Took
from p2p_diloco.net.payload_stream import PayloadStream

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


class Measured(Paced, Protocol):
    """A connection whose rate can be limited, and which tells how many of its bytes are on their way."""

    def path_bytes(self) -> float:
        """How many of the connection's bytes are on their way now, without those that wait in queues."""


class Together:
    """Joins all connections to one peer into one `Paced`, and reads how many of their bytes are on their way."""

    def __init__(self) -> None:
        self._took: dict[Measured, Took] = {}
        self._bytes, self._held_up_s = 0, 0.0
        self._path_bytes = deque[float](maxlen=READINGS)

    @property
    def wanted(self) -> int:
        """The number of connections that the path needs, judging by the most bytes on their way in any kept reading."""
        return connections_for(max(self._path_bytes, default=0.0))

    def add(self, connection: Measured) -> None:
        """Measure one more connection, from now on."""
        self._took[connection] = connection.took()

    def remove(self, connection: Measured) -> None:
        """Stop measuring a connection. Its progress so far still counts."""
        if connection in self._took:
            self.took()
            del self._took[connection]

    def took(self) -> Took:
        """The progress of all connections together. Each call adds to the sums what has come since the last call: the
        bytes of all connections, and the delay of the connection that was delayed longest."""
        longest_s = 0.0
        for connection, before in self._took.items():
            now = self._took[connection] = connection.took()
            self._bytes += now.bytes - before.bytes
            longest_s = max(longest_s, now.held_up_s - before.held_up_s)
        self._held_up_s += longest_s
        return Took(self._bytes, self._held_up_s)

    def pace(self, rate: float | None) -> None:
        """Limit all connections together to `rate` bytes a second, in equal parts. Also read how many of their bytes
        are on their way."""
        self._path_bytes.append(sum(connection.path_bytes() for connection in self._took))
        for connection in self._took:
            connection.pace(None if rate is None else rate / len(self._took))


@dataclass(slots=True)
class Way:
    """The direct connections to one peer, and the present attempt to open more of them. All times are the loop's.
    `patient_until`: when payloads stop waiting for the first connection; `failures`: how often in a row connecting or
    sending failed; `retry_at`: the earliest time of the next attempt to open a first connection."""

    connections: list[PayloadStream] = field(default_factory=list)
    """The connections on which payloads may be written, the least recently used first."""
    together: Together = field(default_factory=Together)
    attempt: asyncio.Task[None] | None = None
    patient_until: float = 0.0
    failures: int = 0
    retry_at: float = 0.0
    more_at: float = 0.0
    """The earliest time at which further connections may be opened."""
    given_back: asyncio.Event = field(default_factory=asyncio.Event)

    def fit(self) -> Sequence[PayloadStream]:
        """Drop the connections on which payloads may no longer be written; returns the others."""
        for one in self.connections[:]:
            if not one.fit:
                self.drop(one)
        return self.connections

    @property
    def missing(self) -> int:
        return self.together.wanted - len(self.connections)

    @property
    def has_room(self) -> bool:
        return any(not one.lent and one.fit for one in self.connections)

    def add(self, stream: PayloadStream) -> None:
        """Add a new connection. It will be the first to carry a payload."""
        self.connections.insert(0, stream)
        if (paced := stream.frames.pipe.paced) is not None:
            self.together.add(paced)

    def lend(self) -> PayloadStream | None:
        """Lend the least recently used free connection; None if payloads are being written on all connections."""
        for one in self.fit():
            if not one.lent:
                self.connections.remove(one)
                self.connections.append(one)
                one.lent = True
                return one
        return None

    def give_back(self, one: PayloadStream, sent_bytes: int, bytes_max: int) -> None:
        """Take back a lent connection, on which `sent_bytes` were written. Drop it if it has carried `bytes_max`, or if
        the path needs fewer connections."""
        one.lent = False
        one.carried_bytes += sent_bytes
        if one.carried_bytes >= bytes_max or not one.fit or self.missing < 0:
            self.drop(one)
        self.given_back.set()

    def drop(self, one: PayloadStream) -> None:
        """Stop using a connection for payloads. It is closed once all answers have come."""
        if one in self.connections:
            self.connections.remove(one)
            one.retire()
            if (paced := one.frames.pipe.paced) is not None:
                self.together.remove(paced)

    def drop_all(self) -> None:
        """Drop every connection to the peer, each as `drop` does."""
        for one in self.connections[:]:
            self.drop(one)
