"""Checks the peers of the run: whether this machine can reach each of them, and which path payloads to it take.

Law: reads the run's records and opens connections, but takes no part in the run and sends no payload.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from p2p_diloco.addresses import leads_over_a_relay, without_peer
from p2p_diloco.cli.doctor.report import Finding, Link
from p2p_diloco.cli.doctor.swarm import Visit, visit
from p2p_diloco.config import PeerConfig
from p2p_diloco.net.interface import Limits, Traffic
from p2p_diloco.settings import flag

if TYPE_CHECKING:
    from p2p_diloco.net.daemon import Daemon
    from p2p_diloco.net.direct import DirectChannel, Opened
    from p2p_diloco.net.pipe import Pipe
    from p2p_diloco.node.status import PeerStatus

PEERS_MAX = 8
"""The most peers of the run that are visited."""
PATIENT_S = 60.0
"""`connect_timeout_s` of the connections here. `DirectChannel` waits a tenth of this for a direct connection."""


async def found(peer: PeerConfig, initial_peers: Sequence[str]) -> list[PeerStatus]:
    """The peers of the run that have addresses, as their records describe them; the newest record first. No peer itself
    is asked.

    Raises:
        P2PDilocoError: no initial peer lets this one read the records.
    """
    from p2p_diloco.net.invited import read_invitation
    from p2p_diloco.node.records import read_peers
    from p2p_diloco.observe.look import observer

    invitation = None if peer.invite is None else read_invitation(peer)
    async with observer(initial_peers, invitation) as dht:
        peers = (await read_peers(dht, peer.run_id)).values()
    return sorted((each for each in peers if each.addresses), key=lambda each: -each.time)


@asynccontextmanager
async def direct_channel(daemon: Daemon, peer: PeerConfig, hosts: Sequence[str]) -> AsyncIterator[DirectChannel | None]:
    """Direct connections as a peer with these settings would make them; None if they are switched off, or if the run is
    private, because its members accept direct connections only from members."""
    if not peer.direct or peer.invite is not None:
        yield None
        return
    from p2p_diloco.net.direct import DirectChannel
    from p2p_diloco.net.framing import VERSION
    from p2p_diloco.net.hivemind import DIRECT
    from p2p_diloco.net.streams import Streams
    from p2p_diloco.node.inbox import Inbox

    async def opened(other: str) -> Opened:
        protocol = f"/p2p-diloco/{VERSION}/{peer.run_id}{DIRECT}"
        return await daemon.open_stream(other, protocol, timeout_s=Limits().connect_timeout_s)

    async def turn_away(other: str, pipe: Pipe) -> None:
        pipe.abort()

    streams = Streams(Inbox(), Limits(connect_timeout_s=PATIENT_S), Traffic())
    channel = DirectChannel(
        streams,
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


async def link_to(
    daemon: Daemon, channel: DirectChannel | None, status: PeerStatus, one_at_a_time: asyncio.Lock
) -> tuple[Visit, Link]:
    """Visit a peer of the run at its addresses, and find out which path payloads to it would take."""
    daemon.introduce(status.peer_id, status.addresses)
    attempts = [asyncio.create_task(visit(daemon, at, one_at_a_time)) for at in status.addresses]
    try:
        seen = await _first_reached(attempts)
    finally:
        for attempt in attempts:
            attempt.cancel()
    way = await _way(channel, status.peer_id, seen.address) if seen.unreached is None else None
    place = without_peer(seen.address)
    return seen, Link(status.peer_id, status.name, place, seen.rtt_s, seen.rate, way)


async def _first_reached(attempts: Sequence[asyncio.Task[Visit]]) -> Visit:
    for attempt in asyncio.as_completed(attempts):
        if (seen := await attempt).unreached is None:
            return seen
    return seen


async def _way(channel: DirectChannel | None, peer_id: str, address: str) -> str:
    if channel is not None and await channel.take(peer_id) is not None:
        return "direct"
    return "relayed" if leads_over_a_relay(address) else "libp2p"


def peers(
    links: Sequence[Link], unreached: Sequence[tuple[str, Visit]], left_out: int, private: Sequence[str] = ()
) -> Finding | None:
    """Whether the run's peers can be reached from here; None without peers. `unreached`: the name and the visit of each
    peer that didn't answer; `left_out`: how many more peers there are, which were not visited; `private`: names of
    the private peers, which are not visited either."""
    told, count = list[str](), len(links) + len(unreached)
    if unreached:
        named = (f"{name} at {without_peer(seen.address)} ({seen.unreached})" for name, seen in unreached)
        told.append(f"{len(unreached)} of {count} peers of the run can't be reached from here: {', '.join(named)}")
    elif links:
        told.append(f"{count} of {count} peers of the run answer")
    if left_out:
        told.append(f"{left_out} more were not tried")
    if private:
        names = ", ".join([*private[:PEERS_MAX], *(["…"] if len(private) > PEERS_MAX else [])])
        told.append(f"not tried, because they are private: {names} (they exchange over connections that they dial, or "
                    "through relays)")  # fmt: skip
    if not told:
        return None
    mend = "run doctor on these machines, or open their ports; until then payloads to them go through relays"
    return Finding("peers", "warn" if unreached else "ok", "; ".join(told), mend if unreached else "")


def direct(peer: PeerConfig, links: Sequence[Link]) -> Finding | None:
    """Whether payloads to the run's peers can go over direct connections. None if the run is private, or no peer was
    reached."""
    if peer.invite is not None:
        return None
    reached = [link for link in links if link.way is not None]
    if not reached:
        return None
    if not peer.direct:
        return Finding("direct", "ok", f"switched off ({flag('direct')} is off): payloads go over libp2p")
    ours = [link for link in reached if link.way == "direct"]
    text = f"payloads go directly to {len(ours)} of {len(reached)} peers"
    if ours:
        return Finding("direct", "ok", text)
    key = flag("direct_port")
    mend = f"not needed, but faster: {key} 31339 on each peer, and that TCP port open in its firewall"
    return Finding("direct", "warn", f"{text}; to the others over libp2p", mend)
