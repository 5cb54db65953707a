"""The direct connections to one peer: how many there should be, which is free, and all of them measured as one.

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
"""The bytes of the path (bandwidth × delay) that one connection is to carry: 1.5 MiB. Half as many as Linux allows a
connection by default (`tcp_wmem` of 4 MiB, `tcp_rmem` of 6 MiB), so connections are added before the window is the
limit."""
READINGS = 100
"""How many readings of the path, one for each tick of the pacer while payloads are written, are kept."""


def connections_for(path_bytes: float) -> int:
    """How many connections are needed on a path that holds `path_bytes` at a time."""
    return min(1 + int(path_bytes / EACH_CARRIES_BYTES), CONNECTIONS_MAX)


class Measured(Paced, Protocol):
    """A connection that can be paced, and that tells how many bytes its path holds."""

    def path_bytes(self) -> float:
        """How many of the connection's bytes its path holds now, without those that wait in the path's queues."""


class Together:
    """All connections to one peer as one `Paced`; it also reads how many bytes their path holds."""

    def __init__(self) -> None:
        self._took: dict[Measured, Took] = {}
        self._bytes, self._held_up_s = 0, 0.0
        self._path_bytes = deque[float](maxlen=READINGS)

    @property
    def wanted(self) -> int:
        """The number of connections that the path needs, by the largest reading kept."""
        return connections_for(max(self._path_bytes, default=0.0))

    def add(self, connection: Measured) -> None:
        """Measure a further connection, from now on."""
        self._took[connection] = connection.took()

    def remove(self, connection: Measured) -> None:
        """Measure a connection no longer. Its progress so far still counts."""
        if connection in self._took:
            self.took()
            del self._took[connection]

    def took(self) -> Took:
        """The progress of all connections: the sum of their bytes, and the time of the one that was held up longest."""
        longest_s = 0.0
        for connection, before in self._took.items():
            now = self._took[connection] = connection.took()
            self._bytes += now.bytes - before.bytes
            longest_s = max(longest_s, now.held_up_s - before.held_up_s)
        self._held_up_s += longest_s
        return Took(self._bytes, self._held_up_s)

    def pace(self, rate: float | None) -> None:
        """Limit the connections to `rate` bytes a second in all, each equally; read how many bytes the path holds."""
        self._path_bytes.append(sum(connection.path_bytes() for connection in self._took))
        for connection in self._took:
            connection.pace(None if rate is None else rate / len(self._took))


@dataclass(slots=True)
class Connection:
    """One direct connection. `lent`: a payload is being written on it."""

    stream: PayloadStream
    carried_bytes: int = 0
    lent: bool = False


@dataclass(slots=True)
class Way:
    """The direct connections to one peer, and the attempt to open one or more."""

    connections: list[Connection] = field(default_factory=list)
    """Those on which payloads may be written; the one that was used longest ago is the first."""
    together: Together = field(default_factory=Together)
    attempt: asyncio.Task[None] | None = None
    patient_until: float = 0.0
    failures: int = 0
    retry_at: float = 0.0
    more_at: float = 0.0
    """The earliest time at which further connections may be opened."""
    given_back: asyncio.Event = field(default_factory=asyncio.Event)

    def fit(self) -> Sequence[Connection]:
        """The connections on which payloads may be written."""
        for one in self.connections[:]:
            if not one.stream.fit:
                self.drop(one)
        return self.connections

    @property
    def missing(self) -> int:
        """How many more connections the path needs."""
        return self.together.wanted - len(self.connections)

    @property
    def has_room(self) -> bool:
        """Whether a connection is free."""
        return any(not one.lent and one.stream.fit for one in self.connections)

    def add(self, stream: PayloadStream) -> None:
        """Use a new connection."""
        self.connections.insert(0, Connection(stream))
        if (paced := stream.frames.pipe.paced) is not None:
            self.together.add(paced)

    def lend(self) -> Connection | None:
        """The free connection that was used longest ago; None if payloads are written on all."""
        for one in self.fit():
            if not one.lent:
                self.connections.remove(one)
                self.connections.append(one)
                one.lent = True
                return one
        return None

    def give_back(self, one: Connection, sent_bytes: int, bytes_max: int) -> None:
        """Record that `sent_bytes` were written. A connection that carried `bytes_max`, or that the path does not need
        any more, is dropped."""
        one.lent = False
        one.carried_bytes += sent_bytes
        if one.carried_bytes >= bytes_max or not one.stream.fit or self.missing < 0:
            self.drop(one)
        self.given_back.set()

    def drop(self, one: Connection) -> None:
        """Stop writing on a connection; it ends once all answers have come."""
        if one in self.connections:
            self.connections.remove(one)
            one.stream.retire()
            if (paced := one.stream.frames.pipe.paced) is not None:
                self.together.remove(paced)

    def drop_all(self) -> None:
        """Stop writing on all connections."""
        for one in self.connections[:]:
            self.drop(one)
