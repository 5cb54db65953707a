"""What two peers tell each other, over libp2p, before one connects to the other directly.

Law: sans-I/O, but for drawing random numbers. An offer says where its maker listens, which certificate it shows there,
and the ticket that proves, once, that whoever presents it is the peer that the offer was made to.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

CERTIFICATE_BYTES_MAX = 4096
PORTS_MAX = 8
TICKET_LIFE_S = 30.0
"""How long a ticket may lie unused."""
TICKETS_MAX = 1024
TICKETS_PER_PEER_MAX = 8

_NUMBER_BYTES, _SECRET_BYTES = 8, 32
TICKET_BYTES = _NUMBER_BYTES + _SECRET_BYTES


class OfferError(ValueError):
    """What came is no offer."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A way in. `ports`: (IP version, TCP port), on every host that the peer is known at."""

    ports: tuple[tuple[int, int], ...]
    certificate: bytes
    """In DER."""
    ticket: bytes

    def pack(self) -> bytes:
        """The offer's bytes."""
        return bytes(msgpack.packb({"ports": self.ports, "certificate": self.certificate, "ticket": self.ticket}))

    @classmethod
    def unpack(cls, data: bytes) -> Offer:
        """What `pack` wrote.

        Raises:
            OfferError: it is anything else.
        """
        try:
            content = msgpack.unpackb(data)
        except (ValueError, msgpack.UnpackException) as error:
            raise OfferError(f"no offer: {error}") from None
        match content:
            case {"ports": list(ports), "certificate": bytes(certificate), "ticket": bytes(ticket)} if (
                0 < len(ports) <= PORTS_MAX
                and 0 < len(certificate) <= CERTIFICATE_BYTES_MAX
                and len(ticket) == TICKET_BYTES
            ):
                return cls(tuple(map(_port, ports)), certificate, ticket)
        raise OfferError("no offer")


def _port(content: object) -> tuple[int, int]:
    match content:
        case [4 | 6 as version, int(port)] if 0 < port < 1 << 16 and not isinstance(port, bool):
            return version, port
    raise OfferError("no port in an offer")


class Tickets:
    """The tickets that were handed out and not used yet. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[bytes, tuple[bytes, str, float]] = {}  # by number, oldest first: secret, peer, until when

    def __bool__(self) -> bool:
        """Whether anybody may still come with one."""
        self._forget_old()
        return bool(self._open)

    def draw(self, peer: str) -> bytes:
        """A new ticket for a peer; its oldest goes if it has too many."""
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
        """The peer that a ticket was drawn for, or None. It is used up, whether its secret is right or not."""
        self._forget_old()
        number, presented = ticket[:_NUMBER_BYTES], ticket[_NUMBER_BYTES:]
        secret, peer, _ = self._open.pop(number, (bytes(_SECRET_BYTES), None, 0.0))
        right = hmac.compare_digest(secret, presented)
        return peer if right else None

    def _forget_old(self) -> None:
        now = self._clock()
        for number in [number for number, (_, _, until) in self._open.items() if until <= now]:
            del self._open[number]
