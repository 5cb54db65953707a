"""Bounds the dials to hosts at which no peer has proven its id yet.

Law: counts, and dials nothing. A record names the addresses at which its peer is dialled, and it may name another
host's: a few invented records would have every member of a run dial that host again and again. A peer that was reached
at a host is dialled there without limit, so many peers may share the address of a router.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from ipaddress import ip_address

from p2p_diloco.addresses import leads_over_a_relay

DIALS_MAX, DIALS_S = 64, 60.0
"""The most dials to one host in so many seconds that have not found the peer in whose name the host was given."""
HOSTS_MAX, PROVEN_MAX = 4096, 4096
"""The most hosts whose dials are counted, and the most pairs of peer and host that are known to be right."""


class Unproven:
    """The dials that have not found their peer. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._dials: dict[str, list[tuple[float, str]]] = {}  # by host: when, and in which peer's name
        self._proven: dict[tuple[str, str], None] = {}  # peer and host, oldest first

    def proven(self, peer: str, addresses: Iterable[str]) -> bool:
        """Whether the peer was reached at the hosts of all these multiaddrs."""
        return all((peer, _host(address)) in self._proven for address in addresses)

    def admit(self, peer: str, addresses: Iterable[str]) -> list[str]:
        """Those of a peer's multiaddrs that may be dialled now. They are counted as dialled."""
        return [address for address in addresses if self._spend(peer, _host(address))]

    def prove(self, peer: str, address: str) -> None:
        """The peer was reached at this multiaddr: its dials to that host don't count any more."""
        if leads_over_a_relay(address):
            return  # the host is the relay's
        host = _host(address)
        self._proven.pop((peer, host), None)
        self._proven[peer, host] = None
        if len(self._proven) > PROVEN_MAX:
            del self._proven[next(iter(self._proven))]
        if host in self._dials:
            self._dials[host] = [dial for dial in self._dials[host] if dial[1] != peer]

    def _spend(self, peer: str, host: str) -> bool:
        if (peer, host) in self._proven:
            return True
        now = self._clock()
        lately = [dial for dial in self._dials.pop(host, []) if now - dial[0] < DIALS_S]
        self._dials[host] = lately
        if len(self._dials) > HOSTS_MAX:
            del self._dials[next(iter(self._dials))]
        if len(lately) >= DIALS_MAX:
            return False
        lately.append((now, peer))
        return True


def _host(address: str) -> str:
    """The IP address in a multiaddr. All names count as one host, because many names may lead to one."""
    match address.split("/"):
        case ["", "ip4" | "ip6", text, *_]:
            with contextlib.suppress(ValueError):
                ip = ip_address(text)
                return str(getattr(ip, "ipv4_mapped", None) or ip)
    return ""
