"""Judges what was seen of the network: the initial peers, clocks, large messages, NAT, whether others can dial this
peer, and the run's peers.

Law: pure. Each check takes what was seen, and says what mends what is wrong.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2p_diloco.addresses import host, ip_protocol, is_loopback, port_of, without_peer
from p2p_diloco.cli.doctor.machine import USUAL_PORT, on_the_internet
from p2p_diloco.cli.doctor.report import Found, Visit
from p2p_diloco.config import PeerConfig
from p2p_diloco.net.interface import CLOCK_DIFFERENCE_S_MAX
from p2p_diloco.settings import flag

if TYPE_CHECKING:
    from p2p_diloco.net.reach import DialBack

PEERS_MAX = 8
"""The most peers of the run that are visited, and the most that are named."""
MIDDLE_BYTES, LARGE_BYTES = 16 << 10, 256 << 10
MIDDLE_S, LARGE_S = 3.0, 4.0
"""Deadlines for messages of this length, and for longer ones."""
CLOCK_WARN_S = 1.0
"""Clocks that differ by more than this are a warning; by more than `CLOCK_DIFFERENCE_S_MAX`, the peer can't join."""
HANGS = "it takes connections but doesn't answer: its process hangs, or its machine is overloaded"
NOT_HIVEMIND = "something else answers there, not Hivemind's DHT"
MENDS = {
    "connection refused": "start the bootstrap there: `p2p-diloco bootstrap {open}--port {port}`; if it runs, it has "
    "another port or listens on loopback alone: take the address from the join line that it prints",
    "timed out": "check that {host} is up and is the right address; then open TCP port {port} in its firewall, and "
    "forward it if a router is in front of it",
    "no machine of that name": "correct the name; if `getent hosts {host}` fails too, repair this machine's DNS "
    "(/etc/resolv.conf), or give the address with the number, /ip4/...",
    "another peer answers there: its id is ": "the bootstrap has a new identity: use {place}/p2p/{told}, and start the "
    "bootstrap with --identity-path so that the identity stays",
    "something listens there but sends nothing": "start the bootstrap again; if a router forwards port {port}, check "
    "to which machine",
    "it takes connections but doesn't answer": "start the bootstrap again; if that doesn't help, end other programs on "
    "its machine",
    "something else answers there": "another program has port {port} of {host}: take the address from the "
    "bootstrap's join line",
    "connection closed at once": "start the bootstrap again, and take the address from its join line",
    "no route to": "check this machine's network: `ip route get {host}`; if it shows a route, {host} is off, or its "
    "firewall rejects port {port}",
}
"""Beginning of the reason why an initial peer doesn't answer -> the mend."""
ANY_MEND = "take the address from the bootstrap's join line"
_FIREWALLS = {
    "ufw": "sudo ufw allow {port}/tcp",
    "firewall-cmd": "sudo firewall-cmd --permanent --add-port={port}/tcp && sudo firewall-cmd --reload",
    "nft": "sudo nft insert rule inet filter input tcp dport {port} accept",
    "iptables": "sudo iptables -I INPUT -p tcp --dport {port} -j ACCEPT",
}
"""Program of a firewall -> the command that opens a port. Of several installed programs the first one counts."""
_ELSE = "where that can't be done, nothing is lost: the peer exchanges through relays"


@dataclass(slots=True)
class Seen:
    """What was found out so far."""

    peer: PeerConfig
    ports: list[Found] = field(default_factory=list)
    listen: tuple[str, ...] = ()
    """The free multiaddrs at which this peer would listen; none in client mode."""
    answers: dict[str, str | None] = field(default_factory=dict)
    """Initial peer -> why it doesn't answer; None: it may."""
    visits: list[Visit] = field(default_factory=list)
    """Of the initial peers that may answer."""
    device: str = "DEVICE"
    """The network interface through which this machine sends to the initial peers."""
    own: frozenset[str] = frozenset()
    """The IP addresses of this machine."""
    dialled_back: Mapping[str, DialBack] | None = None
    """Initial peer -> its answer. Peers that can't dial back are left out. None: they were not asked."""
    others: list[Visit] | None = None
    """Of the run's peers; None: none was visited."""
    private: list[str] = field(default_factory=list)
    """Names of the run's private peers, which are not visited."""
    left_out: int = 0
    """How many more peers of the run there are that were not visited."""

    @property
    def reached(self) -> list[Visit]:
        """The initial peers that answered."""
        return [each for each in self.visits if each.unreached is None]

    @property
    def port(self) -> int:
        """The first port number at which this peer listens; `USUAL_PORT` if there is none."""
        return next((number for number in map(port_of, self.listen) if number), USUAL_PORT)

    @property
    def seen_at(self) -> list[str]:
        """The multiaddrs, but for those of loopback, from which this peer's connections come as others see them."""
        told = (answer.seen_at for answer in (self.dialled_back or {}).values())
        return [address for address in told if not is_loopback(address)]

    @property
    def outside(self) -> str | None:
        """The IP address at which others see this machine, if it is not one of the machine's own; else None."""
        return next((host(address) for address in self.seen_at if host(address) not in self.own), None)

    @property
    def behind_nat(self) -> bool:
        """Whether a NAT lies between this machine and the initial peers: whether they see this machine at an address
        that isn't its own. If that is unknown: whether one of them has a public address, and this machine has none."""
        if self.seen_at:
            return self.outside is not None
        far = any(on_the_internet(host(visit.address)) for visit in self.reached)
        return far and not any(map(on_the_internet, self.own))

    @property
    def announces_public(self) -> bool:
        """Whether this peer announces a public address. A peer behind a NAT must do so."""
        return any(on_the_internet(host(address)) for address in self.peer.announce_maddrs)

    @property
    def reached_at(self) -> list[str]:
        """The addresses at which an initial peer could dial this peer."""
        told = (answer.reached.items() for answer in (self.dialled_back or {}).values())
        return list(dict.fromkeys(at for each in told for at, why in each if why is None))

    def failures(self, places: Collection[str] = ()) -> str:
        """The addresses at which an initial peer could not dial this peer, each with the first reason; of `places`
        alone if there are any."""
        told: dict[str, str] = {}
        for answer in (self.dialled_back or {}).values():
            for address, why in answer.reached.items():
                if why is not None and (not places or without_peer(address) in places):
                    told.setdefault(without_peer(address), why)
        return ", ".join(f"{address} ({why})" for address, why in told.items())


def port(seen: Seen) -> Iterator[Found]:
    """Whether this peer can listen as its settings say."""
    yield from seen.ports


# -- initial peers


def initial_peers(seen: Seen) -> Iterator[Found]:
    """Which initial peers answer. If one does, the others are only warnings, because one is enough."""
    if not seen.peer.initial_peers:
        mend = "add --initial-peers and the address from the bootstrap's join line"
        yield Found("warn", "none is given, so nothing outside of this machine was checked", mend)
    if seen.reached:
        yield Found("ok", f"{_listed(seen.reached)} answered")
    found = seen.answers | {visit.address: visit.unreached for visit in seen.visits}
    for address, why in found.items():
        if why is not None:
            yield Found("warn" if None in found.values() else "bad", f"{address}: {why}", mend_of(address, why))


def mend_of(address: str, why: str) -> str:
    """The mend for an initial peer that can't be reached for the reason `why`."""
    for beginning, text in MENDS.items():
        if why.startswith(beginning):
            return text.format(
                host=host(address),
                port=port_of(address),
                place=without_peer(address),
                told=next(iter(why.removeprefix(beginning).split()), ""),
                open="" if is_loopback(address) else "--host 0.0.0.0 ",
            )
    return ANY_MEND


def clock(seen: Seen) -> Iterator[Found]:
    """Compare this machine's clock with the initial peers'. Only the smallest difference is judged."""
    known = [each.clock_ahead_s for each in seen.visits if each.clock_ahead_s is not None]
    if not known:
        return
    least = min(known, key=abs)
    text = f"this machine's clock is {abs(least):.1f} s {'behind' if least > 0 else 'ahead of'} the initial peers'"
    mend = "set this machine's clock: `sudo timedatectl set-ntp true`; if it is right (`date -u`), set the initial "
    if abs(least) > CLOCK_DIFFERENCE_S_MAX:
        yield Found("bad", f"{text}; at most {CLOCK_DIFFERENCE_S_MAX:g} s are allowed", f"{mend}peers'")
    else:
        yield Found("warn", text, f"{mend}peers'") if abs(least) > CLOCK_WARN_S else Found("ok", text)


def transfer(seen: Seen) -> Iterator[Found]:
    """Whether large messages pass to the initial peers."""
    stalled = [each for each in seen.visits if each.trouble == "stalls"]
    slow = [each for each in seen.visits if each.trouble == "slow"]
    passed = [each for each in seen.visits if each.rate is not None]
    if stalled:
        text = (
            f"small messages pass to {_listed(stalled)}, but {MIDDLE_BYTES >> 10} KiB stall for {MIDDLE_S:g} s: large "
            "packets are lost on the way (path MTU)"
        )
        mend = (
            f"try `sudo ip link set dev {seen.device} mtu 1280`; if that helps, keep it, or let ICMP "
            "'fragmentation needed' through the firewalls on the way"
        )
        yield Found("warn" if passed else "bad", text, mend)
    elif slow:
        text = f"{LARGE_BYTES >> 10} KiB to {_listed(slow)} take more than {LARGE_S:g} s"
        yield Found(
            "warn", text, "use a faster link, end other transfers on it, or set a lower slice_elements in the run"
        )
    elif passed:
        yield Found("ok", f"{LARGE_BYTES >> 10} KiB pass to {_listed(passed)}")


def _listed(visits: Sequence[Visit]) -> str:
    return ", ".join(each.place for each in visits)


# -- reachability


def nat(seen: Seen) -> Iterator[Found]:
    """Whether this machine is behind a NAT, and of which kind."""
    own = ", ".join(sorted(place for place in seen.own if not _stays_here(place))) or "none"
    if seen.dialled_back is None or not (seen.seen_at or seen.behind_nat):
        return
    if not seen.seen_at:
        text = f"behind a NAT: this machine has only local addresses ({own}), and the initial peers are on the internet"
        more = "; others can't dial this peer unless a port is forwarded: it exchanges through relays"
        yield Found("ok", text) if seen.announces_public else Found("warn", text + more, _forward(seen))
        return
    if seen.outside is None:
        yield Found("ok", f"none: others see this machine at its own address {host(seen.seen_at[0])}")
        return
    text = f"behind a NAT: this machine's addresses are {own}, others see it at {seen.outside}"
    ports = sorted({port_of(address) for address in seen.seen_at if host(address) == seen.outside})
    if len(ports) > 1 and not all(map(is_loopback, seen.listen)):
        text += f", at another port for each peer (address-dependent mapping: {', '.join(map(str, ports))})"
        yield Found("ok", text) if seen.reached_at else Found("warn", text, _forward(seen))
    else:
        yield Found("ok", text)


def reachable(seen: Seen, installed: Callable[[str], object] = shutil.which) -> Iterator[Found]:
    """Whether other peers can dial this one. Nothing if no initial peer answered, if this peer can't listen at any
    address, or if `nat` already reports the reason."""
    if seen.dialled_back is None:
        return
    if seen.peer.client_mode:
        yield Found("ok", "client mode: no peer dials this one, and it leaves aggregating to others")
    elif not seen.reached or not seen.listen:
        return
    elif all(map(is_loopback, seen.listen)):
        if all(is_loopback(visit.address) for visit in seen.reached):
            yield Found("ok", "on loopback alone, like the initial peers: for peers on this machine")
        else:
            text = "this peer listens on loopback alone, and the initial peers are on other machines"
            yield Found("bad", text, f"{flag('host_maddrs')} /ip4/0.0.0.0/tcp/{seen.port}")
    elif not seen.dialled_back:
        yield from _unknown(seen, installed)
    elif seen.reached_at:
        yield _dialled(seen)
    else:
        text = f"private: no other peer can dial this one: {seen.failures() or 'it has no address'}"
        text += ". It exchanges over connections that it dials and through relays, and leaves aggregating to others"
        yield Found("bad" if seen.peer.announce_maddrs else "warn", text, _mend(seen, installed))


def _unknown(seen: Seen, installed: Callable[[str], object]) -> Iterator[Found]:
    """What can be told if no initial peer can dial back."""
    place, number = "ADDRESS", seen.port
    if announced := seen.peer.announce_maddrs:
        place, number = host(announced[0]), port_of(announced[0])
    elsewhere = f"try `nc -vz {place} {number}` elsewhere while this peer runs"
    if seen.behind_nat and not seen.announces_public:
        return
    elif all(host(visit.address) in seen.own for visit in seen.reached):
        yield Found("ok", "the initial peers are on this machine, and can dial this peer")
    else:
        text = "can't tell whether others can dial this peer: no initial peer dials back"
        mend = f"update the bootstrap if it is older, or {elsewhere}; if that fails, {_open(seen.port, installed)}"
        yield Found("warn", text, mend)


def _dialled(seen: Seen) -> Found:
    places = [without_peer(address) for address in seen.reached_at]
    missed = [address for address in seen.peer.announce_maddrs if address not in places]
    if not missed:
        return Found("ok", f"other peers can dial this one at {' '.join(places)}")
    text = f"others can dial this peer, but not at the announced {' '.join(missed)}: {seen.failures(missed)}"
    return Found("warn", text, f"announce only addresses that work: {flag('announce_maddrs')} {' '.join(places)}")


def _mend(seen: Seen, installed: Callable[[str], object]) -> str:
    at, announced = [host(address) for address in seen.seen_at], seen.peer.announce_maddrs
    if at and announced and not any(host(address) in at for address in announced):
        right = f"/{ip_protocol(at[0])}/{at[0]}/tcp/{port_of(announced[0]) or seen.port}"
        wrong = f"others see this machine at {at[0]}, not at {host(announced[0])}"
        return f"{wrong}: {flag('announce_maddrs')} {right}; then run doctor again"
    return _forward(seen) if seen.behind_nat else _open(seen.port, installed)


def _open(number: int, installed: Callable[[str], object]) -> str:
    """How to open a port in this machine's firewall, with the command if the firewall's program is known."""
    command = next((text for name, text in _FIREWALLS.items() if installed(name)), None)
    firewall = f": `{command.format(port=number)}`" if command else ""
    fixed = f"join with {flag('host_maddrs')} /ip4/0.0.0.0/tcp/{number}"
    return f"open TCP port {number} in this machine's firewall{firewall}, and in its provider's; {fixed}; {_ELSE}"


def _forward(seen: Seen) -> str:
    """Which port the router must forward so that others can dial this peer, and with which flags to join."""
    usable = sorted((place for place in seen.own if not _stays_here(place)), key=lambda place: (":" in place, place))
    outside = seen.outside or "ROUTER"
    what = "" if seen.outside else ", with the router's public address for ROUTER"
    return (
        f"forward TCP port {seen.port} of the router to {[*usable, 'this machine'][0]}:{seen.port}, and join with "
        f"{flag('host_maddrs')} /ip4/0.0.0.0/tcp/{seen.port} {flag('announce_maddrs')} "
        f"/{ip_protocol(outside)}/{outside}/tcp/{seen.port}{what}; {_ELSE}"
    )


def _stays_here(place: str) -> bool:
    """Whether other machines can't use an IP address, because it is a loopback address or an IPv6 link-local one."""
    return place.startswith(("127.", "fe80:")) or place == "::1"


# -- the run's peers


def peers(seen: Seen) -> Iterator[Found]:
    """Whether the run's peers can be reached from here."""
    others, told = seen.others or [], list[str]()
    unreached = [each for each in others if each.unreached is not None]
    if unreached:
        named = ", ".join(f"{each.name} at {each.place} ({each.unreached})" for each in unreached)
        told.append(f"{len(unreached)} of {len(others)} peers of the run can't be reached from here: {named}")
    elif others:
        told.append(f"{len(others)} of {len(others)} peers of the run answer")
    if seen.left_out:
        told.append(f"{seen.left_out} more were not tried")
    if seen.private:
        names = ", ".join([*seen.private[:PEERS_MAX], *["…"] * (len(seen.private) > PEERS_MAX)])
        told.append(
            f"not tried, because they are private: {names} (they exchange over connections that they dial, or "
            "through relays)"
        )
    mend = "run doctor on these machines, or open their ports; until then payloads to them go through relays"
    if told:
        yield Found("warn", "; ".join(told), mend) if unreached else Found("ok", "; ".join(told))


def direct(seen: Seen) -> Iterator[Found]:
    """Whether payloads to the run's peers can go over direct connections. Of a private run that isn't known."""
    ways = [each.way for each in seen.others or () if each.way is not None]
    text = f"payloads go directly to {ways.count('direct')} of {len(ways)} peers"
    if not ways:
        return
    if not seen.peer.direct:
        yield Found("ok", f"switched off ({flag('direct')} is off): payloads go over libp2p")
    elif "direct" in ways:
        yield Found("ok", text)
    else:
        mend = f"{flag('direct_port')} 31339 on each peer, and that TCP port open in its firewall"
        yield Found("warn", f"{text}; to the others over libp2p", f"not needed, but faster: {mend}")
