"""The multiaddrs that a transport dials, listens on and shows.

Law: text in, text or an `AddressError` out; nothing is resolved or dialled. Whether an address can be used is judged
by `p2p_diloco.addresses`; what is added here is the canonical form, and where to listen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from p2p_diloco.addresses import by_reach, check_peer_address, split_addresses
from p2p_diloco.addresses import is_loopback as is_loopback


def parse(text: str, *, key: str = "initial_peers") -> str:
    """The canonical multiaddr of a peer to dial, ending in /p2p/<peer id>.

    Raises:
        AddressError: it is none. The text says what it is, and how to mend it.
    """
    from multiaddr import Multiaddr

    return str(Multiaddr(check_peer_address(text.strip(), key=key).replace("/ipfs/", "/p2p/")))


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

