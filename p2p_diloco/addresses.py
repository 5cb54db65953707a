"""Multiaddrs as text: reads, checks and sorts them, and takes them apart.

Law: works on text only: an address that can't be read raises `AddressError`, and none is resolved or dialled. The
`multiaddr` package, loaded on first use, checks each part; no heavier package is loaded, so that a mistyped address is
reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from p2p_diloco.errors import AddressError

EXAMPLE = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooW..."

_NAMES = ("dns", "dns4", "dns6", "dnsaddr")
_HOSTS = ("ip4", "ip6", *_NAMES)
_PORTS = ("tcp", "udp")
_HOST_PORT = re.compile(r"(?:\w+://)?(?:\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s/:,]+)):(?P<port>\d+)/?")


def split_addresses(texts: str | Iterable[str]) -> tuple[str, ...]:
    """Split one or several texts into single addresses. They are separated by spaces, commas or line ends."""
    joined = texts if isinstance(texts, str) else " ".join(texts)
    return tuple(dict.fromkeys(part for part in re.split(r"[\s,]+", joined) if part))


def check_peer_address(address: str, *, key: str = "initial_peers") -> str:
    """Check the address of a peer that is to be dialled, and return it. It must name a peer, a host and a port; but
    /p2p/... needs neither host nor port, and /dnsaddr/... no port.

    Raises:
        AddressError: the address can't be read, or it names no peer.
    """
    parts = _parts(address, key)
    if not any(protocol == "p2p" for protocol, _ in parts):
        raise _unreadable(address, "names no peer", key, "add the /p2p/... that the bootstrap's join line ends with")
    if any(protocol in _PORTS and value == "0" for protocol, value in parts):
        raise _unreadable(address, "has port 0", key, "give the port that the peer listens on")
    return address


def check_listen_address(address: str, *, key: str = "host_maddrs") -> str:
    """Check an address to listen on or to announce, and return it. It must name an IP address and a port, and no peer.
    With port 0 the system chooses a port.

    Raises:
        AddressError: the address can't be read, or it names a peer.
    """
    parts = _parts(address, key)
    if any(protocol == "p2p" for protocol, _ in parts):
        raise _unreadable(address, "names a peer", key, "leave out /p2p/...: it is this peer's own")
    as_written = "write it like /ip4/198.51.100.7/tcp/31337"
    if key == "host_maddrs":
        as_written = "write it like /ip4/0.0.0.0/tcp/31337"
    if parts[0][0] not in ("ip4", "ip6"):
        raise _unreadable(address, "names no IP address", key, as_written)
    if not any(protocol in _PORTS for protocol, _ in parts):
        raise _unreadable(address, "names no port", key, as_written)
    return address


def canonical(text: str, *, key: str = "initial_peers") -> str:
    """Check the multiaddr of a peer. Returns it in its canonical form, which names the peer by /p2p/<peer id>.

    Raises:
        AddressError: the text is no multiaddr of a peer; the error says what is wrong and how to mend it.
    """
    from multiaddr import Multiaddr

    parts = _parts(check_peer_address(text.strip(), key=key), key)
    return "".join(
        f"/{protocol}/{value}" if protocol in _NAMES else str(Multiaddr(f"/{protocol}/{value}".rstrip("/")))
        for protocol, value in parts
    )


def host(address: str) -> str:
    """The host part of an address: an IP address or a name; empty if the address has none."""
    pieces = address.split("/")
    return pieces[2] if len(pieces) > 2 else ""


def port_of(address: str) -> int:
    """The TCP or UDP port in an address; 0 if it has none."""
    pieces = address.split("/")
    return int(pieces[4]) if len(pieces) > 4 and pieces[4].isdecimal() else 0


def without_peer(address: str) -> str:
    """An address without the peer's id."""
    return address.partition("/p2p/")[0]


def peer_of(address: str) -> str:
    """The peer id that an address ends with."""
    return address.rpartition("/p2p/")[2]


def leads_over_a_relay(address: str) -> bool:
    """Whether an address leads to the peer through a relay (libp2p's circuit relay)."""
    return "p2p-circuit" in address.split("/")


def ip_protocol(host: str) -> str:
    """The multiaddr protocol of an IP address."""
    return "ip6" if ":" in host else "ip4"


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    return _distance(address) == 2


def by_reach(addresses: Sequence[str]) -> list[str]:
    """Sort addresses by the machines that can reach them: first addresses of the whole internet, then of the local
    network, then of this machine."""
    return sorted(addresses, key=_distance)


def listen_for(initial_peers: Sequence[str], *, ip6: bool) -> list[str]:
    """Choose the addresses to listen on: loopback if the addresses of all initial peers are loopback addresses, else
    all interfaces. The operating system chooses the port. A peer without initial peers founds a swarm, and listens on
    loopback. `ip6`: whether this machine has an IPv6 address."""
    if all(is_loopback(address) for address in initial_peers):
        over_ip6 = any(host(address) == "::1" for address in initial_peers)
        return ["/ip4/127.0.0.1/tcp/0", *(["/ip6/::1/tcp/0"] if over_ip6 else [])]
    return ["/ip4/0.0.0.0/tcp/0", *(["/ip6/::/tcp/0"] if ip6 else [])]


def _distance(address: str) -> int:
    """From where an address can be reached. 0: from the whole internet; 1: from the local network; 2: from this machine
    only."""
    name = host(address)
    try:
        place = ip_address(name)
    except ValueError:
        return 2 if name == "localhost" else 0
    return 2 if place.is_loopback else 0 if place.is_global else 1


def _parts(address: str, key: str) -> list[tuple[str, str]]:
    """Split an address into (protocol, value) pairs, and check each of them."""
    as_written = f"write it like {EXAMPLE}"
    if not address.startswith("/"):
        raise _no_multiaddr(address, key, as_written)
    pieces = iter(address.removesuffix("/").split("/")[1:])
    parts: list[tuple[str, str]] = []
    for piece in pieces:
        protocol = "p2p" if piece == "ipfs" else piece
        takes_value = _takes_value(protocol)
        if takes_value is None:
            raise _unreadable(address, f"has the unknown part {protocol!r}", key, as_written)
        value = next(pieces, None) if takes_value else ""
        if value is None:
            raise _unreadable(address, f"ends after /{protocol}", key, as_written)
        if protocol == "ip6zone" or (protocol == "ip6" and "%" in value):
            mend = "give an IPv4 address of that machine, or one of IPv6 that needs no zone"
            raise _unreadable(address, "has a zone, which means another link on each machine", key, mend)
        # many networks (Docker's, for one) have names with underscores, which the package refuses
        read = value.replace("_", "a") if protocol in _NAMES else value
        if takes_value and not _is_multiaddr(f"/{protocol}/{read}"):
            raise _unreadable(address, f"has an unreadable /{protocol}/{value}", key, as_written)
        parts.append((protocol, value))
    first = parts[0][0] if parts else ""
    if first not in (*_HOSTS, "p2p"):
        raise _unreadable(address, "names no host", key, as_written)
    if first not in ("dnsaddr", "p2p") and not any(protocol in _PORTS for protocol, _ in parts):
        raise _unreadable(address, "names no port", key, as_written)
    return parts


def _takes_value(protocol: str) -> bool | None:
    """Whether a value must follow a multiaddr protocol. None if the protocol is unknown."""
    from multiaddr.exceptions import Error
    from multiaddr.protocols import protocol_with_name

    try:
        return bool(protocol_with_name(protocol).size)
    except Error:
        return None


def _is_multiaddr(text: str) -> bool:
    from multiaddr import Multiaddr

    try:
        Multiaddr(text)
    except Exception:  # the parsers raise exceptions of many kinds
        return False
    return True


def _no_multiaddr(address: str, key: str, as_written: str) -> AddressError:
    """The error for an address that doesn't begin with a slash. It suggests the multiaddr that the user probably
    meant."""
    if address.startswith("-"):
        mend = f"give the addresses right after --{key.replace('_', '-')}, other flags before or after them"
        return AddressError("is a flag, not an address", key=key, value=address, mend=mend)
    if (found := _HOST_PORT.fullmatch(address)) is None:
        return AddressError("is no multiaddr", key=key, value=address, mend=as_written)
    name = found["ip6"] or found["host"]
    mend = f"write it as a multiaddr: /{_host_protocol(name)}/{name}/tcp/{found['port']}/p2p/<peer id>"
    return AddressError("is host:port, no multiaddr", key=key, value=address, mend=mend)


def _host_protocol(name: str) -> str:
    try:
        return f"ip{ip_address(name).version}"
    except ValueError:
        return "dns4"


def _unreadable(address: str, wrong: str, key: str, mend: str) -> AddressError:
    return AddressError(wrong, key=key, value=address, mend=mend)
