"""Opens, lends and closes the direct connections on which payloads go to other peers.

Law: only an optimisation. A peer that can't be reached directly gets its payloads over libp2p; the attempt delays one
payload for a moment. Who wants to send payloads is TLS's server, whoever dialled, so the other one shows nothing of
itself before it knows who that is. One TCP connection carries at most its window in a round trip, and the kernel limits
the window to a few megabytes: on a long and fast path several connections carry more (`Way`).

    over libp2p    A: MESSAGE, empty                      B: MESSAGE with an offer, or REFUSED
    over TCP       A dials and knocks; then TLS, in which A is the server; from now on A sends payloads
    if that fails
    over libp2p    A: MESSAGE with an offer of its own    B: MESSAGE, empty, once it has connected, or REFUSED
    over TCP       B dials and knocks; then TLS, in which A is the server; from now on A sends payloads
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from p2p_diloco.addresses import leads_over_a_relay
from p2p_diloco.net.attempts import first
from p2p_diloco.net.dial_back import PortBudget
from p2p_diloco.net.framing import FrameError, Message, Refused
from p2p_diloco.net.interface import PEERS_COUNTED_MAX, Refusal, Unreachable
from p2p_diloco.net.listener import Listener, Offer, knock_at
from p2p_diloco.net.pipe import Pipe, PipeBroken, PipeStalled
from p2p_diloco.net.streams import Outgoing, Streams, start
from p2p_diloco.net.tcp import Pacer, TcpSocket, Took
from p2p_diloco.net.tls import Tls

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 8
"""The most connections to one peer."""
EACH_CARRIES_BYTES = 3 << 19
"""The bytes of the path (bandwidth × delay) that one connection is to carry: 1.5 MiB. This is half of the
window that Linux allows a connection by default (`tcp_wmem` of 4 MiB, `tcp_rmem` of 6 MiB), so connections are added
before the window is the limit."""
READINGS = 100
"""How many readings of the path are kept. Each tick of the pacer makes a reading while payloads are written."""
STAGGER_S = 0.25
"""Seconds after which the next address is tried as well, while the present one has not answered."""
PLACES_MAX = 8
"""The most addresses of a peer that are tried."""
DIRECT = "direct"
"""The path of a direct connection, as `Traffic` names it."""
DIAL_S = 3.0
"""Deadline for the request over libp2p, and again for the dial. If the other peer is asked to dial, request and dial
together have twice as long."""
PATIENCE_PART = 0.1
"""The fraction of `connect_timeout_s` for which a payload waits for a direct connection before it goes over libp2p."""
OPEN_MAX = 256
"""The most peers to which this peer keeps connections to send on. With more, the connections to the least recently
used peer are closed."""
RETRY_S, RETRY_S_MAX = 30.0, 600.0
"""Seconds from a failure to the next attempt; they double with each further failure, up to the maximum."""
CARRIED_BYTES_MAX = 1 << 37
"""Bytes after which a connection is replaced. AES-GCM may encrypt about 2²⁴ records of 16 KiB under one key (RFC 8446,
5.5); this is half of that."""
_FAILURES = (OSError, asyncio.TimeoutError, Refusal, Unreachable, FrameError, PipeBroken, PipeStalled)


def connections_for(path_bytes: float) -> int:
    """The number of connections that a path needs if `path_bytes` are on their way on it at a time."""
    return min(1 + int(path_bytes / EACH_CARRIES_BYTES), CONNECTIONS_MAX)


@dataclass(slots=True)
class Way:
    """The direct connections to one peer, measured as one, and the present attempt to open more. Times are the loop's.
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


async def dial(tls: Tls, peer: str, offer: Offer, addresses: Iterable[str], *, sends: bool, timeout_s: float) -> Pipe:
    """Dial the peer that made the offer, at one of these multiaddrs. `sends`: whether this peer will send payloads on
    the connection.

    Raises:
        OSError: no address accepted the connection; the error is the last address's. asyncio.TimeoutError: no address
        accepted it in time.
    """
    places = places_of(offer.ports, addresses)
    if not places:
        raise OSError("this peer knows no direct address of the other peer")
    attempts = [partial(knock_at, tls, place, offer.knock, peer, sends=sends) for place in places]
    return await asyncio.wait_for(first(attempts, stagger_s=STAGGER_S, discard=Pipe.abort), timeout_s)


def places_of(ports: Iterable[tuple[int, int]], addresses: Iterable[str]) -> list[tuple[str, int, int]]:
    """The places to dial, as (host, port, address family), in the order of the addresses. `ports`: pairs (IP version,
    TCP port), the same at each address. Addresses that lead through a relay are left out."""
    ports = tuple(ports)
    places: dict[tuple[str, int, int], None] = {}
    for address in addresses:
        match address.split("/"):
            case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6" as kind, host, *_] if not leads_over_a_relay(address):
                for version, port in ports:
                    if kind == "dns" or kind.endswith(str(version)):
                        family = socket.AF_INET if version == 4 else socket.AF_INET6
                        places[host, port, int(family)] = None
    return list(places)[:PLACES_MAX]


Opened = tuple[Pipe, str]
"""A stream over libp2p, and the multiaddr at which the peer was found."""


class DirectChannel:
    """The direct connections of this peer: those on which it sends payloads, and those on which it receives them.

    Args:
        streams: the peer's streams, with their limits and counts.
        tls: encrypts the connections, and makes sure who is at the other end.
        open_stream: opens a libp2p stream to a peer, which that peer's `answer` serves.
        addresses: returns the known multiaddrs of a peer.
        found_at: connects to a peer over libp2p, and returns the multiaddrs at which this succeeded.
        serve: receives the payloads that come on a connection.
        hosts: the IP addresses to listen on.
        port: the port to listen on; 0: the system chooses.

    Raises:
        ConfigError: the port can't be listened on.
    """

    def __init__(
        self,
        streams: Streams,
        tls: Tls,
        *,
        open_stream: Callable[[str], Awaitable[Opened]],
        addresses: Callable[[str], Sequence[str]],
        found_at: Callable[[str], Awaitable[Sequence[str]]],
        serve: Callable[[str, Pipe], Awaitable[None]],
        hosts: Sequence[str],
        port: int = 0,
    ) -> None:
        self._streams, self._tls = streams, tls
        self._open_stream, self._addresses, self._found_at = open_stream, addresses, found_at
        self._clock = asyncio.get_running_loop().time
        self._ways: dict[str, Way] = {}
        self._pacer = Pacer()
        self._budget = PortBudget(self._clock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.listener = Listener(
            tls, hosts, port, serve=serve, lend=self._keep, groups=lambda peer: streams.groups(peer)
        )

    # -- for the sender of payloads

    async def take(self, peer: str) -> Outgoing | None:
        """Lend the caller a direct connection to `peer`, to write one payload on; the caller returns it by `give_back`.
        None means: send the payload over libp2p. For the same peer, call this only after the last call has returned.

        Waits a moment for a first attempt to connect. If the attempt takes longer, only later payloads use its
        connection. If all connections are lent, waits until one is given back.
        """
        way = self._way(peer)
        while True:
            self._connect_more(peer, way)
            if not way.fit() and way.attempt is not None and not way.failures:
                await asyncio.wait({way.attempt}, timeout=max(0.0, way.patient_until - self._clock()))
            if (connection := way.lend()) is not None or not way.connections:
                break
            way.given_back.clear()
            await way.given_back.wait()
        if connection is not None:
            self._used(peer)
            self._pacer.begin(peer, way)
        return connection

    def has_room(self, peer: str) -> bool:
        """Whether `take` would lend another connection now, without waiting."""
        return self._way(peer).has_room

    def give_back(self, peer: str, connection: Outgoing, sent_bytes: int) -> None:
        """Take back a connection that was lent by `take`, after the caller has written `sent_bytes` on it."""
        way = self._way(peer)
        way.give_back(connection, sent_bytes, CARRIED_BYTES_MAX)
        if not any(one.lent for one in way.connections):
            self._pacer.over(peer)

    def succeeded(self, peer: str) -> None:
        """Forget earlier failures. Called when a payload on a direct connection to this peer was answered."""
        way = self._way(peer)
        if way.failures:
            way.failures, way.retry_at = 0, 0.0

    def failed(self, peer: str, why: str) -> None:
        """Use no direct connection to this peer for a while. Called when none could be made, or when one broke or
        stalled while a payload was sent on it."""
        way, now = self._way(peer), self._clock()
        way.drop_all()
        if now < way.retry_at and way.failures:
            return  # a failure at the same time was counted already
        way.failures += 1
        wait_s = min(RETRY_S * 2 ** (way.failures - 1), RETRY_S_MAX)
        way.retry_at = now + wait_s
        why = "; ".join(dict.fromkeys(why.replace(f"{peer}: ", "").split("; ")))  # each part of it names the peer
        level = logging.INFO if way.failures == 1 else logging.DEBUG
        log.log(level, "payloads to %s go over libp2p for the next %.0f s: %s", peer, wait_s, why)

    def broke(self, peer: str) -> None:
        """End all direct connections to a peer at once, and use none for a while. Called when the direct path to the
        peer is broken."""
        if connections := self._way(peer).connections:
            for connection in connections:
                connection.frames.pipe.abort()
            self.failed(peer, "the path to it is broken")

    def end(self) -> None:
        """End every stream of this peer, and every attempt to open a direct connection."""
        self._closing = True
        self._pacer.end()
        self.listener.end()
        self._streams.abort()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Do as `end`, and wait until the tasks have ended."""
        self.end()
        await asyncio.gather(*self._tasks, self.listener.ended(), return_exceptions=True)

    # -- for peers that ask over libp2p

    async def answer(self, peer: str, pipe: Pipe, seen_at: str) -> None:
        """Answer a peer's request for a direct connection, on the stream that the peer opened for it."""
        frames, read_s = self._streams.frames(peer, pipe), self._streams.limits.read_timeout_s
        try:
            frames.write(await self._answered(peer, await frames.answer(read_s), seen_at))
            await frames.read(idle_s=read_s, frame_s=read_s)  # until the peer closes the stream
        except _FAILURES as error:
            log.debug("the request of %s for a direct connection failed: %r", peer, error)
        finally:
            pipe.close()

    async def _answered(self, peer: str, request: bytes, seen_at: str) -> Message | Refused:
        if self._closing:
            return Refused("this peer is closing")
        if not request:
            offer = self.listener.offer(peer, sends=False)
            return Refused("this peer takes no direct connections") if offer is None else Message(offer.pack())
        if not self.listener.has_room(peer):
            return Refused("too many direct connections were asked for")
        try:
            offer, at = Offer.unpack(request), await self._proven_at(peer, seen_at)
            if not self._budget.spend([place[:2] for place in places_of(offer.ports, at)]):
                raise OSError("too many ports of that address were dialled lately")
            pipe = await dial(self._tls, peer, offer, at, sends=False, timeout_s=DIAL_S)
        except _FAILURES as error:
            return Refused(f"no direct connection in the other direction either: {_said(error)}")
        self.listener.take(peer, pipe)
        return Message(b"")

    async def _proven_at(self, peer: str, seen_at: str) -> Sequence[str]:
        """The multiaddrs at which libp2p has proven the peer's identity. At that peer's request only these are dialled,
        so that no peer can make this one dial a third party."""
        return [seen_at] if not leads_over_a_relay(seen_at) else await self._found_at(peer)

    # -- connecting

    def _connect_more(self, peer: str, way: Way) -> None:
        """Start an attempt to open the direct connections that the path still needs, unless an attempt is under way or
        failed a short time ago."""
        first, now = not way.fit(), self._clock()
        if way.missing > 0 and now >= way.retry_at and way.attempt is None and not self._closing:
            if first:
                way.patient_until = now + PATIENCE_PART * self._streams.limits.connect_timeout_s
            way.attempt = start(self._attempt(peer, way, 1 if first else way.missing), self._tasks)

    async def _attempt(self, peer: str, way: Way, count: int) -> None:
        """Open so many connections at the same time."""
        try:
            outcomes = await asyncio.gather(*(self._connect(peer) for _ in range(count)), return_exceptions=True)
            errors = [error for error in outcomes if error is not None]
            for error in errors:
                if not isinstance(error, _FAILURES):
                    log.error("no direct connection to %s could be made", peer, exc_info=error)
            if errors and way.connections:
                way.retry_at = self._clock() + RETRY_S
                log.debug("%d further connections to %s could not be made: %r", len(errors), peer, errors[0])
            elif errors:
                self.failed(peer, _said(errors[0]))
        finally:
            way.attempt = None

    async def _connect(self, peer: str) -> None:
        """Open a direct connection to the other peer: dial that peer; if this fails, ask it to dial this peer."""
        trouble: Exception
        try:
            offer, seen_at = await asyncio.wait_for(self._ask(peer, b""), DIAL_S)
        except Refusal as refusal:
            trouble = refusal
        else:
            try:
                at = (seen_at, *self._addresses(peer))
                pipe = await dial(self._tls, peer, Offer.unpack(offer), at, sends=True, timeout_s=DIAL_S)
                self._keep(peer, pipe)
                return
            except _FAILURES as error:
                trouble = error
        if (mine := self.listener.offer(peer, sends=True)) is None:
            raise trouble
        await asyncio.wait_for(self._ask(peer, mine.pack()), 2 * DIAL_S)

    async def _ask(self, peer: str, request: bytes) -> tuple[bytes, str]:
        """Send a request for a direct connection over libp2p; returns the answer, and the multiaddr at which the peer
        was found."""
        pipe, seen_at = await self._open_stream(peer)
        frames = self._streams.frames(peer, pipe)
        try:
            frames.write(Message(request))
            return await frames.answer(self._streams.limits.read_timeout_s), seen_at
        finally:
            pipe.abort()

    def _keep(self, peer: str, pipe: Pipe) -> None:
        """Keep a new direct connection, on which this peer will send payloads. Either end may have dialled it."""
        way = self._way(peer)
        way.fit()
        if self._closing or self._streams.closing or way.missing <= 0:
            pipe.abort()
            return
        way.add(self._streams.outgoing(peer, pipe, DIRECT))
        self._used(peer)
        in_use = [way for way in self._ways.values() if way.fit()]  # connections to peers that are gone are dropped
        for unused in in_use[:-OPEN_MAX]:
            unused.drop_all()

    def _used(self, peer: str) -> None:
        self._ways[peer] = self._ways.pop(peer)  # keeps the ways in the order of their last use

    # -- inside

    def _way(self, peer: str) -> Way:
        way = self._ways.get(peer)
        if way is None:
            if len(self._ways) >= PEERS_COUNTED_MAX:
                unused = (p for p, w in self._ways.items() if not w.attempt and all(one.ended for one in w.connections))
                if (forgotten := next(unused, None)) is not None:
                    del self._ways[forgotten]
            way = self._ways[peer] = Way()
        return way


def _said(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "it took too long"
    return (isinstance(error, OSError) and error.strerror) or str(error) or repr(error)
