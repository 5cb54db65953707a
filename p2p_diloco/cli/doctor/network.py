"""Judges what was seen of the network: the initial peers, clocks, large messages, whether others can dial this peer,
and the run's peers.

Law: pure. Each check takes what was seen, and says what mends what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from p2p_diloco.addresses import host, ip_protocol, is_loopback, port_of, without_peer
from p2p_diloco.cli.doctor.machine import USUAL_PORT
from p2p_diloco.cli.doctor.report import Found, Seen, Visit
from p2p_diloco.net.interface import CLOCK_DIFFERENCE_S_MAX
from p2p_diloco.settings import flag

PEERS_MAX = 8
"""The most peers of the run that are visited, and the most that are named."""
MIDDLE_BYTES, LARGE_BYTES = 16 << 10, 256 << 10
MIDDLE_S, LARGE_S = 3.0, 4.0
"""Deadlines for messages of this length, and for longer ones."""
CLOCK_WARN_S = 1.0
"""Clocks that differ by more than this are a warning; by more than `CLOCK_DIFFERENCE_S_MAX`, the peer can't join."""
HANGS = "it takes connections but doesn't answer: its process hangs, or its machine is overloaded"
NOT_HIVEMIND = "something else answers there, not Hivemind's DHT"
OTHER_ID = "another peer answers there: its id is "
MENDS = {
    ("timed out", "no route to"): "check that {host} is up and is the right address; then open TCP port {port} in its "
    "firewall, and forward it if a router is in front of it",
    ("no machine of that name",): "correct the name, or give the address with the number, /ip4/...",
    (OTHER_ID,): "the bootstrap has a new identity: use {place}/p2p/{told}, and start the bootstrap with "
    "--identity-path so that the identity stays",
    ("connection", "something", "it takes"): "start the bootstrap again there: `p2p-diloco bootstrap {open}--port "
    "{port}`; if it runs, it has another port, or listens on loopback alone, or a router forwards the port to another "
    "machine: take the address from the join line that it prints",
}
"""Beginnings of the reasons why an initial peer doesn't answer -> the mend."""
ANY_MEND = "take the address from the bootstrap's join line"


def port(seen: Seen) -> Iterator[Found]:
    """Whether this peer can listen as its settings say."""
    yield from seen.ports


def initial_peer(seen: Seen) -> Iterator[Found]:
    """Which initial peers answer. If one does, the others are only warnings, because one is enough."""
    if not seen.peer.initial_peers:
        mend = "add --initial-peers and the address from the bootstrap's join line"
        yield Found("warn", "none is given, so nothing outside of this machine was checked", mend)
    if seen.reached:
        yield Found("ok", f"{_listed(seen.reached)} answered")
    found = seen.answers | {visit.address: visit.unreached for visit in seen.visits}
    for address, why in found.items():
        if why is not None:
            enough = "one that answers is enough; else " if None in found.values() else ""
            yield Found("warn" if enough else "bad", f"{address}: {why}", enough + mend_of(address, why))


def mend_of(address: str, why: str) -> str:
    """The mend for an initial peer that can't be reached for the reason `why`."""
    text = next((text for beginnings, text in MENDS.items() if why.startswith(beginnings)), ANY_MEND)
    told = next(iter(why.removeprefix(OTHER_ID).split()), "")
    public = "" if is_loopback(address) else "--host 0.0.0.0 "
    return text.format(host=host(address), port=port_of(address), place=without_peer(address), told=told, open=public)


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
        text = f"small messages pass to {_listed(stalled)}, but {MIDDLE_BYTES >> 10} KiB stall for {MIDDLE_S:g} s: "
        mend = "try `sudo ip link set dev DEVICE mtu 1280` (`ip route` shows the device); if that helps, keep it, or "
        mend += "let ICMP 'fragmentation needed' through the firewalls on the way"
        yield Found("warn" if passed else "bad", text + "large packets are lost on the way (path MTU)", mend)
    elif slow:
        text = f"{LARGE_BYTES >> 10} KiB to {_listed(slow)} take more than {LARGE_S:g} s"
        mend = "use a faster link, end other transfers on it, or set a lower slice_elements in the run"
        yield Found("warn", text, mend)
    elif passed:
        yield Found("ok", f"{LARGE_BYTES >> 10} KiB pass to {_listed(passed)}")


def _listed(visits: Sequence[Visit]) -> str:
    return ", ".join(each.place for each in visits)


# -- reachability


def reachable(seen: Seen) -> Iterator[Found]:
    """Whether other peers can dial this one, and whether a NAT lies between. Nothing if no initial peer answered, or if
    this peer can't listen at any address."""
    if seen.dialled_back is None or not (seen.peer.client_mode or (seen.reached and seen.listen)):
        return
    nat = f"; behind a NAT: others see this machine at {seen.outside}" if seen.outside else ""
    failed = ", ".join(f"{without_peer(at)} ({why})" for at, why in seen.tried if why is not None)
    if seen.peer.client_mode:
        yield Found("ok", "client mode: no peer dials this one, and it leaves aggregating to others")
    elif all(map(is_loopback, seen.listen)):
        text = "this peer listens on loopback alone, and the initial peers are on other machines"
        mend = f"{flag('host_maddrs')} /ip4/0.0.0.0/tcp/{_port(seen)}"
        near = all(is_loopback(visit.address) for visit in seen.reached)
        well = Found("ok", "on loopback alone, like the initial peers: for peers on this machine")
        yield well if near else Found("bad", text, mend)
    elif places := list(dict.fromkeys(without_peer(at) for at, why in seen.tried if why is None)):
        text = f"other peers can dial this one at {' '.join(places)}{nat}"
        mend = f"announce only addresses that work: {flag('announce_maddrs')} {' '.join(places)}"
        missed = not set(seen.peer.announce_maddrs) <= set(places)
        yield Found("warn", f"{text}, but not at {failed}", mend) if missed else Found("ok", text)
    elif seen.dialled_back:
        text = f"private: no other peer can dial this one: {failed or 'it has no address'}{nat}"
        text += ". It exchanges over connections that it dials and through relays, and leaves aggregating to others"
        yield Found("bad" if seen.peer.announce_maddrs else "warn", text, _opening(seen))
    elif all(host(visit.address) in seen.own for visit in seen.reached):
        yield Found("ok", "the initial peers are on this machine, and can dial this peer")
    else:
        text = "can't tell whether others can dial this peer: no initial peer dials back"
        place = host(seen.peer.announce_maddrs[0]) if seen.peer.announce_maddrs else "ADDRESS"
        mend = f"try `nc -vz {place} {_port(seen)}` elsewhere while this peer runs; if that fails, {_opening(seen)}"
        yield Found("warn", text, mend)


def _port(seen: Seen) -> int:
    """The first port number at which this peer listens; `USUAL_PORT` if there is none."""
    return next((number for number in map(port_of, seen.listen) if number), USUAL_PORT)


def _opening(seen: Seen) -> str:
    """What lets others dial this peer: a port that is open here, or that the router forwards, and the flags to join."""
    number, outside = _port(seen), seen.outside
    fixed = f"join with {flag('host_maddrs')} /ip4/0.0.0.0/tcp/{number}"
    where = f"open TCP port {number} in this machine's firewall, and in its provider's"
    if outside:
        usable = sorted(own for own in seen.own if not own.startswith(("127.", "fe80:", "::1")))
        where = f"forward TCP port {number} of the router to {[*usable, 'this machine'][0]}:{number}"
        fixed += f" {flag('announce_maddrs')} /{ip_protocol(outside)}/{outside}/tcp/{number}"
    return f"{where}, and {fixed}; where that can't be done, nothing is lost: the peer exchanges through relays"


# -- the run's peers


def peers(seen: Seen) -> Iterator[Found]:
    """Whether the run's peers can be reached from here."""
    others = seen.others or []
    unreached = [f"{each.name} at {each.place} ({each.unreached})" for each in others if each.unreached is not None]
    told = [f"{len(others) - len(unreached)} of {len(others)} peers of the run answer"] if others else []
    told += [f"not reached from here: {', '.join(unreached)}"] if unreached else []
    told += [f"{seen.left_out} more were not tried"] if seen.left_out else []
    if seen.private:
        names = ", ".join([*seen.private[:PEERS_MAX], *["…"] * (len(seen.private) > PEERS_MAX)])
        told.append(f"not tried, because they are private and exchange through relays: {names}")
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
