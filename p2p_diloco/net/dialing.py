"""Dials another peer directly, and decides at which addresses and in which order.

Law: begins with an offer and ends with a connection that the listener has accepted. It neither asks for offers nor
keeps connections.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from functools import partial

from p2p_diloco.addresses import leads_over_a_relay
from p2p_diloco.net.attempts import first
from p2p_diloco.net.listener import present
from p2p_diloco.net.offer import Offer
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.tls import connect

STAGGER_S = 0.25
"""Seconds after which the next address is tried as well, while the present one has not answered."""
PLACES_MAX = 8
"""The most addresses of a peer that are tried."""


async def dial(offer: Offer, addresses: Iterable[str], role: bytes, timeout_s: float) -> Pipe:
    """Connect to the peer that made the offer, at one of these multiaddrs, and show that peer the offer's ticket.
    `role`: which end will send payloads, `I_SEND` or `YOU_SEND` of `listener`.

    Raises:
        OSError: no address accepted the connection; the error is the last address's. asyncio.TimeoutError: no address
        accepted it in time.
    """
    places = places_of(offer.ports, addresses)
    if not places:
        raise OSError("this peer knows no direct address of the other peer")

    async def attempt(host: str, port: int, family: int) -> Pipe:
        return await present(await connect(host, port, family, offer.certificate), offer.ticket, role)

    attempts = [partial(attempt, *place) for place in places]
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
