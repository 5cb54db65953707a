"""The listening end of direct connections: its sockets, and its offers, which it makes over libp2p, each with a knock
that a dialling peer must send first.

Law: a connection costs next to nothing before it has knocked. While no knock is valid, every connection is closed at
once. The number of handshakes and their duration are limited. 32 bytes are read before TLS begins, and they are not
parsed. A knock is good once. It proves nothing, because it can be read on its way: TLS proves who the other end is.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.framing import FrameError
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.shares import Groups, has_room, no_groups
from p2p_diloco.net.streams import start
from p2p_diloco.net.tls import Tls

PORTS_MAX = 8
KNOCK_BYTES = 32
KNOCK_LIFE_S = 30.0
"""How long an unused knock is valid."""
KNOCKS_MAX = 1024
KNOCKS_PER_PEER_MAX = 8

_PORT = struct.Struct(">BH")


@dataclass(frozen=True, slots=True)
class Offer:
    """What a peer needs for dialling the peer that made this offer. `ports` are pairs (IP version, TCP port), the same
    at all addresses of that peer."""

    ports: tuple[tuple[int, int], ...]
    knock: bytes

    def pack(self) -> bytes:
        return self.knock + b"".join(_PORT.pack(*port) for port in self.ports)

    @classmethod
    def unpack(cls, data: bytes) -> Offer:
        """Decode an offer that `pack` encoded.

        Raises:
            FrameError: these bytes are no offer.
        """
        knock, ports = data[:KNOCK_BYTES], data[KNOCK_BYTES:]
        if not 0 < len(ports) <= PORTS_MAX * _PORT.size or len(ports) % _PORT.size:
            raise FrameError("an offer has another length")
        offer = cls(tuple((version, port) for version, port in _PORT.iter_unpack(ports)), knock)
        if not all(version in (4, 6) and port for version, port in offer.ports):
            raise FrameError("an offer has a port that is no (IP version, port)")
        return offer


class Knocks:
    """Makes knocks and takes them. A knock is valid until it is used or has expired. `clock` returns the time in
    seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[bytes, tuple[str, bool, float]] = {}  # knock -> peer, who sends, expiry; oldest first

    def __bool__(self) -> bool:
        """Whether at least one knock is valid."""
        self._forget_old()
        return bool(self._open)

    def draw(self, peer: str, *, sends: bool) -> bytes:
        """Make a new knock for a peer. `sends`: whether this peer will send on the connection. If there are too many,
        for the peer or in all, the oldest becomes invalid."""
        self._forget_old()
        theirs = [knock for knock, (owner, _, _) in self._open.items() if owner == peer]
        if len(theirs) >= KNOCKS_PER_PEER_MAX:
            del self._open[theirs[0]]
        elif len(self._open) >= KNOCKS_MAX:
            del self._open[next(iter(self._open))]
        knock = secrets.token_bytes(KNOCK_BYTES)
        self._open[knock] = peer, sends, self._clock() + KNOCK_LIFE_S
        return knock

    def use(self, knock: bytes) -> tuple[str, bool] | None:
        """The peer for which a knock was made, and whether this peer sends; None if it isn't valid. A used knock is no
        longer valid."""
        self._forget_old()
        peer, sends, _ = self._open.pop(knock, ("", False, 0.0))
        return (peer, sends) if peer else None

    def _forget_old(self) -> None:
        now = self._clock()
        for knock in [knock for knock, (_, _, until) in self._open.items() if until <= now]:
            del self._open[knock]


log = logging.getLogger(__name__)

HANDSHAKE_S = 3.0
"""Deadline for a connection's knock and its TLS handshake."""
HANDSHAKES_MAX = 64
"""The most connections whose handshake has not ended yet."""
CONNECTIONS_MAX = 256
"""The most connections on which other peers send."""
CONNECTIONS_PER_PEER_MAX = 9
"""One more than a peer uses, because this end may not have noticed yet that an earlier one has ended."""
TELL_EVERY_S = 60.0
"""Seconds between two log lines with the number of connections turned away."""

_BACKLOG = 64
_PAUSE_S = 1.0


class Listener:
    """Accepts direct connections from peers that send a valid knock.

    Args:
        tls: makes sure who the other end is.
        hosts: the IP addresses to listen on.
        port: the port to listen on. With 0 the system chooses ports, and an address that can't be listened on is logged
            and left out.
        serve: receives payloads on a connection on which the other peer sends.
        lend: called with each connection on which this peer may send.
        groups: returns the grant by which a peer was admitted; None in an open run.

    Raises:
        ConfigError: the port can't be listened on.
    """

    def __init__(
        self,
        tls: Tls,
        hosts: Sequence[str],
        port: int,
        *,
        serve: Callable[[str, Pipe], Awaitable[None]],
        lend: Callable[[str, Pipe], None],
        groups: Groups = no_groups,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._tls, self._groups = tls, groups
        self._serve, self._lend = serve, lend
        self._knocks = Knocks(self._loop.time)
        self._sockets: list[socket.socket] = []
        self._greeting: set[asyncio.Task[None]] = set()
        self._serving: dict[Pipe, str] = {}
        self._told_at, self._untold = -TELL_EVERY_S, 0
        self.turned_away = 0
        """How many connections were closed because their handshake failed, or because there were too many."""
        self._listen(hosts, port)

    def _listen(self, hosts: Sequence[str], port: int) -> None:
        for host in dict.fromkeys(hosts):
            family = socket.AF_INET if ip_address(host).version == 4 else socket.AF_INET6
            try:
                sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            except OSError as error:
                if port:
                    self.end()
                    mend = "choose another port, or 0 to let the system choose"
                    wrong = f"can't be listened on ({error})"
                    raise ConfigError(wrong, key="direct_port", value=port, mend=mend) from None
                log.warning("can't listen for direct connections on %s: %s", host, error)
                continue
            sock.setblocking(False)
            self._sockets.append(sock)
            self._loop.add_reader(sock, self._accept, sock)

    @property
    def ports(self) -> tuple[tuple[int, int], ...]:
        """The IP version and the port of each listening socket."""
        return tuple((4 if s.family == socket.AF_INET else 6, int(s.getsockname()[1])) for s in self._sockets)

    def offer(self, peer: str, *, sends: bool) -> Offer | None:
        """Make an offer with which `peer` may dial this peer once; None if this peer doesn't listen. `sends`: whether
        this peer will send payloads on the connection, and not receive them."""
        return Offer(self.ports, self._knocks.draw(peer, sends=sends)) if self._sockets else None

    def take(self, peer: str, pipe: Pipe) -> None:
        """Let a proven peer send payloads on a connection. Either end may have dialled it."""
        if not self.has_room(peer):
            pipe.abort()
            self._turn_away("too many connections")
            return
        self._serving[pipe] = peer
        serving = asyncio.ensure_future(self._serve(peer, pipe))
        serving.add_done_callback(lambda _: self._serving.pop(pipe, None))

    def end(self) -> None:
        """Close the listening sockets, the connections that are in their handshake, and those on which other peers
        send."""
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self._sockets.clear()
        for task in self._greeting:
            task.cancel()
        for pipe in list(self._serving):
            pipe.abort()

    async def ended(self) -> None:
        """Wait until all handshakes have ended."""
        await asyncio.gather(*self._greeting, return_exceptions=True)

    # -- inside

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                log.warning("new direct connections are not accepted for a moment: %s", error)
                self._loop.remove_reader(listening)
                self._loop.call_later(_PAUSE_S, self._listen_again, listening)
            return
        if not self._knocks or len(self._greeting) >= HANDSHAKES_MAX:
            sock.close()
            self._turn_away("no knock is valid" if not self._knocks else "too many at once")
            return
        task = start(self._greet(sock), self._greeting)
        task.add_done_callback(lambda task: sock.close() if task.cancelled() else None)  # perhaps before it began

    def _listen_again(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    async def _greet(self, sock: socket.socket) -> None:
        """Wait until a new connection has knocked and its peer is proven; then lend the connection to this peer for
        sending, or let the other peer send payloads on it."""
        try:
            sock.setblocking(False)
            peer, sends, pipe = await asyncio.wait_for(self._proved(sock), HANDSHAKE_S)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            sock.close()
            self._turn_away(str(error) or "it took too long")
            return
        if not self._sockets:  # before Python 3.12, `wait_for` may lose the cancellation by `end`
            pipe.abort()
        elif sends:
            self._lend(peer, pipe)
        else:
            self.take(peer, pipe)

    async def _proved(self, sock: socket.socket) -> tuple[str, bool, Pipe]:
        """Read the knock, and do the TLS handshake with the peer for which it was made; returns that peer, whether this
        peer sends on the connection, and the connection."""
        knock = b""
        while len(knock) < KNOCK_BYTES:  # and no byte more: those that follow may be TLS's
            if not (more := await self._loop.sock_recv(sock, KNOCK_BYTES - len(knock))):
                raise EOFError("it ended before it had knocked")
            knock += more
        if (known := self._knocks.use(knock)) is None:
            raise PermissionError("no valid knock")
        peer, sends = known
        return peer, sends, await self._tls.secured(sock, peer, server=sends)

    def has_room(self, peer: str) -> bool:
        """Whether a peer may have one more connection on which it sends."""
        holders = Counter(self._serving.values())
        return holders[peer] < CONNECTIONS_PER_PEER_MAX and has_room(peer, holders, CONNECTIONS_MAX, self._groups)

    def _turn_away(self, why: str) -> None:
        self.turned_away += 1
        self._untold += 1
        log.debug("a direct connection was turned away: %s", why)
        if self._loop.time() - self._told_at >= TELL_EVERY_S:
            log.info("turned away %d direct connections; the reason for the last one: %s", self._untold, why)
            self._told_at, self._untold = self._loop.time(), 0


async def knock_at(tls: Tls, place: tuple[str, int, int], knock: bytes, peer: str, *, sends: bool) -> Pipe:
    """Dial a peer that has offered this knock. `place`: host, port and address family; `sends`: whether this peer will
    send payloads on the connection. The caller sets the deadline, by cancelling this call.

    Raises:
        OSError: nobody accepted the connection, or it wasn't this peer.
    """
    host, port, family = place
    loop, sock = asyncio.get_running_loop(), socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, port))
        await loop.sock_sendall(sock, knock)
        return await tls.secured(sock, peer, server=sends)
    except BaseException:
        sock.close()
        raise
