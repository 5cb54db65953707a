"""Checks this machine's ports: can a peer listen at the addresses in its settings, and could other peers dial the
addresses that it announces?

Law: plain sockets and the settings; no other machine is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from p2p_diloco.addresses import host, is_loopback, port_of
from p2p_diloco.cli.doctor.report import Finding
from p2p_diloco.cli.reach import check_free
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.net.own_addresses import listens_at
from p2p_diloco.settings import flag

USUAL_PORT = 31338
"""The port in a suggested command, where the settings name none."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The addresses at which this peer would listen, and what is wrong with them."""

    listen: tuple[str, ...]
    """The multiaddrs to listen on that are free; none in client mode."""
    findings: tuple[Finding, ...] = field(default=())

    @property
    def port(self) -> int:
        """The first port number in `listen`; `USUAL_PORT` if there is none."""
        return next((number for number in map(port_of, self.listen) if number), USUAL_PORT)

    @property
    def on_loopback(self) -> bool:
        """Whether this peer listens on loopback only, so that only this machine can reach it. Also true if it listens
        nowhere."""
        return all(is_loopback(address) for address in self.listen)


def look(peer: PeerConfig) -> Ports:
    """Try to listen at every address in the settings."""
    if peer.client_mode:
        return Ports((), (Finding("port", "ok", "client mode: this peer listens nowhere"),))
    wished = tuple(listens_at(peer))
    troubles = {address: _trouble(address, flag("host_maddrs")) for address in wished}
    findings = [found for found in troubles.values() if found is not None]
    free = tuple(address for address, found in troubles.items() if found is None)
    if free:
        findings.append(Finding("port", "ok", f"can listen on {' '.join(map(_said, free))}"))
    findings += _direct_port(peer, wished)
    return Ports(free, (*findings, *_announced(peer, wished)))


def on_the_internet(place: str) -> bool:
    """Whether a host is public: an IP address that is valid on the whole internet, or any name but localhost."""
    try:
        return ip_address(place).is_global
    except ValueError:
        return place != "localhost"


def _said(address: str) -> str:
    return address if port_of(address) else f"{address} (any free port)"


def _trouble(address: str, key: str) -> Finding | None:
    try:
        check_free(address, key=key)
    except ConfigError as error:
        mend = error.mend
        if "in use" in error.wrong:
            mend += f"; `ss -ltnp 'sport = :{port_of(address)}'` shows the program that has it"
        return Finding("port", "bad", f"{key} {error.value} {error.wrong}", mend)
    return None


def _direct_port(peer: PeerConfig, wished: Sequence[str]) -> list[Finding]:
    """Findings on the port for direct connections. Empty if nothing is wrong."""
    key, number = flag("direct_port"), peer.direct_port
    if not peer.direct or not number:
        return []
    if number in map(port_of, wished):
        text = f"{key} {number} is the port of {flag('host_maddrs')} too"
        return [Finding("port", "bad", text, f"{key} {number + 1}")]
    version = {host(address): address.split("/")[1] for address in wished}
    found = [_trouble(f"/{version[place]}/{place}/tcp/{number}", key) for place in version]
    return [each for each in found if each is not None]


def _announced(peer: PeerConfig, wished: Sequence[str]) -> list[Finding]:
    """Findings on the announced addresses: the errors that the settings alone can show. Empty if there are none."""
    key = flag("announce_maddrs")
    if peer.announce_maddrs and not any(map(port_of, wished)):
        number = port_of(peer.announce_maddrs[0]) or USUAL_PORT
        text = f"{key} names a port, but the system chooses the port to listen on anew at each start"
        return [Finding("port", "bad", text, f"{flag('host_maddrs')} /ip4/0.0.0.0/tcp/{number}")]
    far = any(on_the_internet(host(address)) for address in peer.initial_peers)
    near = [address for address in peer.announce_maddrs if not on_the_internet(host(address))]
    if not far or not near or len(near) < len(peer.announce_maddrs):
        return []
    text = f"{key} {' '.join(near)} is an address of a local network, and the initial peers are on the internet"
    return [Finding("port", "warn", text, "announce the public address of this machine or of its router")]
