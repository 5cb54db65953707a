"""The transport over Hivemind: its DHT for records, its libp2p daemon for streams, and direct connections for payloads.

Law: connects the parts; decides nothing. Importing it loads torch, so import it only where a swarm is needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from p2p_diloco.addresses import host, is_loopback
from p2p_diloco.net.addresses import leads_over_a_relay, peer_of
from p2p_diloco.net.circuits import Circuits
from p2p_diloco.net.daemon import Daemon
from p2p_diloco.net.dht import DhtPeer
from p2p_diloco.net.direct import DirectChannel, Opened
from p2p_diloco.net.exchange import Exchange
from p2p_diloco.net.framing import VERSION
from p2p_diloco.net.interface import Inbox, Limits, Reach, Records, Traffic, Written, unnoticed
from p2p_diloco.net.membership import Invitation, Membership
from p2p_diloco.net.paths import Paths
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.reach import DialBack, ReachFinder, ask_all, together
from p2p_diloco.net.relay import RELAY_MBIT, Relay
from p2p_diloco.net.sealed import SealedRecords

log = logging.getLogger(__name__)

DIRECT = "/direct"
"""The suffix of the protocol by which peers ask for direct connections."""


class HivemindTransport:
    """A `Transport` over libp2p, for one peer of a run. Made by `create`, ended by `close`."""

    def __init__(
        self, dht: DhtPeer, exchange: Exchange, circuits: Circuits, paths: Paths, finder: ReachFinder, relay: Relay
    ) -> None:
        self.peer_id = dht.peer_id
        self.traffic = exchange.streams.traffic
        self.membership: Membership | None = None
        """This peer's membership of its private run; None: the run is open."""
        self.plain: Records = dht
        """The records of the DHT itself, which strangers can read and store. In an open run there are no others."""
        self._records: Records = dht
        self._dht, self._exchange = dht, exchange
        self._circuits, self._paths, self._finder, self._relay = circuits, paths, finder, relay

    @property
    def limits(self) -> Limits:
        """As `Transport.limits`."""
        return self._exchange.streams.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._exchange.streams.limits = limits

    @property
    def reach(self) -> Reach:
        """As `Transport.reach`."""
        return self._finder.now

    @classmethod
    async def create(
        cls,
        inbox: Inbox,
        *,
        run_id: str,
        initial_peers: Sequence[str],
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str] = (),
        identity_path: str | None = None,
        client_mode: bool = False,
        map_port: bool = False,
        direct: bool = True,
        direct_port: int = 0,
        relay_mbit: float = RELAY_MBIT,
        limits: Limits | None = None,
        invitation: Invitation | None = None,
        startup_timeout_s: float = 60.0,
        on_daemon_death: Callable[[str], None] | None = None,
    ) -> HivemindTransport:
        """Start a daemon, join the DHT of the initial peers (or found one), and listen for the run's messages.

        `direct`: send payloads over direct connections wherever one can be made. `map_port`: ask the router to forward
        a port. `relay_mbit`: as for `Relay`. `invitation`: to a private run, in which this peer exchanges with members
        only; None: the run is open.

        Raises:
            AddressError: an initial peer's address can't be read.
            NoBootstrapReached: none of the initial peers answered; the error gives the reason for each.
            Refused: this machine's clock differs too much from the initial peers'.
            ConfigError: the identity, the invitation, or an address or port to listen on, can't be used.
        """
        limits, traffic = limits or Limits(), Traffic()
        channel: DirectChannel | None = None
        answers: dict[str, DialBack] = {}

        def daemon_died(why: str) -> None:
            """End the direct connections too: peers that still hold one would not notice that this peer can't be
            reached."""
            if channel is not None:
                channel.end()
            if on_daemon_death is not None:
                on_daemon_death(why)

        async def can_be_dialled(daemon: Daemon, reached: Sequence[str]) -> bool:
            answers.update(await ask_all(daemon, [peer_of(address) for address in reached]))
            return not together(daemon.addresses, answers.values()).private

        dht = await DhtPeer.create(
            initial_peers=initial_peers,
            host_maddrs=host_maddrs,
            announce_maddrs=announce_maddrs,
            identity_path=identity_path,
            client_mode=client_mode,
            map_port=map_port,
            startup_timeout_s=startup_timeout_s,
            on_daemon_death=daemon_died,
            on_reached=can_be_dialled,
        )
        daemon, protocol = dht.daemon, f"/p2p-diloco/{VERSION}/{run_id}"

        async def dial(peer: str, *, around: bool = False, protocol: str = protocol) -> Opened:
            timeout_s = exchange.streams.limits.connect_timeout_s
            return await paths.open(peer, protocol, timeout_s=timeout_s, around=around)

        async def serve(peer: str, pipe: Pipe, seen_at: str) -> None:
            await exchange.receiver.serve(peer, pipe)

        def linked() -> list[str]:
            """The peers that this one is connected to."""
            return [*map(peer_of, initial_peers), *exchange.sender.links.peers()]

        def reach_changed(reach: Reach) -> None:
            _tell(reach)
            circuits.register(initial_peers if reach.private else ())

        exchange = Exchange(inbox, limits=limits, traffic=traffic, dial=dial)
        circuits = Circuits(daemon, dht.sign)
        paths = Paths(daemon, circuits, linked)
        relay = Relay(daemon, relay_mbit)
        finder = ReachFinder(daemon, answers, linked, reach_changed)
        transport = cls(dht, exchange, circuits, paths, finder, relay)
        try:
            if invitation is not None:
                transport.membership = Membership(invitation, dht.peer_id, time.time())
                transport._records = SealedRecords(dht, transport.membership)
            if direct:
                channel = exchange.sender.direct = DirectChannel(
                    exchange.streams,
                    open_stream=partial(dial, protocol=protocol + DIRECT),
                    addresses=daemon.known_at,
                    serve=exchange.receiver.serve_direct,
                    hosts=[] if client_mode else [host(address) for address in host_maddrs],
                    port=direct_port,
                )
                await daemon.serve_streams(protocol + DIRECT, channel.answer)
                await circuits.serve(protocol + DIRECT, channel.answer)
            await daemon.serve_streams(protocol, serve)
            await circuits.serve(protocol, serve)
            await relay.start()
            circuits.register(initial_peers if finder.now.private else ())
            _tell(finder.now)
        except BaseException:
            await transport.close()
            raise
        return transport

    async def send(
        self, peer: str, header: bytes, payload: memoryview | None = None, *, written: Written = unnoticed
    ) -> None:
        """As `Transport.send`."""
        await self._exchange.send(peer, header, payload, written)

    def addresses(self) -> list[str]:
        """As `Transport.addresses`."""
        own = self._dht.daemon.addresses
        if not self.reach.private:
            return [*self._finder.mapped, *own]
        return [*self._circuits.addresses, *(address for address in own if not is_loopback(address))]

    async def introduce(self, peer: str, addresses: Sequence[str]) -> None:
        """As `Transport.introduce`."""
        self._dht.daemon.introduce(peer, [a for a in addresses if not leads_over_a_relay(a)])
        self._circuits.introduce(peer, addresses)

    async def store(self, key: str, subkey: str, value: bytes, ttl_s: float, *, owned: bool = True) -> bool:
        """As `Transport.store`."""
        return await self._records.store(key, subkey, value, ttl_s, owned=owned)

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        """As `Transport.fetch`."""
        return await self._records.fetch(key)

    def sign(self, statement: bytes) -> str:
        """As `Transport.sign`."""
        return self._dht.sign(statement)

    def signed_by(self, peer: str, statement: bytes, proof: str) -> bool:
        """As `Transport.signed_by`."""
        return self._dht.signed_by(peer, statement, proof)

    async def close(self) -> None:
        """As `Transport.close`."""
        await self._finder.close()
        await self._paths.close()
        await self._circuits.close()
        await self._exchange.close()
        await self._relay.close()
        await self._dht.close()


def _tell(reach: Reach) -> None:
    if reach.private:
        log.info("no other peer can dial this one: %s", reach.why)
        log.info("it exchanges over connections that it dials, and through relays where the other peer is private too")
    elif reach.kind != "unknown":
        log.info("%s", reach.why)
