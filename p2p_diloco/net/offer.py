"""The offer of a direct connection, which one peer makes to another over libp2p.

Law: does no I/O, but draws random numbers. An offer holds the ports on which its maker listens, the certificate that
the maker shows there, and a ticket. The ticket works once; it proves that the dialler is the peer to which the offer
was made.
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
