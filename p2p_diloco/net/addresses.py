"""The multiaddrs that a transport dials and listens on.

Law: works on text only: an address that can't be read raises `AddressError`, and none is resolved or dialled.
`p2p_diloco.addresses` checks addresses; this file adds their canonical form, and chooses where to listen.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2p_diloco.addresses import check_peer_address, is_loopback


def parse(text: str, *, key: str = "initial_peers") -> str:
    """Check the multiaddr of a peer; returns its canonical form, which ends in /p2p/<peer id>.

    Raises:
        AddressError: the text is no multiaddr of a peer; the error says what is wrong and how to mend it.
    """
    from multiaddr import Multiaddr

    return str(Multiaddr(check_peer_address(text.strip(), key=key).replace("/ipfs/", "/p2p/")))


def peer_of(address: str) -> str:
    """The peer id that a canonical address ends with."""
    return address.rpartition("/p2p/")[2]


def leads_over_a_relay(address: str) -> bool:
    """Whether a multiaddr leads to the peer through a relay (libp2p's circuit relay)."""
    return "p2p-circuit" in address.split("/")


def listen_for(initial_peers: Sequence[str]) -> list[str]:
    """Choose the multiaddrs to listen on: loopback if the addresses of all initial peers are loopback addresses, else
    all interfaces. The operating system chooses the port.

    A peer without initial peers founds a swarm, and listens on loopback.
    """
    if all(is_loopback(address) for address in initial_peers):
        return ["/ip4/127.0.0.1/tcp/0"]
    return ["/ip4/0.0.0.0/tcp/0"]
