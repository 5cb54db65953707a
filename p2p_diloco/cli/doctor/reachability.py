"""Judges whether other peers can dial this one, and whether it is behind a NAT. If they can't, names the command or the
port forwarding that helps.

Law: pure; judges the initial peers' answers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2p_diloco.addresses import host, ip_protocol, is_loopback, port_of, without_peer
from p2p_diloco.cli.doctor.ports import Ports, on_the_internet
from p2p_diloco.cli.doctor.report import Finding
from p2p_diloco.config import PeerConfig
from p2p_diloco.settings import flag

if TYPE_CHECKING:
    from p2p_diloco.net.reach import DialBack

_FIREWALLS = {
    "ufw": "sudo ufw allow {port}/tcp",
    "firewall-cmd": "sudo firewall-cmd --permanent --add-port={port}/tcp && sudo firewall-cmd --reload",
    "nft": "sudo nft insert rule inet filter input tcp dport {port} accept",
    "iptables": "sudo iptables -I INPUT -p tcp --dport {port} -j ACCEPT",
}
"""Program of a firewall -> the command that opens a port. Of several installed programs the first one counts."""
_ELSE = "where that can't be done, nothing is lost: the peer exchanges through relays"


@dataclass(frozen=True, slots=True)
class Position:
    """What the checks found out about this peer's place in the network."""

    peer: PeerConfig
    ports: Ports
    own: frozenset[str]
    """The IP addresses of this machine."""
    dialled: tuple[str, ...]
    """The initial peers that answered."""
    answers: Mapping[str, DialBack]
    """Initial peer -> its answer. Peers that can't dial back are left out."""
    tried: Mapping[str, str | None] = field(default_factory=dict)
    """Announced address -> why this machine itself can't dial it; None: it can."""

    @property
    def seen_at(self) -> list[str]:
        """The multiaddrs from which this peer's connections come, as other peers see them. Loopback addresses are left
        out."""
        return [answer.seen_at for answer in self.answers.values() if not is_loopback(answer.seen_at)]

    @property
    def outside(self) -> str | None:
        """The IP address at which other peers see this machine, if that is not one of the machine's own addresses.
        Otherwise None; also None if it is unknown."""
        return next((host(address) for address in self.seen_at if host(address) not in self.own), None)

    @property
    def behind_nat(self) -> bool:
        """Whether a NAT lies between this machine and the initial peers: whether they see this machine at an address
        that isn't its own. If that is unknown: whether one of them has a public address, and this machine has none."""
        if self.seen_at:
            return self.outside is not None
        far = any(on_the_internet(host(address)) for address in self.dialled)
        return far and not any(map(on_the_internet, self.own))

    @property
    def announces_public(self) -> bool:
        """Whether this peer announces a public address. A peer behind a NAT must do so."""
        return any(on_the_internet(host(address)) for address in self.peer.announce_maddrs)

    @property
    def reached_at(self) -> list[str]:
        """The addresses at which an initial peer could dial this peer."""
        found = (at for answer in self.answers.values() for at, why in answer.reached.items() if why is None)
        return list(dict.fromkeys(found))


def nat(here: Position) -> Finding | None:
    """Judge whether this machine is behind a NAT, and of which kind. None if nothing is known."""
    own = ", ".join(sorted(place for place in here.own if not _stays_here(place))) or "none"
    if here.behind_nat and not here.seen_at:
        text = f"behind a NAT: this machine has only local addresses ({own}), and the initial peers are on the internet"
        if here.announces_public:
            return Finding("NAT", "ok", text)
        text += "; others can't dial this peer unless a port is forwarded: it exchanges through relays"
        return Finding("NAT", "warn", text, _forward(here))
    if not here.seen_at:
        return None
    if here.outside is None:
        return Finding("NAT", "ok", f"none: others see this machine at its own address {host(here.seen_at[0])}")
    text = f"behind a NAT: this machine's addresses are {own}, others see it at {here.outside}"
    seen_ports = {port_of(address) for address in here.seen_at if host(address) == here.outside}
    if len(seen_ports) > 1 and here.ports.listen and not here.ports.on_loopback:
        text += (
            f", at another port for each peer (address-dependent mapping: {', '.join(map(str, sorted(seen_ports)))})"
        )
        return Finding("NAT", "ok" if here.reached_at else "warn", text, "" if here.reached_at else _forward(here))
    return Finding("NAT", "ok", text)


def reachable(here: Position, installed: Callable[[str], object] = shutil.which) -> Finding | None:
    """Judge whether other peers can dial this one. None if no initial peer answered, if this peer can't listen at any
    address, or if `nat` already reports the reason."""
    if here.peer.client_mode:
        return Finding("reachable", "ok", "client mode: no peer dials this one, and it leaves aggregating to others")
    if not here.dialled or not here.ports.listen:
        return None
    if here.ports.on_loopback:
        return _on_loopback(here)
    if not here.answers:
        return _unknown(here, installed)
    if here.reached_at:
        return _reached(here)
    told = _failures(here)
    text = f"private: no other peer can dial this one: {told or 'it has no address'}"
    text += ". It exchanges over connections that it dials and through relays, and leaves aggregating to others"
    return Finding("reachable", "bad" if here.peer.announce_maddrs else "warn", text, _mend(here, installed))


def _on_loopback(here: Position) -> Finding:
    if all(map(is_loopback, here.dialled)):
        return Finding("reachable", "ok", "on loopback alone, like the initial peers: for peers on this machine")
    text = "this peer listens on loopback alone, and the initial peers are on other machines"
    return Finding("reachable", "bad", text, f"{flag('host_maddrs')} /ip4/0.0.0.0/tcp/{here.ports.port}")


def _unknown(here: Position, installed: Callable[[str], object]) -> Finding | None:
    """The finding if no initial peer can dial back. None if `nat` already reports the reason."""
    failed = {address: why for address, why in here.tried.items() if why is not None}
    if failed:
        address, why = next(iter(failed.items()))
        text = f"this machine can't dial its own announced address {address}: {why}"
        mend = (
            f"announce an address at which others see this machine; if {host(address)} is the router's, some routers "
            f"refuse this from inside: try `nc -vz {host(address)} {port_of(address)}` elsewhere while this peer runs"
        )
        return Finding("reachable", "warn", text, mend)
    if here.behind_nat and not here.announces_public:
        return None
    if all(host(address) in here.own for address in here.dialled):
        return Finding("reachable", "ok", "the initial peers are on this machine, and can dial this peer")
    place, port = "ADDRESS", here.ports.port
    if here.peer.announce_maddrs:
        place, port = host(here.peer.announce_maddrs[0]), port_of(here.peer.announce_maddrs[0])
    text = "can't tell whether others can dial this peer: no initial peer dials back"
    mend = f"update the bootstrap if it is older, or try `nc -vz {place} {port}` elsewhere while this peer runs"
    return Finding("reachable", "warn", text, f"{mend}; if that fails, {_open(here.ports.port, installed)}")


def _reached(here: Position) -> Finding:
    announced = here.peer.announce_maddrs
    places = [without_peer(address) for address in here.reached_at]
    missed = [address for address in announced if address not in places]
    if not missed:
        return Finding("reachable", "ok", f"other peers can dial this one at {' '.join(places)}")
    text = f"others can dial this peer, but not at the announced {' '.join(missed)}: {_failures(here, missed)}"
    return Finding("reachable", "warn", text, f"announce only addresses that work: {flag('announce_maddrs')} "
                   f"{' '.join(places)}")  # fmt: skip


def _mend(here: Position, installed: Callable[[str], object]) -> str:
    seen, announced = [host(address) for address in here.seen_at], here.peer.announce_maddrs
    wrong = [address for address in announced if host(address) not in seen]
    if seen and announced and len(wrong) == len(announced):
        right = [f"/{ip_protocol(seen[0])}/{seen[0]}/tcp/{port_of(at) or here.ports.port}" for at in wrong[:1]]
        correct = f"others see this machine at {seen[0]}, not at {host(wrong[0])}: {flag('announce_maddrs')} {right[0]}"
        return f"{correct}; then run doctor again"
    return _forward(here) if here.behind_nat else _open(here.ports.port, installed)


def _open(port: int, installed: Callable[[str], object]) -> str:
    """A sentence that says how to open a port in this machine's firewall, with the command if the firewall's program
    is known."""
    command = next((text for name, text in _FIREWALLS.items() if installed(name)), None)
    firewall = f": `{command.format(port=port)}`" if command else ""
    fixed = f"join with {flag('host_maddrs')} /ip4/0.0.0.0/tcp/{port}"
    return f"open TCP port {port} in this machine's firewall{firewall}, and in its provider's; {fixed}; {_ELSE}"


def _forward(here: Position) -> str:
    """A sentence that says which port the router must forward so that others can dial this peer, and with which flags
    to join."""
    port = here.ports.port
    own = min((place for place in here.own if not _stays_here(place)), key=_order, default="this machine")
    outside = here.outside or "ROUTER"
    what = "" if here.outside else ", with the router's public address for ROUTER"
    return (
        f"forward TCP port {port} of the router to {own}:{port}, and join with {flag('host_maddrs')} "
        f"/ip4/0.0.0.0/tcp/{port} {flag('announce_maddrs')} /{ip_protocol(outside)}/{outside}/tcp/{port}{what}; {_ELSE}"
    )


def _failures(here: Position, places: Collection[str] = ()) -> str:
    """The addresses at which a dial failed, each with the first reason that a peer gave. If `places` is not empty, only
    addresses in `places` are listed."""
    told: dict[str, str] = {}
    for answer in here.answers.values():
        for address, why in answer.reached.items():
            if why is not None and (not places or without_peer(address) in places):
                told.setdefault(without_peer(address), why)
    return ", ".join(f"{address} ({why})" for address, why in told.items())


def _stays_here(place: str) -> bool:
    """Whether other machines can't use an IP address, because it is a loopback address or an IPv6 link-local one."""
    return place.startswith(("127.", "fe80:")) or place == "::1"


def _order(place: str) -> tuple[bool, str]:
    return ":" in place, place  # IPv4 first
