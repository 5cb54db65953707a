"""Dialling a peer back, to tell it whether other peers can reach it.

Law: only the address from which the peer's request came is dialled, so that no peer can send another one's dials
elsewhere. An answering listener counts only if it is that peer: behind a router it may be a neighbour.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Sequence

from p2p_diloco.net.greeting import no_answer
from p2p_diloco.net.hivemind_library import P2P, Multiaddr, P2PDaemonError, PeerID
from p2p_diloco.net.reasons import likely_reason

DIAL_S = 2.0
"""Deadline for a plain dial."""
START_S = 5.0
"""Deadline for starting a daemon."""
ADDRESSES_MAX = 8
"""The most addresses of a peer that are looked at."""

Place = tuple[str, int]
"""An IP address and a TCP port."""


async def dial_back(peer: str, seen_at: str, addresses: Sequence[str]) -> dict[str, str | None]:
    """Dial a peer at those of its addresses that lie at the place it is `seen_at`, and at its ports there.

    Returns for each address the reason why it can't be reached there; None: it was reached.
    """
    seen = place_of(seen_at)
    if seen is None:
        return {}
    reached: dict[str, str | None] = {}
    dialled: dict[Place, str] = {}
    addresses = list(addresses)[:ADDRESSES_MAX]
    translated = seen[0] not in {place[0] for place in map(place_of, addresses) if place is not None}
    for address in addresses:
        if (place := await _resolved(address)) is None:
            continue
        if place[0] == seen[0]:
            dialled[place] = address
        else:
            reached[address] = f"it isn't at {seen[0]}, where this peer is seen"
    if translated:  # a router may forward the same port
        for port in {place[1] for place in map(place_of, addresses) if place is not None}:
            dialled.setdefault((seen[0], port), f"/ip{_version(seen[0])}/{seen[0]}/tcp/{port}/p2p/{peer}")
    outcomes = await asyncio.gather(*(_dial(peer, place, translated) for place in dialled))
    return {**reached, **dict(zip(dialled.values(), outcomes, strict=True))}


def place_of(address: str) -> Place | None:
    """The IP address and TCP port of a multiaddr; None if it has none."""
    match address.split("/"):
        case ["", "ip4" | "ip6", host, "tcp", port, *rest] if port.isdigit() and "p2p-circuit" not in rest:
            return host, int(port)
    return None


async def _resolved(address: str) -> Place | None:
    """`place_of` for addresses with names, too."""
    match address.split("/"):
        case ["", "dns" | "dns4" | "dns6", name, "tcp", port, *rest] if port.isdigit() and "p2p-circuit" not in rest:
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                found = await asyncio.wait_for(loop.getaddrinfo(name, int(port), type=socket.SOCK_STREAM), DIAL_S)
                return str(found[0][4][0]), int(port)
            return None
    return place_of(address)


def _version(host: str) -> int:
    return 6 if ":" in host else 4


async def _dial(peer: str, place: Place, translated: bool) -> str | None:
    """The reason why the peer can't be reached at a place; None: it was reached."""
    why = await no_answer(*place, DIAL_S)
    return await _proved(peer, place) if why is None and translated else why


async def _proved(peer: str, place: Place) -> str | None:
    """Dial with a new daemon, whose handshake checks the peer's identity: this peer's own daemon would use the
    connection that it has."""
    host, port = place
    address = Multiaddr(f"/ip{_version(host)}/{host}/tcp/{port}")
    try:
        daemon = await P2P.create(
            no_listen=True,
            dht_mode="client",
            use_relay=False,
            nat_port_map=False,
            auto_nat=False,
            startup_timeout=START_S,
        )
    except P2PDaemonError as error:
        return f"can't be checked: {likely_reason(error)}"
    try:
        await asyncio.wait_for(daemon._client.connect(PeerID.from_base58(peer), [address]), DIAL_S)
    except asyncio.TimeoutError:
        return "timed out"
    except (P2PDaemonError, OSError, asyncio.IncompleteReadError, ValueError) as error:
        return likely_reason(error)
    finally:
        await daemon.shutdown()
    return None


def places(addresses: Iterable[str]) -> set[Place]:
    """The places of these multiaddrs; those that have none are left out."""
    return {place for place in map(place_of, addresses) if place is not None}
