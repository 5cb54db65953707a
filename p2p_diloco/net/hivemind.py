"""The transport over Hivemind: its DHT for records, its libp2p daemon for streams, and direct connections for payloads.

Law: connects the parts; decides nothing. Importing it loads torch, so import it only where the network is needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from p2p_diloco.addresses import host, is_loopback, leads_over_a_relay, peer_of
from p2p_diloco.config import PeerConfig
from p2p_diloco.net.certificates import Grant
from p2p_diloco.net.daemon import Daemon
from p2p_diloco.net.dht import DhtPeer
from p2p_diloco.net.direct import DirectChannel, Opened
from p2p_diloco.net.exchange import Exchange
from p2p_diloco.net.framing import VERSION
from p2p_diloco.net.hello import Hellos, Serve, any_run
from p2p_diloco.net.interface import Inbox, Limits, Reach, Records, Traffic, Written, unnoticed
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.membership import Membership, SealedRecords
from p2p_diloco.net.paths import Circuits, Paths
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.reach import DialBack, ReachFinder, ask_all, listens_at, together
from p2p_diloco.net.relay import Relay
from p2p_diloco.net.tls import Tls

log = logging.getLogger(__name__)

DIRECT = "/direct"
"""The suffix of the protocol by which peers ask for direct connections."""


class HivemindTransport:
    """A `Transport` over libp2p, for one peer of a run. Made by `create`, ended by `close`."""

    def __init__(
        self,
        dht: DhtPeer,
        exchange: Exchange,
        circuits: Circuits,
        paths: Paths,
        finder: ReachFinder,
        relay: Relay,
        hellos: Hellos | None,
        *,
        tunnelled: bool,
    ) -> None:
        self.peer_id = dht.peer_id
        self.membership = None if hellos is None else hellos.membership
        """This peer's membership of its private run; None: the run is open."""
        self._hellos = hellos
        self.traffic = exchange.streams.traffic
        self.plain: Records = dht
        """The records of the DHT itself, which strangers can read and store. In an open run there are no others."""
        self._records: Records = dht if self.membership is None else SealedRecords(dht, self.membership)
        self._dht, self._exchange = dht, exchange
        self._circuits, self._paths, self._finder, self._relay = circuits, paths, finder, relay
        self._tunnelled = tunnelled

    @property
    def limits(self) -> Limits:
        return self._exchange.streams.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._exchange.streams.limits = limits

    @property
    def reach(self) -> Reach:
        return self._finder.now

    @classmethod
    async def create(
        cls,
        inbox: Inbox,
        local: PeerConfig,
        *,
        limits: Limits | None = None,
        invitation: Invitation | None = None,
        on_daemon_death: Callable[[str], None] | None = None,
    ) -> HivemindTransport:
        """Start a daemon, join the DHT of the initial peers (or found one), and listen for the run's messages.

        `local`: the peer's settings, without `invite` and `open`, which are not read here. `invitation`: this peer's
        invitation to a private run, in which it exchanges with members only; None: the run is open. `on_daemon_death`:
        called with the reason if the daemon ends by itself.

        Raises:
            AddressError: an initial peer's address can't be read.
            NoBootstrapReached: none of the initial peers answered; the error gives the reason for each.
            Refused: this machine's clock differs too much from the initial peers'.
            ConfigError: the identity, the invitation, or an address or port to listen on, can't be used.
        """
        limits, traffic = limits or Limits(), Traffic()
        channel: DirectChannel | None = None
        answers: dict[str, DialBack] = {}
        membership: Membership | None = None

        def become_member(daemon: Daemon) -> Membership:
            """Make this peer's certificate, once its id is known."""
            nonlocal membership
            if membership is None:
                invited = invitation or Invitation.anybody(local.run_id)
                membership = Membership(invited, daemon.peer_id, time.time())
                daemon.chain = membership.chain if invitation is not None else None
            return membership

        def daemon_died(why: str) -> None:
            """End the direct connections when the daemon has died. Otherwise a peer with an open direct connection
            would not notice that this peer can no longer be reached."""
            if channel is not None:
                channel.end()
            if on_daemon_death is not None:
                on_daemon_death(why)

        async def can_be_dialled(daemon: Daemon, reached: Sequence[str]) -> bool:
            become_member(daemon)
            answers.update(await ask_all(daemon, [peer_of(address) for address in reached]))
            return not together(daemon.addresses, answers.values()).private

        dht = await DhtPeer.create(local, on_daemon_death=daemon_died, on_reached=can_be_dialled)
        daemon, protocol = dht.daemon, f"/p2p-diloco/{VERSION}/{local.run_id}"

        async def dial(peer: str, *, around: bool = False, protocol: str = protocol) -> Opened:
            timeout_s = exchange.streams.limits.connect_timeout_s
            opened = await paths.open(peer, protocol, timeout_s=timeout_s, around=around)
            return opened if hellos is None else await hellos.greet(peer, opened, timeout_s)

        async def serve(peer: str, pipe: Pipe, seen_at: str) -> None:
            await exchange.receiver.serve(peer, pipe)

        async def serve_streams(protocol: str, serve: Serve) -> None:
            """Serve a protocol's streams, direct and relayed ones; in a private run only those of members."""
            guarded = serve if hellos is None else hellos.guarded(serve)
            await daemon.serve_streams(protocol, guarded)
            await circuits.serve(protocol, guarded)

        def cut(peer: str) -> None:
            exchange.streams.cut(peer)
            relay.cut(peer)

        def linked() -> list[str]:
            """The initial peers, and the peers to which this peer has a link."""
            return [*map(peer_of, local.initial_peers), *exchange.links.peers()]

        def reach_changed(reach: Reach) -> None:
            _tell(reach)
            circuits.register(local.initial_peers if reach.private else ())

        exchange = Exchange(inbox, limits=limits, traffic=traffic, dial=dial)
        hellos: Hellos | None = None
        try:
            own = become_member(daemon)  # in client mode, `can_be_dialled` wasn't called
            if invitation is not None:
                hellos = Hellos(own, cut)
                exchange.streams.admits, exchange.streams.groups = hellos.admits, hellos.grant_of
            tls = Tls(own, dht.key)
            circuits = Circuits(daemon, tls, hellos)
        except BaseException:
            await dht.close()
            raise
        paths = Paths(daemon, circuits, linked)
        relay = Relay(daemon, local.relay_mbit, any_run if hellos is None else hellos.run_of)
        finder = ReachFinder(daemon, answers, linked, reach_changed)
        # a process on this machine would reach it there, so what answers at these addresses is elsewhere
        tunnelled = bool(local.initial_peers) and all(map(is_loopback, local.initial_peers)) and finder.now.private
        tunnelled = tunnelled and not local.client_mode
        transport = cls(dht, exchange, circuits, paths, finder, relay, hellos, tunnelled=tunnelled)
        try:
            if local.direct:
                channel = exchange.direct = DirectChannel(
                    exchange.streams,
                    tls,
                    open_stream=partial(dial, protocol=protocol + DIRECT),
                    addresses=daemon.dialable_at,
                    found_at=daemon.found_at,
                    serve=partial(exchange.receiver.serve, direct=True),
                    hosts=[] if local.client_mode else [host(address) for address in listens_at(local)],
                    port=local.direct_port,
                )
                await serve_streams(protocol + DIRECT, channel.answer)
            await serve_streams(protocol, serve)
            await relay.start()
            circuits.register(local.initial_peers if finder.now.private else ())
        except BaseException:
            await transport.close()
            raise
        return transport

    def tell_reach(self) -> None:
        """Log whether other peers can dial this one. A change is logged without this call."""
        _tell(self.reach)
        if self._tunnelled:
            log.warning(
                "the initial peers have addresses on this machine, but can't dial this peer there: it reaches them "
                "through a tunnel, and exchanges through their relay"
            )

    async def send(
        self, peer: str, header: bytes, payload: memoryview | None = None, *, written: Written = unnoticed
    ) -> None:
        await self._exchange.send(peer, header, payload, written)

    def addresses(self) -> list[str]:
        own = self._dht.daemon.addresses
        if not self.reach.private:
            return [*self._finder.mapped, *own]
        return [*self._circuits.addresses, *(address for address in own if not is_loopback(address))]

    async def introduce(self, peer: str, addresses: Sequence[str]) -> None:
        direct = [address for address in addresses if not leads_over_a_relay(address)]
        if self._tunnelled:
            direct = [address for address in direct if not is_loopback(address)]  # those of other machines
        self._dht.daemon.introduce(peer, direct)
        self._circuits.introduce(peer, addresses)

    def meet(self, addresses: Sequence[str]) -> None:
        self._dht.meet(addresses)

    async def store(self, key: str, subkey: str, value: bytes, ttl_s: float, *, owned: bool = True) -> bool:
        return await self._records.store(key, subkey, value, ttl_s, owned=owned)

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        return await self._records.fetch(key)

    def sign(self, kind: bytes, statement: bytes) -> str:
        return self._dht.sign(kind, statement)

    def signed_by(self, peer: str, proof: str, kind: bytes, statement: bytes) -> bool:
        return self._dht.signed_by(peer, proof, kind, statement)

    def member(self, peer: str) -> Grant | None:
        """The grant by which a peer is a member of this private run; None for any other peer, and in an open run."""
        return None if self._hellos is None else self._hellos.member(peer)

    def role_of(self, peer: str) -> str | None:
        """The role that a peer's invitation allows; empty if the peer is no member; None in an open run."""
        member = self.member(peer)
        return member.role if member is not None else None if self.membership is None else ""

    def grant_of(self, peer: str) -> Hashable | None:
        """The grant by which a member was admitted; the peer itself if it is no member; None in an open run."""
        return None if self._hellos is None else self._hellos.grant_of(peer)

    def name_of(self, peer: str) -> str:
        """The name in a peer's invitation; empty if the peer is no member, and in an open run."""
        member = self.member(peer)
        return "" if member is None else member.name

    def revoke(self, packed: bytes) -> bool:
        """As `Membership.revoke`; connections with members whose grants are revoked end at once. False in an open
        run."""
        return self._hellos is not None and self._hellos.revoke(packed)

    async def close(self) -> None:
        if self._hellos is not None:
            await self._hellos.close()
        await self._finder.close()
        await self._paths.close()
        await self._circuits.close()
        await self._exchange.close()
        await self._relay.close()
        await self._dht.close()


def _tell(reach: Reach) -> None:
    if reach.private:
        log.info("no other peer can dial this one: %s", reach.why)
        log.info("this peer exchanges over connections that it dials, and with other private peers through relays")
    elif reach.kind != "unknown":
        log.info("%s", reach.why)
