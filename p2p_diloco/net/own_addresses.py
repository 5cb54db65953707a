"""Where this machine can be dialled: the IP addresses of its interfaces, and where a peer listens because of them; and
which names are its own.

Law: reads the operating system's table of interfaces and the machine's name; opens no socket.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

import psutil

from p2p_diloco.addresses import listen_for
from p2p_diloco.config import PeerConfig


def listens_at(local: PeerConfig) -> Sequence[str]:
    """The multiaddrs at which a peer listens, unless it is in client mode."""
    return local.host_maddrs or listen_for(local.initial_peers, ip6=has_ip6())


def has_ip6() -> bool:
    """Whether other machines can dial this one by IPv6: an interface has an address that is neither loopback's nor for
    one link alone."""
    own = (place for place in map(ip_address, own_hosts()) if place.version == 6)
    return any(not (place.is_loopback or place.is_link_local) for place in own)


def own_hosts() -> set[str]:
    """The IP addresses of this machine's interfaces."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = (each for addresses in psutil.net_if_addrs().values() for each in addresses if each.family in families)
    return {each.address.partition("%")[0] for each in found}


def names_this_machine(host: str) -> bool:
    """Whether a request's Host header names an address, or this machine by its own name. Any other name may be another
    site's, whose page in the user's browser could then read the answer: its DNS may point the name here."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    with contextlib.suppress(ValueError):
        ip_address(name)
        return True
    return name in ("localhost", socket.gethostname().lower())
