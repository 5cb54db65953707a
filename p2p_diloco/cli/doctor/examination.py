"""Makes all checks at the same time: of this machine, its ports, the initial peers and the run's peers.

Law: decides the order of the checks; judges nothing itself. It ends in time: checks that take too long are cancelled,
and their findings up to then are reported.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import psutil

from p2p_diloco.addresses import host, is_loopback, peer_of, without_peer
from p2p_diloco.cli.doctor import initial, machine, ports, programs, reachability, run_peers, swarm
from p2p_diloco.cli.doctor.report import Finding, Link, Report
from p2p_diloco.cli.reach import reasons
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.net import own_addresses

if TYPE_CHECKING:
    from p2p_diloco.net.daemon import Daemon
    from p2p_diloco.node.status import PeerStatus

LIMIT_S = 15.0
"""Seconds after which the checks are cut off; ending the daemons may take 3 s more."""
DAEMON_START_S = 6.0
DIAL_BACK_S = 9.0
"""Deadline for an initial peer to dial this one back; the initial peer may have to start a daemon first."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wish:
    """The settings with which a peer would be started. `parameters`: the number of its model's parameters; None: the
    user gave none."""

    run: RunConfig
    peer: PeerConfig
    parameters: int | None = None


@dataclass(slots=True)
class Notes:
    """The findings and links that the checks have noted so far."""

    findings: list[Finding] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)

    def add(self, *findings: Finding | None) -> None:
        """Add findings to the notes. Values that are None are left out."""
        self.findings += [finding for finding in findings if finding is not None]


async def examine(wish: Wish, limit_s: float | None = None) -> Report:
    """Make all checks and return the report. Checks that take longer than `limit_s` (`LIMIT_S` if None) are
    cancelled."""
    began, notes = time.monotonic(), Notes()
    limit_s = LIMIT_S if limit_s is None else limit_s
    programs_checked = asyncio.create_task(_programs(notes), name="the programs")
    tasks = {
        programs_checked,
        asyncio.create_task(_machine(wish, notes), name="this machine"),
        asyncio.create_task(_network(wish, notes, programs_checked), name="the network"),
    }
    try:
        done, late = await asyncio.wait(tasks, timeout=limit_s)
    finally:
        for task in tasks:
            task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in late:
        text = f"the checks of {task.get_name()} were cut off after {limit_s:g} s, so some are missing"
        mend = "mend the other findings, then run doctor again; if this machine is busy, wait until it is less busy"
        notes.add(Finding("doctor", "warn", text, mend))
    for task in done:
        notes.add(_fault(task.get_name(), task.exception()))
    return Report.of(notes.findings, notes.links, time.monotonic() - began)


def _fault(part: str, error: BaseException | None) -> Finding | None:
    """The finding for an error that ended a group of checks. None if there was no error."""
    if error is None:
        return None
    log.debug("the checks of %s broke off", part, exc_info=error)
    if isinstance(error, P2PDilocoError):
        text = error.sentence.removesuffix(f"; {error.mend}")
        return Finding("doctor", "bad", text, error.mend or "mend the other findings, then run doctor again")
    text = f"the checks of {part} failed: {type(error).__name__}: {error}"
    return Finding("doctor", "warn", text, "a fault in p2p-diloco itself: report it; --debug shows where")


async def _machine(wish: Wish, notes: Notes) -> None:
    notes.add(machine.memory(wish.run, wish.parameters, machine.free_memory()))
    notes.add(await asyncio.to_thread(machine.disk, wish.peer, wish.parameters))


async def _programs(notes: Notes) -> None:
    notes.add(programs.versions(), await programs.p2pd(programs.p2pd_path()), *programs.sockets())


async def _network(wish: Wish, notes: Notes, before: asyncio.Task[None]) -> None:
    """Check first the ports; then the initial peers, with plain sockets; then, over libp2p, the initial peers that
    answered and the run's peers. The import of Hivemind keeps the processor busy, so it waits until the task `before`
    has ended, which tells whether the daemon can run."""
    here = ports.look(wish.peer)
    notes.add(*here.findings)
    addresses, findings = await initial.answering(wish.peer.initial_peers)
    notes.add(*findings)
    if not addresses:
        return
    await asyncio.wait({before})
    if any(finding.name == "p2pd" and finding.verdict == "bad" for finding in notes.findings):
        return  # no daemon would start, and that finding has the mend
    await asyncio.to_thread(importlib.import_module, "p2p_diloco.observe.look")
    await asyncio.to_thread(importlib.import_module, "p2p_diloco.net.hivemind")  # each takes seconds
    from p2p_diloco.net.probing import visiting

    async with visiting(here.listen, wish.peer.announce_maddrs, start_s=DAEMON_START_S) as daemon:
        await _over_libp2p(wish.peer, here, daemon, addresses, notes)


async def _over_libp2p(
    peer: PeerConfig, here: ports.Ports, daemon: Daemon, addresses: Sequence[str], notes: Notes
) -> None:
    lock = asyncio.Lock()
    reading = asyncio.create_task(_run_peers(peer, addresses, lock))
    await asyncio.sleep(0)  # so `reading` takes the lock first: it keeps this process busy, and would slow a transfer
    try:
        visits = await asyncio.gather(*(swarm.visit(daemon, address, lock) for address in addresses))
        reached = [visit for visit in visits if visit.unreached is None]
        notes.add(*swarm.answered(visits), swarm.clock(visits))
        if not reached:
            return
        notes.add(swarm.transfer(reached, device_towards(host(reached[0].address))))
        notes.links += map(_link_of, reached)
        await asyncio.gather(
            _reachability(peer, here, daemon, [visit.address for visit in reached], notes),
            _links(peer, here, daemon, await reading, notes, lock),
        )
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _link_of(visit: swarm.Visit) -> Link:
    return Link(peer_of(visit.address), "initial peer", without_peer(visit.address), visit.rtt_s, visit.rate)


async def _run_peers(peer: PeerConfig, addresses: Sequence[str], lock: asyncio.Lock) -> list[PeerStatus]:
    """The run's peers, as their records describe them. Empty if the records can't be read; other findings then tell the
    reason."""
    try:
        async with lock:
            return await run_peers.found(peer, addresses)
    except P2PDilocoError as error:
        log.debug("the records of the run's peers can't be read: %s", error)
        return []


async def _reachability(
    peer: PeerConfig, here: ports.Ports, daemon: Daemon, dialled: Sequence[str], notes: Notes
) -> None:
    """Ask the initial peers to dial this peer back. If none of them answers, dial the announced addresses from this
    machine."""
    from p2p_diloco.net.reach import ask_all

    asked = [address for address in daemon.addresses if not is_loopback(address)]
    answers = await ask_all(daemon, [peer_of(address) for address in dialled], asked, DIAL_BACK_S)
    own = frozenset(own_addresses.own_hosts())
    position = reachability.Position(peer, here, own, tuple(dialled), answers)
    if dialled and not answers and here.listen and peer.announce_maddrs:
        whys = await reasons([f"{address}/p2p/{daemon.peer_id}" for address in peer.announce_maddrs])
        position = replace(position, tried=dict(zip(peer.announce_maddrs, whys, strict=True)))
    notes.add(reachability.nat(position), reachability.reachable(position))


async def _links(
    peer: PeerConfig,
    here: ports.Ports,
    daemon: Daemon,
    statuses: Sequence[PeerStatus],
    notes: Notes,
    lock: asyncio.Lock,
) -> None:
    """Visit the run's peers, and note whether they answer and which path payloads to them take. A private peer is not
    visited, because no peer is expected to be able to dial it."""
    private = [each.name for each in statuses if each.reach == "private"]
    public = [each for each in statuses if each.reach != "private"]
    visited = public[: run_peers.PEERS_MAX]
    hosts = list(dict.fromkeys(map(host, here.listen)))
    async with run_peers.direct_channel(daemon, peer, hosts) as channel:
        outcomes = await asyncio.gather(*(run_peers.link_to(daemon, channel, each, lock) for each in visited))
    links = [link for seen, link in outcomes if seen.unreached is None]
    if peer.invite is not None:
        links = [replace(link, way=None) for link in links]
    unreached = [(link.name, seen) for seen, link in outcomes if seen.unreached is not None]
    known = {link.peer_id for link in links}
    notes.links[:] = [link for link in notes.links if link.peer_id not in known] + links
    notes.add(run_peers.peers(links, unreached, len(public) - len(visited), private))
    notes.add(run_peers.direct(peer, links))


def device_towards(place: str) -> str:
    """The network interface through which this machine sends to a host. "DEVICE" if it can't be found."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((place, 9))  # sends nothing
                own = probe.getsockname()[0]
        except OSError:
            continue
        for name, addresses in psutil.net_if_addrs().items():
            if own in (each.address for each in addresses):
                return name
    return "DEVICE"
