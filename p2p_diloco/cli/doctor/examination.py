"""`doctor`: finds out all that its checks judge, runs the checks, and shows the report.

Law: `LOCAL` and `NETWORK` are the checks, in order. It ends in time: what takes too long is cut off, and the checks
judge what was found until then. The report goes to stdout, progress to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from p2p_diloco.addresses import host, is_loopback, leads_over_a_relay, peer_of
from p2p_diloco.cli.doctor import machine, network
from p2p_diloco.cli.doctor.network import LARGE_BYTES, LARGE_S, MIDDLE_BYTES, MIDDLE_S, PEERS_MAX
from p2p_diloco.cli.doctor.report import Found, Report, Seen, Visit
from p2p_diloco.cli.reach import reasons
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.interrupts import run
from p2p_diloco.net.interface import Limits, Traffic, Unreachable
from p2p_diloco.net.invitation_used import with_invitation
from p2p_diloco.net.reach import own_hosts
from p2p_diloco.observe.figures import count_of
from p2p_diloco.settings import read_settings

if TYPE_CHECKING:
    from p2p_diloco.net.daemon import Daemon
    from p2p_diloco.net.direct import DirectChannel, Opened
    from p2p_diloco.net.pipe import Pipe
    from p2p_diloco.net.signing import SigningKey
    from p2p_diloco.node.status import PeerStatus

LIMIT_S = 15.0
"""Seconds after which all is cut off; ending the daemons may take 3 s more."""
DAEMON_START_S, DIAL_BACK_S = 6.0, 9.0
"""Deadlines: for the start of a daemon; for an initial peer to dial this one back, which may start one first."""
SMALL_S, TRIES = 2.0, 3
"""Deadline for an answer to a question of a few bytes, and how often it is asked; the shortest time counts."""
HUGE_BYTES, QUICK_S = 2 << 20, 0.5
"""If `LARGE_BYTES` take no longer than QUICK_S, HUGE_BYTES are sent too, which measures a fast link better."""
PATIENT_S = 60.0
"""`connect_timeout_s` of the connections here. `DirectChannel` waits a tenth of this for a direct connection."""

log = logging.getLogger(__name__)


Check = Callable[[Seen], Iterable[Found]]
LOCAL: Sequence[Check] = (machine.invitation, machine.versions, machine.p2pd, machine.memory, machine.disk)
"""The checks of this machine, which look for themselves."""
NETWORK: Sequence[Check] = (
    network.port, network.initial_peer, network.clock, network.transfer, network.reachable, network.peers,
    network.direct,
)  # fmt: skip
"""The checks of what `look_around` has seen."""
Findings = list[tuple[str, Found]]
"""What was found, after the name of the check."""


def doctor(flags: Mapping[str, object], config_file: Path | None, parameters: str | None, *, as_json: bool) -> int:
    """Make all checks and show the report. Returns the exit status: 1 if something must be mended, else 0.
    `parameters`: the number of the model's parameters as text, such as 25M; None: the user gave none.

    Raises:
        UsageError, ConfigError: the settings can't be used.
    """
    if not log.isEnabledFor(logging.DEBUG):
        logging.getLogger("p2p_diloco").setLevel(logging.ERROR)  # the findings say it
    count = None if parameters is None else count_of(parameters, key="--params")
    run_config, peer = read_settings(flags, os.environ, config_file)
    peer = with_invitation(peer)
    number = len(peer.initial_peers)
    others = f"{number} initial peer{'s' * (number != 1)}" if number else "no other peer"
    typer.echo(f"checking this machine and {others}: 20 s at most", err=True)

    async def show() -> Report:
        report = await examine(run_config, peer, count)
        typer.echo(report.to_json() if as_json else report.text())
        return report  # shown before the loop ends: its end waits for threads, such as one that looks up a name

    return run(show()).exit_code


async def examine(
    run_config: RunConfig, peer: PeerConfig, parameters: int | None = None, limit_s: float | None = None
) -> Report:
    """Make all checks for a peer with these settings, and return the report. `parameters`: the number of its model's
    parameters; None: unknown. What takes longer than `limit_s` (`LIMIT_S` if None) is cut off."""
    began, seen, findings = time.monotonic(), Seen(peer, run_config, parameters), Findings()
    limit_s = LIMIT_S if limit_s is None else limit_s

    async def look() -> None:
        findings.extend(await asyncio.to_thread(_made, LOCAL, seen))
        await look_around(seen, daemon_runs=("p2pd", "bad") not in ((name, one.verdict) for name, one in findings))

    try:
        await asyncio.wait_for(look(), limit_s)
    except asyncio.TimeoutError:
        text = f"the look at {'the network' if findings else 'this machine'} was cut off after {limit_s:g} s, so "
        mend = "mend the other findings, then run doctor again; if this machine is busy, wait until it is less busy"
        findings.append(("doctor", Found("warn", f"{text}something is missing", mend)))
    except Exception as error:
        findings.append(("doctor", _fault("the network", error)))
    findings += _made(NETWORK, seen)
    others = [visit for visit in seen.others or () if visit.unreached is None]
    known = {peer_of(visit.address) for visit in others}
    links = [*(visit for visit in seen.reached if peer_of(visit.address) not in known), *others]
    return Report.of(findings, links, time.monotonic() - began)


def _made(checks: Sequence[Check], seen: Seen) -> Findings:
    """Make all these checks. One that fails hides no other."""
    findings: Findings = []
    for check in checks:
        name = check.__name__.replace("_", " ")
        try:
            findings += [(name, found) for found in check(seen)]
        except Exception as error:
            findings.append(("doctor", _fault(name, error)))
    return findings


def _fault(name: str, error: BaseException) -> Found:
    """What is told of an error that ended a check."""
    log.debug("the check %s broke off", name, exc_info=error)
    if isinstance(error, P2PDilocoError):
        text = error.sentence.removesuffix(f"; {error.mend}")
        return Found("bad", text, error.mend or "mend the other findings, then run doctor again")
    text = f"the check {name} failed: {type(error).__name__}: {error}"
    return Found("warn", text, "a fault in p2p-diloco itself: report it; --debug shows where")


# -- looking around


async def look_around(seen: Seen, *, daemon_runs: bool) -> None:
    """Look first at the ports; then at the initial peers, with plain sockets; then, if libp2p's daemon runs here, over
    libp2p at the initial peers that answered and at the run's peers."""
    peer = seen.peer
    seen.listen, seen.ports = machine.listening(peer)
    seen.own = frozenset(own_hosts())
    seen.answers = dict(zip(peer.initial_peers, await reasons(peer.initial_peers), strict=True))
    addresses = [address for address, why in seen.answers.items() if why is None]
    if not addresses or not daemon_runs:
        return
    await asyncio.to_thread(importlib.import_module, "p2p_diloco.observe.snapshot")
    await asyncio.to_thread(importlib.import_module, "p2p_diloco.net.hivemind")  # each takes seconds
    from p2p_diloco.net.probing import visiting

    async with visiting(seen.listen, peer.announce_maddrs, start_s=DAEMON_START_S) as (daemon, key):
        lock = asyncio.Lock()
        reading = asyncio.create_task(_run_peers(peer, addresses, lock))
        await asyncio.sleep(0)  # so `reading` takes the lock first: it keeps this process busy, and slows transfers
        try:
            seen.visits = await asyncio.gather(*(visit(daemon, address, lock) for address in addresses))
            if seen.reached:
                await asyncio.gather(_dial_back(seen, daemon), _visit_run(seen, daemon, key, await reading, lock))
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def visit(daemon: Daemon, address: str, one_at_a_time: asyncio.Lock) -> Visit:
    """Ask the peer at `address`, a multiaddr with its peer id, several questions. Large questions wait for the lock, so
    that no two of them share this machine's link."""
    from p2p_diloco.net.probing import NO_ANSWER, ask

    if (why := await daemon.greet(address)) is not None:
        return Visit(address, why)
    peer = peer_of(address)
    try:
        quickest = min([await ask(daemon, peer, timeout_s=SMALL_S) for _ in range(TRIES)], key=lambda each: each.took_s)
    except Unreachable as error:
        return Visit(address, network.HANGS if NO_ANSWER in str(error) else network.NOT_HIVEMIND)
    seen = Visit(address, None, quickest.took_s, quickest.clock_ahead_s)
    async with one_at_a_time:
        try:
            await ask(daemon, peer, timeout_s=MIDDLE_S, padding_bytes=MIDDLE_BYTES)
        except Unreachable:
            return replace(seen, trouble="stalls")
        try:
            took_s, size = (await ask(daemon, peer, timeout_s=LARGE_S, padding_bytes=LARGE_BYTES)).took_s, LARGE_BYTES
        except Unreachable:
            return replace(seen, trouble="slow")
        if took_s <= QUICK_S:
            with contextlib.suppress(Unreachable):
                took_s = (await ask(daemon, peer, timeout_s=LARGE_S, padding_bytes=HUGE_BYTES)).took_s
                size = HUGE_BYTES
    return replace(seen, rate=size / max(1e-3, took_s - quickest.took_s))


async def _dial_back(seen: Seen, daemon: Daemon) -> None:
    """Ask the initial peers to dial this peer back."""
    from p2p_diloco.net.reach import ask_all

    asked = [address for address in daemon.addresses if not is_loopback(address)]
    seen.dialled_back = await ask_all(daemon, [peer_of(each.address) for each in seen.reached], asked, DIAL_BACK_S)


# -- the run's peers


async def _run_peers(peer: PeerConfig, initial_peers: Sequence[str], lock: asyncio.Lock) -> list[PeerStatus]:
    """The peers of the run that have addresses, as their records describe them, the newest record first; none if no
    initial peer lets this one read the records: then other checks tell the reason."""
    from p2p_diloco.net.invited import read_invitation
    from p2p_diloco.node.records import read_peers
    from p2p_diloco.observe.snapshot import observer

    try:
        async with lock, observer(initial_peers, None if peer.invite is None else read_invitation(peer)) as dht:
            peers = (await read_peers(dht, peer.run_id)).values()
    except P2PDilocoError as error:
        log.debug("the records of the run's peers can't be read: %s", error)
        return []
    return sorted((each for each in peers if each.addresses), key=lambda each: -each.time)


async def _visit_run(
    seen: Seen, daemon: Daemon, key: SigningKey, statuses: Sequence[PeerStatus], lock: asyncio.Lock
) -> None:
    """Visit the run's peers. A private peer is not visited, because no peer is expected to be able to dial it."""
    public = [each for each in statuses if each.reach != "private"]
    seen.private = [each.name for each in statuses if each.reach == "private"]
    seen.left_out = max(0, len(public) - PEERS_MAX)
    hosts = list(dict.fromkeys(map(host, seen.listen)))
    async with direct_channel(daemon, key, seen.peer, hosts) as channel:
        visits = [_visit_peer(daemon, channel, each, lock) for each in public[:PEERS_MAX]]
        others = await asyncio.gather(*visits)
    seen.others = [replace(each, way=None) if seen.peer.invite is not None else each for each in others]


@contextlib.asynccontextmanager
async def direct_channel(
    daemon: Daemon, key: SigningKey, peer: PeerConfig, hosts: Sequence[str]
) -> AsyncIterator[DirectChannel | None]:
    """Direct connections as a peer with these settings would make them; None if they are switched off, or if the run is
    private, because its members accept direct connections only from members."""
    if not peer.direct or peer.invite is not None:
        yield None
        return
    from p2p_diloco.net.direct import DirectChannel
    from p2p_diloco.net.framing import VERSION
    from p2p_diloco.net.hivemind import DIRECT
    from p2p_diloco.net.invitation import Invitation
    from p2p_diloco.net.membership import Membership
    from p2p_diloco.net.streams import Streams
    from p2p_diloco.net.tls import Tls
    from p2p_diloco.node.inbox import Inbox

    async def opened(other: str) -> Opened:
        protocol = f"/p2p-diloco/{VERSION}/{peer.run_id}{DIRECT}"
        return await daemon.open_stream(other, protocol, timeout_s=Limits().connect_timeout_s)

    async def turn_away(other: str, pipe: Pipe) -> None:
        pipe.abort()

    streams = Streams(Inbox(), Limits(connect_timeout_s=PATIENT_S), Traffic())
    membership = Membership(Invitation.anybody(peer.run_id), daemon.peer_id, time.time())
    channel = DirectChannel(
        streams,
        Tls(membership, key),
        open_stream=opened,
        addresses=daemon.known_at,
        found_at=daemon.found_at,
        serve=turn_away,
        hosts=hosts,
        port=peer.direct_port,
    )
    try:
        yield channel
    finally:
        await channel.close()


async def _visit_peer(
    daemon: Daemon, channel: DirectChannel | None, status: PeerStatus, one_at_a_time: asyncio.Lock
) -> Visit:
    """Visit a peer of the run at its addresses, and find out which path payloads to it would take."""
    daemon.introduce(status.peer_id, status.addresses)
    told = [at for at in status.addresses if not is_loopback(at)] or status.addresses
    attempts = [asyncio.create_task(visit(daemon, at, one_at_a_time)) for at in told]
    try:
        for attempt in asyncio.as_completed(attempts):
            if (seen := await attempt).unreached is None:
                break
    finally:
        for each in attempts:
            each.cancel()
    way = None
    if seen.unreached is None:
        direct = channel is not None and await channel.take(status.peer_id) is not None
        way = "direct" if direct else "relayed" if leads_over_a_relay(seen.address) else "libp2p"
    return replace(seen, name=status.name, way=way)
