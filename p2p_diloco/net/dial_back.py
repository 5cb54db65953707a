"""Dials a peer back at its request, to tell it whether other peers can reach it.

Law: only the IP address from which a peer's request came is dialled, so that no peer can make others dial a third
party. The number of its ports is limited, because other machines may share the address. At a router's address, a
listener that answers counts only if it proves to be the peer: it may be another machine behind the router.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from ipaddress import ip_address

from p2p_diloco.addresses import ip_protocol, leads_over_a_relay
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.net.probing import visiting
from p2p_diloco.net.reasons import no_answer

DIAL_S = 2.0
"""Deadline for a plain dial."""
START_S = 5.0
"""Deadline for starting a daemon."""
ADDRESSES_MAX, NAMES_MAX = 8, 2
"""The most addresses of a peer that are used, and the most of these that hold a name instead of an IP address."""

PORTS_MAX, PORTS_S = 256, 600.0
"""PORTS_MAX: the most ports of one IP address that are dialled at other peers' request within PORTS_S seconds."""
HOSTS_MAX = 1024
"""The most IP addresses whose ports are counted."""

Place = tuple[str, int]
"""An IP address and a TCP port."""


class PortBudget:
    """Counts the ports that this peer dials at other peers' request. Without a limit, a peer could use this one to
    scan the ports of a machine, or of all machines behind a router. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._dialled: dict[str, dict[int, float]] = {}  # IP address -> port -> when it was dialled first

    def spend(self, places: Collection[Place]) -> bool:
        """Count these places as dialled. False: too many ports were dialled already at one of their IP addresses."""
        now = self._clock()
        for host, port in places:
            ports = {p: since for p, since in self._dialled.pop(host, {}).items() if now - since < PORTS_S}
            self._dialled[host] = ports
            if port not in ports:
                if len(ports) >= PORTS_MAX:
                    return False
                ports[port] = now
        while len(self._dialled) > HOSTS_MAX:
            del self._dialled[next(iter(self._dialled))]
        return True


async def dial_back(
    peer: str, seen_at: str, addresses: Sequence[str], budget: PortBudget
) -> dict[str, str | None] | None:
    """Dial a peer at those of its addresses that lead to the IP address in `seen_at`, the multiaddr from which the peer
    asks. If no address has that IP address, the IP address is assumed to be a router's, and each of the peer's ports is
    dialled there.

    Returns for each address the reason why the peer can't be reached there, or None if it was reached; nothing if
    `seen_at` has no IP address. If the dials would exceed the budget, nothing is dialled, and the result is None.
    """
    seen = place_of(seen_at)
    if seen is None:
        return {}
    addresses = list(addresses)[:ADDRESSES_MAX]
    names = [address for address in addresses if _is_name(address)][:NAMES_MAX]
    found = {address: [place] for address in addresses if (place := place_of(address)) is not None}
    found |= zip(names, await asyncio.gather(*map(_resolved, names)), strict=True)
    reached: dict[str, str | None] = {}
    dialled: dict[Place, str] = {}
    for address, at in found.items():
        if here := [place for place in at if place[0] == seen[0]]:
            dialled[here[0]] = address
        elif at:
            reached[address] = f"it isn't at {seen[0]}, where this peer is seen"
    ports = places(addresses)
    if translated := seen[0] not in {host for host, _ in ports}:  # a router may forward the same port
        for port in sorted({port for _, port in ports}):
            dialled.setdefault((seen[0], port), f"/{ip_protocol(seen[0])}/{seen[0]}/tcp/{port}/p2p/{peer}")
    if not budget.spend(dialled):
        return None
    outcomes = await asyncio.gather(*(_dial(peer, place, translated) for place in dialled))
    return {**reached, **dict(zip(dialled.values(), outcomes, strict=True))}


def place_of(address: str) -> Place | None:
    """The IP address and TCP port of a multiaddr; None if the multiaddr lacks one of them, or leads through a relay."""
    match address.split("/"):
        case ["", "ip4" | "ip6", host, "tcp", port, *_] if _is_port(port) and not leads_over_a_relay(address):
            try:
                return str(ip_address(host)), int(port)
            except ValueError:
                return None
    return None


def places(addresses: Iterable[str]) -> set[Place]:
    """The IP address and TCP port of each of these multiaddrs. Multiaddrs that lack an IP address or a port are left
    out."""
    return {place for place in map(place_of, addresses) if place is not None}


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 1 << 16


def _is_name(address: str) -> bool:
    match address.split("/"):
        case ["", "dns" | "dns4" | "dns6", _, "tcp", port, *_]:
            return _is_port(port) and not leads_over_a_relay(address)
    return False


async def _resolved(address: str) -> list[Place]:
    """Resolve the host name in a multiaddr; returns its IP addresses, each with the multiaddr's port. Empty if the name
    has none."""
    _, _, name, _, port, *_ = address.split("/")
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.wait_for(loop.getaddrinfo(name, int(port), type=socket.SOCK_STREAM), DIAL_S)
    except (OSError, ValueError, asyncio.TimeoutError):  # ValueError: no name that can be asked for
        return []
    return [(str(there[0]), int(port)) for *_, there in found]


async def _dial(peer: str, place: Place, translated: bool) -> str | None:
    """Dial a peer at a place; returns None if the peer answers, else the reason why it can't be reached there.
    `translated`: the place is a router's, where the peer must also prove its identity."""
    why = await no_answer(*place, DIAL_S)
    return await _proved(peer, place) if why is None and translated else why


async def _proved(peer: str, place: Place) -> str | None:
    """Dial a peer with a new daemon, whose handshake checks the peer's identity; returns None, or the reason of a
    failure. This peer's own daemon would not dial: it would use the connection that it has already."""
    host, port = place
    try:
        async with visiting((), start_s=START_S) as (daemon, _):
            return await daemon.greet(f"/{ip_protocol(host)}/{host}/tcp/{port}/p2p/{peer}")
    except P2PDilocoError as error:
        return f"can't be checked: {error}"
