"""The listening end of direct connections: its sockets, the certificate that it shows, and its offers, which it makes
over libp2p, each with a ticket that a dialling peer must show.

Law: a connection costs next to nothing before it has shown a ticket. While no ticket is valid, every connection is
closed at once. The number of handshakes and their duration are limited. From a connection that has not shown a ticket,
only 41 bytes are read, and they are not parsed. A ticket works once; it proves that the dialler is the peer to which
the offer was made.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import msgpack

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.shares import Groups, has_room, no_groups
from p2p_diloco.net.streams import start
from p2p_diloco.net.tls import Certificate, Connection

CERTIFICATE_BYTES_MAX = 4096
PORTS_MAX = 8
TICKET_LIFE_S = 30.0
"""How long an unused ticket is valid."""
TICKETS_MAX = 1024
TICKETS_PER_PEER_MAX = 8

_NUMBER_BYTES, _SECRET_BYTES = 8, 32
TICKET_BYTES = _NUMBER_BYTES + _SECRET_BYTES


class OfferError(ValueError):
    """Raised for bytes that are no valid offer."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a peer needs for dialling the peer that made this offer. `ports` are pairs (IP version, TCP port), the same
    at all addresses of that peer; `certificate` is in DER."""

    ports: tuple[tuple[int, int], ...]
    certificate: bytes
    ticket: bytes

    def pack(self) -> bytes:
        return bytes(msgpack.packb({"ports": self.ports, "certificate": self.certificate, "ticket": self.ticket}))

    @classmethod
    def unpack(cls, data: bytes) -> Offer:
        """Decode an offer that `pack` encoded.

        Raises:
            OfferError: these bytes are no offer.
        """
        try:
            content = msgpack.unpackb(data)
        except (ValueError, msgpack.UnpackException) as error:
            raise OfferError(f"an offer can't be read: {error}") from None
        match content:
            case {"ports": list(ports), "certificate": bytes(certificate), "ticket": bytes(ticket)} if (
                0 < len(ports) <= PORTS_MAX
                and 0 < len(certificate) <= CERTIFICATE_BYTES_MAX
                and len(ticket) == TICKET_BYTES
            ):
                return cls(tuple(map(_port, ports)), certificate, ticket)
        raise OfferError("an offer lacks a field, or a field has a wrong type or length")


def _port(content: object) -> tuple[int, int]:
    match content:
        case [4 | 6 as version, int(port)] if 0 < port < 1 << 16 and not isinstance(port, bool):
            return version, port
    raise OfferError("an offer has a port that is no (IP version, port)")


class Tickets:
    """Makes tickets and checks them. A ticket is valid until it is used or has expired. `clock` returns the time in
    seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[bytes, tuple[bytes, str, float]] = {}  # number -> secret, peer, expiry; oldest first

    def __bool__(self) -> bool:
        """Whether at least one ticket is valid."""
        self._forget_old()
        return bool(self._open)

    def draw(self, peer: str) -> bytes:
        """Make a new ticket for a peer. If there are too many, for this peer or in all, the oldest becomes invalid."""
        self._forget_old()
        theirs = [number for number, (_, owner, _) in self._open.items() if owner == peer]
        if len(theirs) >= TICKETS_PER_PEER_MAX:
            del self._open[theirs[0]]
        elif len(self._open) >= TICKETS_MAX:
            del self._open[next(iter(self._open))]
        number, secret = secrets.token_bytes(_NUMBER_BYTES), secrets.token_bytes(_SECRET_BYTES)
        self._open[number] = (secret, peer, self._clock() + TICKET_LIFE_S)
        return number + secret

    def redeem(self, ticket: bytes) -> str | None:
        """Use a ticket, which is a number and a secret. Returns the peer for which it was made, or None if it isn't
        valid. The ticket with this number is invalid from then on, even if the presented secret is wrong."""
        self._forget_old()
        number, presented = ticket[:_NUMBER_BYTES], ticket[_NUMBER_BYTES:]
        secret, peer, _ = self._open.pop(number, (bytes(_SECRET_BYTES), None, 0.0))
        right = hmac.compare_digest(secret, presented)
        return peer if right else None

    def _forget_old(self) -> None:
        now = self._clock()
        for number in [number for number, (_, _, until) in self._open.items() if until <= now]:
            del self._open[number]


log = logging.getLogger(__name__)

HANDSHAKE_S = 3.0
"""Deadline for a connection to show its ticket."""
HANDSHAKES_MAX = 64
"""The most connections that have not shown a ticket yet."""
CONNECTIONS_MAX = 256
"""The most connections on which other peers send."""
CONNECTIONS_PER_PEER_MAX = 8
TELL_EVERY_S = 60.0
"""Seconds between two log lines with the number of connections turned away."""

I_SEND, YOU_SEND = b"S", b"R"
"""Which end sends payloads: the dialler ("S"), or the listener ("R")."""
WELCOME = b"W"

_BACKLOG = 64
_PAUSE_S = 1.0


class Listener:
    """Accepts direct connections from peers that show a valid ticket.

    Args:
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
        hosts: Sequence[str],
        port: int,
        *,
        serve: Callable[[str, Pipe], Awaitable[None]],
        lend: Callable[[str, Pipe], None],
        groups: Groups = no_groups,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._groups = groups
        self._serve, self._lend = serve, lend
        self._certificate = Certificate()
        self._tickets = Tickets(self._loop.time)
        self._sockets: list[socket.socket] = []
        self._greeting: set[asyncio.Task[None]] = set()
        self._serving: dict[Pipe, str] = {}
        self._told_at, self._untold = -TELL_EVERY_S, 0
        self.turned_away = 0
        """How many connections were closed because they showed no valid ticket, or because there were too many."""
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

    def offer(self, peer: str) -> Offer | None:
        """Make an offer with which `peer` may open one connection to this peer; None if this peer doesn't listen."""
        if not self._sockets:
            return None
        return Offer(self.ports, self._certificate.der, self._tickets.draw(peer))

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
        if not self._tickets or len(self._greeting) >= HANDSHAKES_MAX:
            sock.close()
            self._turn_away("no ticket is valid" if not self._tickets else "too many at once")
            return
        task = start(self._greet(sock), self._greeting)
        task.add_done_callback(lambda task: sock.close() if task.cancelled() else None)  # perhaps before it began

    def _listen_again(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    async def _greet(self, sock: socket.socket) -> None:
        """Wait until a new connection has shown a valid ticket; then let this peer send payloads on the connection, or
        receive them from it."""
        try:
            sock.setblocking(False)
            peer, role, pipe = await asyncio.wait_for(self._proved(sock), HANDSHAKE_S)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            sock.close()
            self._turn_away(str(error) or "it took too long")
            return
        if not self._sockets:  # before Python 3.12, `wait_for` may lose the cancellation by `end`
            pipe.abort()
        elif role == YOU_SEND:
            self._lend(peer, pipe)
        else:
            self._serving[pipe] = peer
            serving = asyncio.ensure_future(self._serve(peer, pipe))
            serving.add_done_callback(lambda _: self._serving.pop(pipe, None))

    async def _proved(self, sock: socket.socket) -> tuple[str, bytes, Pipe]:
        """Do the listener's part of the handshake, and check the ticket that the connection shows; returns the peer,
        the byte that says which end sends payloads, and the pipe."""
        reader, writer = await self._certificate.accept(sock)
        try:
            hello = await reader.readexactly(TICKET_BYTES + 1)
            peer, role = self._tickets.redeem(hello[:TICKET_BYTES]), hello[TICKET_BYTES:]
            if peer is None or role not in (I_SEND, YOU_SEND):
                raise PermissionError("no valid ticket")
            if role == I_SEND and not self._has_room(peer):
                raise PermissionError("too many connections")
            writer.write(WELCOME)
            return peer, role, await Pipe.adopt(reader, writer)
        except BaseException:
            writer.transport.abort()
            raise

    def _has_room(self, peer: str) -> bool:
        holders = Counter(self._serving.values())
        return holders[peer] < CONNECTIONS_PER_PEER_MAX and has_room(peer, holders, CONNECTIONS_MAX, self._groups)

    def _turn_away(self, why: str) -> None:
        self.turned_away += 1
        self._untold += 1
        log.debug("a direct connection was turned away: %s", why)
        if self._loop.time() - self._told_at >= TELL_EVERY_S:
            log.info("turned away %d direct connections; the reason for the last one: %s", self._untold, why)
            self._told_at, self._untold = self._loop.time(), 0


async def present(connection: Connection, ticket: bytes, role: bytes) -> Pipe:
    """Do the dialling end's part of the handshake: show the ticket, say which end sends payloads, and wait for the
    welcome.

    Raises:
        OSError: the listener did not accept the connection.
    """
    reader, writer = connection
    try:
        writer.write(ticket + role)
        if await reader.read(len(WELCOME)) != WELCOME:
            raise PermissionError("the listener did not accept the connection")
        return await Pipe.adopt(reader, writer)
    except BaseException:
        writer.transport.abort()
        raise
