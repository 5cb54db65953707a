"""The transport over Hivemind: its DHT for records, its libp2p daemon for streams, and direct connections for payloads.

Law: connects the parts; decides nothing. Importing it loads torch, so import it only where a swarm is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from p2p_diloco.addresses import host
from p2p_diloco.net.dht import DhtPeer
from p2p_diloco.net.direct import DirectChannel, Opened
from p2p_diloco.net.exchange import Exchange
from p2p_diloco.net.framing import VERSION
from p2p_diloco.net.interface import Inbox, Limits, Traffic
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.signing import signer

DIRECT = "/direct"
"""The suffix of the protocol by which peers ask for direct connections."""


class HivemindTransport:
    """A `Transport` over libp2p, for one peer of a run. Made by `create`, ended by `close`."""

    def __init__(self, dht: DhtPeer, exchange: Exchange, traffic: Traffic) -> None:
        self.peer_id = dht.peer_id
        self.traffic = traffic
        self._dht = dht
        self._exchange = exchange

    @property
    def limits(self) -> Limits:
        """As `Transport.limits`."""
        return self._exchange.streams.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._exchange.streams.limits = limits

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
        direct: bool = True,
        direct_port: int = 0,
        limits: Limits | None = None,
        startup_timeout_s: float = 60.0,
        on_daemon_death: Callable[[str], None] | None = None,
    ) -> HivemindTransport:
        """Start a daemon, join the DHT of the initial peers (or found one), and listen for the run's messages.

        `direct`: send payloads over direct connections wherever one can be made.

        Raises:
            AddressError: an initial peer's address can't be read.
            NoBootstrapReached: none of the initial peers answered; the error gives the reason for each.
            Refused: this machine's clock differs too much from the initial peers'.
            ConfigError: the identity, or an address or port to listen on, can't be used.
        """
        limits, traffic = limits or Limits(), Traffic()
        channel: DirectChannel | None = None

        def daemon_died(why: str) -> None:
            """End the direct connections too: peers that still hold one would not notice that this peer can't be
            reached."""
            if channel is not None:
                channel.end()
            if on_daemon_death is not None:
                on_daemon_death(why)

        dht = await DhtPeer.create(
            initial_peers=initial_peers,
            host_maddrs=host_maddrs,
            announce_maddrs=announce_maddrs,
            identity_path=identity_path,
            client_mode=client_mode,
            startup_timeout_s=startup_timeout_s,
            on_daemon_death=daemon_died,
        )
        daemon, protocol = dht.daemon, f"/p2p-diloco/{VERSION}/{run_id}"

        async def dial(peer: str, protocol: str = protocol) -> Opened:
            return await daemon.open_stream(peer, protocol, timeout_s=exchange.streams.limits.connect_timeout_s)

        async def serve(peer: str, pipe: Pipe, seen_at: str) -> None:
            await exchange.receiver.serve(peer, pipe)

        exchange = Exchange(inbox, limits=limits, traffic=traffic, dial=dial)
        transport = cls(dht, exchange, traffic)
        try:
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
            await daemon.serve_streams(protocol, serve)
        except BaseException:
            await transport.close()
            raise
        return transport

    async def send(self, peer: str, header: bytes, payload: memoryview | None = None) -> None:
        """As `Transport.send`."""
        await self._exchange.send(peer, header, payload)

    def addresses(self) -> list[str]:
        """As `Transport.addresses`."""
        return list(self._dht.daemon.addresses)

    async def introduce(self, peer: str, addresses: Sequence[str]) -> None:
        """As `Transport.introduce`."""
        self._dht.daemon.introduce(peer, addresses)

    async def store(self, key: str, subkey: str, value: bytes, ttl_s: float, *, owned: bool = True) -> bool:
        """As `Transport.store`."""
        return await self._dht.store(key, subkey, value, ttl_s, owned=owned)

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        """As `Transport.fetch`."""
        return await self._dht.fetch(key)

    def sign(self, statement: bytes) -> str:
        """As `Transport.sign`."""
        return self._dht.sign(statement)

    def signed_by(self, peer: str, statement: bytes, proof: str) -> bool:
        """As `Transport.signed_by`."""
        return signer(statement, proof) == peer

    async def close(self) -> None:
        """As `Transport.close`."""
        await self._exchange.close()
        await self._dht.close()
