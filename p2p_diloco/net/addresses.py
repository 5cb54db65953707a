"""The multiaddrs that a transport dials, listens on and shows.

Law: text in, text or an `AddressError` out; nothing is resolved or dialled. The grammar is judged by
`p2p_diloco.addresses`; what is added here is the canonical form, advice for what is no multiaddr at all, and
where to listen. The `multiaddr` package is loaded on first use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from p2p_diloco.addresses import EXAMPLE, by_reach, check_peer_address, split_addresses
from p2p_diloco.addresses import is_loopback as is_loopback
from p2p_diloco.errors import AddressError

_HOST_PORT = re.compile(r"(?:\w+://)?(?:\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s/:,]+)):(?P<port>\d+)/?")


def parse(text: str, *, key: str = "initial_peers") -> str:
    """The canonical multiaddr of a peer to dial, ending in /p2p/<peer id>.

    Raises:
        AddressError: it is a flag, a host:port, or no multiaddr; its port, protocol or peer id can't be; or
        none is
            given. The text says which, and how to mend it.
    """
    from multiaddr import Multiaddr
    from multiaddr.exceptions import Error

    text = text.strip()
    if text.startswith("-"):
        mend = f"give the addresses right after --{key.replace('_', '-')}, other flags before or after them"
        raise AddressError("is a flag, not an address", key=key, value=text, mend=mend)
    if (found := _HOST_PORT.fullmatch(text)) is not None:
        host = found["ip6"] or found["host"]
        mend = f"write it as a multiaddr: /{_host_protocol(host)}/{host}/tcp/{found['port']}/p2p/<peer id>"
        raise AddressError("is host:port, no multiaddr", key=key, value=text, mend=mend)
    check_peer_address(text, key=key)
    try:
        return str(Multiaddr(text.replace("/ipfs/", "/p2p/")))
    except (Error, ValueError) as error:
        mend = f"write it like {EXAMPLE}"
        raise AddressError(f"is no multiaddr ({error})", key=key, value=text, mend=mend) from None


def split(texts: str | Iterable[str]) -> list[str]:
    """The single addresses of texts that use spaces, commas or line ends between them, each once, in
    order.
    """
    return list(split_addresses(texts))


def peer_of(address: str) -> str:
    """The peer id that a canonical address ends with."""
    return address.rpartition("/p2p/")[2]


def listen_for(initial_peers: Sequence[str]) -> list[str]:
    """Where to listen: on loopback if every initial peer is there, else on all interfaces; the system picks
    the port.

    A peer without initial peers starts a swarm of its own, and stays private: loopback.
    """
    if all(is_loopback(address) for address in initial_peers):
        return ["/ip4/127.0.0.1/tcp/0"]
    return ["/ip4/0.0.0.0/tcp/0"]


def order_for_display(addresses: Iterable[str]) -> list[str]:
    """The addresses, those that anyone can reach first, this machine's loopback last."""
    return by_reach(list(addresses))


def _host_protocol(host: str) -> str:
    try:
        return f"ip{ip_address(host).version}"
    except ValueError:
        return "dns4"
