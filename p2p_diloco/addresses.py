"""Multiaddrs as users paste them: read, judged, ordered.

Law: text in, text or an `AddressError` out. Nothing is resolved or dialled, and nothing but the standard
library is imported, so that a mistyped address is known before anything heavy is loaded. (The grammar:
multiformats.io/multiaddr.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from p2p_diloco.errors import AddressError

EXAMPLE = "/ip4/203.0.113.5/tcp/31337/p2p/Qm..."

_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_PORTS = ("tcp", "udp")
_BARE = ("quic", "quic-v1", "ws", "wss", "tls", "noise", "p2p-circuit", "webtransport")
_PEER_ID = re.compile(r"Qm[1-9A-HJ-NP-Za-km-z]{44}|12D3KooW[1-9A-HJ-NP-Za-km-z]{44}|b[a-z2-7]{50,}")
_DNS_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_-]+)*\.?")


def split_addresses(texts: str | Iterable[str]) -> tuple[str, ...]:
    """The single addresses of one or several texts that use spaces, commas or line ends between them."""
    joined = texts if isinstance(texts, str) else " ".join(texts)
    return tuple(dict.fromkeys(part for part in re.split(r"[\s,]+", joined) if part))


def check_peer_address(address: str, *, key: str = "initial_peers") -> str:
    """The address, if it names a host, a port and a peer to dial.

    Raises:
        AddressError: it can't be read, or it names no peer.
    """
    parts = _parts(address, key)
    if not any(protocol == "p2p" for protocol, _ in parts):
        raise _unreadable(
            address, "names no peer", key, "add the /p2p/... that the bootstrap's join line ends with"
        )
    if any(protocol in _PORTS and value == "0" for protocol, value in parts):
        raise _unreadable(address, "has port 0", key, "give the port that the peer listens on")
    return address


def check_listen_address(address: str, *, key: str = "host_maddrs") -> str:
    """The address, if one can listen there: a host and a port (0 lets the system choose one), and no peer.

    Raises:
        AddressError: it can't be read, or it names a peer.
    """
    parts = _parts(address, key)
    if any(protocol == "p2p" for protocol, _ in parts):
        raise _unreadable(address, "names a peer", key, "leave out /p2p/...: this is where to listen")
    if parts[0][0] not in ("ip4", "ip6") or not any(protocol in _PORTS for protocol, _ in parts):
        raise _unreadable(address, "is no place to listen", key, "write it like /ip4/0.0.0.0/tcp/31337")
    return address


def host(address: str) -> str:
    """The host part of an address: an IP address or a name."""
    pieces = address.split("/")
    return pieces[2] if len(pieces) > 2 else ""


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    name = host(address)
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def by_reach(addresses: Sequence[str]) -> list[str]:
    """The addresses ordered by who can reach them: the whole internet, then the local network, then this
    machine.
    """

    def distance(address: str) -> int:
        try:
            place = ip_address(host(address))
        except ValueError:
            return 2 if is_loopback(address) else 0
        return 2 if place.is_loopback else 0 if place.is_global else 1

    return sorted(addresses, key=distance)


def _parts(address: str, key: str) -> list[tuple[str, str]]:
    """The address as (protocol, value) pairs, each of them checked."""
    as_written = f"write it like {EXAMPLE}"
    if not address.startswith("/"):
        raise _unreadable(address, "is no multiaddr", key, as_written)
    pieces = address.removesuffix("/").split("/")[1:]
    parts: list[tuple[str, str]] = []
    while pieces:
        protocol = pieces.pop(0)
        if protocol in _BARE:
            parts.append((protocol, ""))
            continue
        if protocol not in (*_HOSTS, *_PORTS, "p2p", "ipfs"):
            raise _unreadable(address, f"has the unknown part {protocol!r}", key, as_written)
        if not pieces:
            raise _unreadable(address, f"ends after /{protocol}", key, as_written)
        value = pieces.pop(0)
        if not _fits(protocol, value):
            raise _unreadable(address, f"has an unreadable /{protocol}/{value}", key, as_written)
        parts.append(("p2p" if protocol == "ipfs" else protocol, value))
    if not parts or parts[0][0] not in (*_HOSTS, "p2p"):
        raise _unreadable(address, "names no host", key, as_written)
    has_port = any(protocol in _PORTS for protocol, _ in parts)
    if parts[0][0] != "dnsaddr" and parts[0][0] != "p2p" and not has_port:
        raise _unreadable(address, "names no port", key, as_written)
    return parts


def _fits(protocol: str, value: str) -> bool:
    match protocol:
        case "ip4" | "ip6":
            try:
                return ip_address(value).version == int(protocol[2])
            except ValueError:
                return False
        case "tcp" | "udp":
            return value.isdecimal() and len(value) <= 5 and int(value) <= 65535
        case "p2p" | "ipfs":
            return _PEER_ID.fullmatch(value) is not None
        case _:
            return _DNS_NAME.fullmatch(value) is not None


def _unreadable(address: str, wrong: str, key: str, mend: str) -> AddressError:
    return AddressError(wrong, key=key, value=address, mend=mend)
