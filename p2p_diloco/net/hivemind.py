"""The transport over Hivemind: its DHT for records, its libp2p daemon for streams.

Law: the only file that imports Hivemind, and one that nobody imports until they need a swarm (it loads
torch). All of it runs in the caller's event loop: no fork, no thread. p2pd, the daemon, is a child process
that ends with this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any

import msgpack
from cryptography.hazmat.primitives import serialization

from p2p_diloco.addresses import by_reach, host
from p2p_diloco.errors import ConfigError, P2PDilocoError, Refused
from p2p_diloco.net.addresses import parse, peer_of
from p2p_diloco.net.direct import DirectChannel
from p2p_diloco.net.exchange import Exchange
from p2p_diloco.net.framing import VERSION
from p2p_diloco.net.identity import IdentityFile
from p2p_diloco.net.interface import (
    KEY_BYTES_MAX,
    TTL_S_MAX,
    VALUE_BYTES_MAX,
    Inbox,
    Limits,
    Traffic,
    Unreachable,
    check_record,
)
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.reasons import last_line, likely_reason, nobody_listens, none_reached, tells_nothing
from p2p_diloco.net.records import newest_records
from p2p_diloco.net.signing import SigningKey, signer
from p2p_diloco.net.spare import spared

with spared("scipy.optimize"):  # a sixth of the start, for an averager that isn't used
    from hivemind.dht import DHTNode
    from hivemind.dht.crypto import RSASignatureValidator
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.validation import DHTRecord
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.proto import crypto_pb2, dht_pb2
    from hivemind.utils.crypto import RSAPrivateKey
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr

log = logging.getLogger(__name__)

BOOTSTRAP_DIAL_S = 5.0
"""How long an initial peer may take to be dialled; with the question for its clock, below 10 s in all."""
DHT_RPC_S = 3.0
"""How long one peer of the DHT may take to answer; it is asked no further for a while then."""
DHT_CALL_S = 15.0
"""How long a whole `store` or `fetch` may take."""
CLOCK_DIFFERENCE_S_MAX = 3.0
"""What the DHT puts up with: a record's life is told in the writer's time and judged in the reader's."""
REJOIN_EVERY_S = 15.0
"""How often initial peers that the DHT has lost sight of are greeted again."""
CLOSE_S = 3.0
"""How long the daemon may take to end before it is killed."""
REAP_S = 0.1
"""How long asyncio may take to notice that a daemon which failed to start has ended."""
ADDRESSES_PER_PEER_MAX = 16
DIRECT = "/direct"
"""What the name of the protocol has more where peers talk about direct connections."""

_SIGNATURE_BYTES = 400  # of a 2048-bit RSA key in base64, with its marker
_OWNER_BYTES = 420  # the public key in OpenSSH's form, with its marker


class HivemindTransport:
    """A peer of a run, over libp2p; a `Transport`. Made by `create`, ended by `close`."""

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
        """Start a daemon, join the DHT of the initial peers (or found one), and listen for the run's
        messages. `direct`: payloads go over connections of our own wherever one can be made.

        Raises:
            AddressError: an initial peer's address can't be read.
            NoBootstrapReached: none of the initial peers answered; says what became of each.
            Refused: this clock differs from the initial peers' by more than the DHT puts up with.
            ConfigError: the identity or an address or port to listen on can't be used.
        """
        limits, traffic = limits or Limits(), Traffic()
        channel: DirectChannel | None = None

        def daemon_died(why: str) -> None:
            """Without its daemon this peer is dead to the others, and nothing is to say otherwise."""
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
        protocol = f"/p2p-diloco/{VERSION}/{run_id}"

        async def dial(peer: str) -> tuple[Pipe, str]:
            return await dht.open_stream(peer, protocol, timeout_s=exchange.streams.limits.connect_timeout_s)

        async def ask(peer: str) -> tuple[Pipe, str]:
            return await dht.open_stream(peer, protocol + DIRECT, timeout_s=exchange.streams.limits.connect_timeout_s)

        async def serve(peer: str, pipe: Pipe, seen_at: str) -> None:
            await exchange.receiver.serve(peer, pipe)

        exchange = Exchange(inbox, limits=limits, traffic=traffic, dial=dial)
        transport = cls(dht, exchange, traffic)
        try:
            if direct:
                hosts = [] if client_mode else [host(address) for address in host_maddrs]
                channel = exchange.direct = _channel(exchange, ask, dht.known_at, hosts, direct_port)
                await dht.serve_streams(protocol + DIRECT, channel.answer)
            await dht.serve_streams(protocol, serve)
        except BaseException:
            await transport.close()
            raise
        return transport

    async def send(self, peer: str, header: bytes, payload: memoryview | None = None) -> None:
        """As `Transport.send`."""
        await self._exchange.send(peer, header, payload)

    def addresses(self) -> list[str]:
        """As `Transport.addresses`."""
        return self._dht.addresses()

    async def introduce(self, peer: str, addresses: Sequence[str]) -> None:
        """As `Transport.introduce`."""
        self._dht.introduce(peer, addresses)

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


class DhtPeer:
    """A peer of the DHT that belongs to no run: a daemon and a DHT node. By itself it is what `bootstrap`
    serves.
    """

    def __init__(self, identity: IdentityFile, *, client_mode: bool, initial_peers: Sequence[str]) -> None:
        self.peer_id = ""
        self._identity = identity
        self._client_mode = client_mode
        self._initial_peers = tuple(initial_peers)
        self._known: dict[str, tuple[Multiaddr, ...]] = {}
        self._addresses: list[str] = []
        self._records = SignedRecords(_private_key(identity))
        self._p2p: Any = None
        self._node: Any = None
        self._died: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def create(
        cls,
        *,
        initial_peers: Sequence[str] = (),
        host_maddrs: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce_maddrs: Sequence[str] = (),
        identity_path: str | None = None,
        client_mode: bool = False,
        startup_timeout_s: float = 60.0,
        rejoin_every_s: float = REJOIN_EVERY_S,
        on_daemon_death: Callable[[str], None] | None = None,
    ) -> DhtPeer:
        """Start a daemon and join the DHT of the initial peers; without any, found one. One that is alive is
        enough.

        Raises:
            as `HivemindTransport.create`.
        """
        initial_peers = [parse(address) for address in initial_peers]
        identity = IdentityFile.claim(identity_path, P2P.generate_identity)
        try:
            self = cls(identity, client_mode=client_mode, initial_peers=initial_peers)
        except BaseException:
            identity.release()
            raise
        try:
            await self._start_daemon(host_maddrs, announce_maddrs, startup_timeout_s)
            self._tasks.append(asyncio.create_task(self._watch_daemon(on_daemon_death)))
            reached = await self._dial_initial_peers()
            await self._start_node(reached)
            self._tasks.append(asyncio.create_task(self._stay_joined(rejoin_every_s)))
        except BaseException:
            await self.close()
            raise
        return self

    # -- starting

    async def _start_daemon(
        self, host_maddrs: Sequence[str], announce_maddrs: Sequence[str], startup_timeout_s: float
    ) -> None:
        starting = asyncio.ensure_future(
            P2P.create(
                host_maddrs=None if self._client_mode else list(host_maddrs),
                announce_maddrs=list(announce_maddrs) or None,
                identity_path=str(self._identity.path),
                dht_mode="client" if self._client_mode else "server",
                no_listen=self._client_mode,
                use_relay=False,
                nat_port_map=False,
                auto_nat=False,
                startup_timeout=startup_timeout_s,
            )
        )
        try:
            self._p2p = await asyncio.shield(starting)
        except asyncio.CancelledError:  # asyncio may wait for ever for a process whose start is broken off
            await asyncio.wait([starting])
            if not starting.cancelled() and starting.exception() is None:
                self._p2p = starting.result()  # for `close`
            raise
        except ValueError:  # Hivemind's word for the one thing that it checks itself
            mend = "give the port that others dial"
            wrong, value = "can't have port 0", list(announce_maddrs)
            raise ConfigError(wrong, key="announce_maddrs", value=value, mend=mend) from None
        except P2PDaemonError as error:
            traceback.clear_frames(error.__traceback__)  # drops the half-made P2P while the loop runs,
            await asyncio.sleep(REAP_S)  # and lets asyncio see its process end
            if "address" in str(error) or "listen" in str(error):
                mend = "choose another port, or 0 to let the system choose"
                wrong = f"can't be listened on ({last_line(error)})"
                raise ConfigError(wrong, key="host_maddrs", value=list(host_maddrs), mend=mend) from None
            mend = "look whether this machine lets p2pd run"
            raise P2PDilocoError(f"the libp2p daemon doesn't start: {last_line(error)}", mend=mend) from None
        finally:
            self._identity.forget_if_ephemeral()
        self.peer_id = str(self._p2p.peer_id)
        await self._look_up_addresses()

    async def _dial_initial_peers(self) -> list[str]:
        """The addresses among the initial peers' that answer.

        Raises:
            NoBootstrapReached: none does.
        """
        for address in self._initial_peers:
            self.introduce(peer_of(address), [address])
        reasons = await asyncio.gather(*(self._greet(address) for address in self._initial_peers))
        reached = [address for address, reason in zip(self._initial_peers, reasons, strict=True) if reason is None]
        if not reached and self._initial_peers:
            raise none_reached(dict(zip(self._initial_peers, reasons, strict=True)))
        return reached

    async def _greet(self, address: str) -> str | None:
        """Connect to an initial peer; why it failed, or None."""
        try:
            await asyncio.wait_for(self._connect(address), BOOTSTRAP_DIAL_S)
        except asyncio.TimeoutError:
            return f"timed out after {BOOTSTRAP_DIAL_S:g} s: a firewall, or no such machine"
        except (P2PDaemonError, OSError, asyncio.IncompleteReadError, ValueError) as error:
            return likely_reason(error)
        return None

    async def _connect(self, address: str) -> None:
        host, _, peer = address.rpartition("/p2p/")
        if peer == self.peer_id:
            raise ValueError("that is this peer itself")
        await self._p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(host)] if host else [])

    async def _start_node(self, reached: Sequence[str]) -> None:
        self._node = await DHTNode.create(
            p2p=self._p2p,
            initial_peers=list(reached) or None,
            client_mode=self._client_mode,
            record_validator=self._records,
            wait_timeout=DHT_RPC_S,
            ensure_bootstrap_success=False,  # judged below, in our words
            strict=False,
            cache_locally=False,  # every `fetch` asks for the latest: a cache would serve nobody
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
        )
        if not reached:
            return
        differences = await asyncio.gather(*(self._clock_difference_s(peer_of(address)) for address in reached))
        known = [difference for difference in differences if difference is not None]
        if not known:
            raise none_reached(dict.fromkeys(reached, "something answers there, but no DHT of Hivemind"))
        least = min(known, key=abs)
        if abs(least) > CLOCK_DIFFERENCE_S_MAX:
            mend = f"set the clocks (NTP): at most {CLOCK_DIFFERENCE_S_MAX:g} s may lie between them"
            side = "behind" if least > 0 else "ahead of"
            raise Refused(f"this machine's clock is {abs(least):.1f} s {side} the initial peers'", mend=mend)

    async def _clock_difference_s(self, peer: str) -> float | None:
        """How far a DHT peer's clock is ahead of this one; None if it doesn't answer as one."""
        protocol = self._node.protocol
        request = dht_pb2.PingRequest(peer=protocol.node_info)
        asked_at = time.time()
        try:
            answer = await protocol.get_stub(PeerID.from_base58(peer)).rpc_ping(request, timeout=2.0)
        except Exception as error:  # whatever a stranger's answer makes Hivemind raise
            log.debug("%s doesn't tell its clock: %s", peer, error)
            return None
        return float(answer.dht_time) - (asked_at + time.time()) / 2

    # -- staying

    async def _watch_daemon(self, on_daemon_death: Callable[[str], None] | None) -> None:
        status = await self._p2p._child.wait()
        self._died = f"the libp2p daemon ended with status {status}"
        log.error("%s; this peer can't be reached any more", self._died)
        if on_daemon_death is not None:
            on_daemon_death(self._died)

    async def _stay_joined(self, every_s: float) -> None:
        """Keep addresses fresh, and greet initial peers that the DHT has lost: they restart, and partitions
        heal.
        """
        while True:
            await asyncio.sleep(every_s)
            try:
                present = {str(peer) for peer in self._node.protocol.routing_table.peer_id_to_uid}
                for address in self._initial_peers:
                    if peer_of(address) not in present and await self._greet(address) is None:
                        await self._node.protocol.call_ping(PeerID.from_base58(peer_of(address)))
                await self._look_up_addresses()
            except Exception as error:  # whatever Hivemind makes of its daemon's words; the next turn may do better
                log.debug("the DHT can't be looked after now: %r", error)

    async def _look_up_addresses(self) -> None:
        try:
            visible = await self._p2p.get_visible_maddrs(latest=True)
        except ValueError:  # none: it doesn't listen
            visible = []
        self._addresses = by_reach([str(address) for address in visible])

    def addresses(self) -> list[str]:
        """The full multiaddrs, with /p2p/<peer id>, under which others may reach this peer: public ones
        first.
        """
        return list(self._addresses)

    # -- streams

    def introduce(self, peer: str, addresses: Sequence[str]) -> None:
        """Learn where a peer can be dialled. Addresses that can't be read, or name another peer, are
        ignored.
        """
        known = []
        for address in list(addresses)[:ADDRESSES_PER_PEER_MAX]:
            host, _, named = address.rpartition("/p2p/")
            if named == peer and host:
                with contextlib.suppress(Exception):  # each of its parsers raises something else
                    known.append(Multiaddr(host))
        if known:
            self._known[peer] = tuple(known)

    def known_at(self, peer: str) -> list[str]:
        """The multiaddrs at which a peer was said to be."""
        return [str(address) for address in self._known.get(peer, ())]

    async def open_stream(self, peer: str, protocol: str, *, timeout_s: float) -> tuple[Pipe, str]:
        """A stream to a peer that serves the protocol, and the multiaddr at which it was found.

        Raises:
            Unreachable: it can't be had in time; says why.
        """
        if self._died is not None:
            raise Unreachable(self._died)
        try:
            return await asyncio.wait_for(self._open_stream(peer, protocol), timeout_s)
        except asyncio.TimeoutError:
            raise Unreachable(f"{peer}: no answer within {timeout_s:g} s") from None
        except Unreachable:
            raise
        except Exception as error:  # whatever Hivemind makes of its daemon's words
            raise Unreachable(f"{peer}: {likely_reason(error)}") from None

    async def _open_stream(self, peer: str, protocol: str) -> tuple[Pipe, str]:
        peer_id = PeerID.from_base58(peer)
        known = self._known.get(peer)
        try:
            if known is not None:
                await self._p2p._client.connect(peer_id, known)  # returns at once if connected
            stream, reader, writer = await self._p2p.call_binary_stream_handler(peer_id, protocol)
        except P2PDaemonError as error:
            refused = nobody_listens(error) or (tells_nothing(error) and await _all_refuse(known or ()))
            raise Unreachable(f"{peer}: {likely_reason(error)}", refused=refused) from None
        return await Pipe.adopt(reader, writer), str(stream.addr)

    async def serve_streams(self, protocol: str, serve: Callable[[str, Pipe, str], Any]) -> None:
        """Hand every stream that others open for the protocol to `serve(peer id, pipe, the peer's multiaddr)`, a
        coroutine function.
        """

        async def take(stream: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve(str(stream.peer_id), await Pipe.adopt(reader, writer), str(stream.addr))

        await self._p2p.add_binary_stream_handler(protocol, take)

    # -- records

    def sign(self, statement: bytes) -> str:
        """As `HivemindTransport.sign`."""
        return SigningKey(self._identity.path, self._identity.content).sign(statement)

    async def store(self, key: str, subkey: str, value: bytes, ttl_s: float, *, owned: bool = True) -> bool:
        """As `Transport.store`."""
        check_record(key, subkey, value, ttl_s)
        name = subkey.encode() + (self._records.local_public_key if owned else b"")
        storing = self._node.store(key, value, expiration_time=time.time() + ttl_s, subkey=name)
        try:
            return bool(await asyncio.wait_for(storing, DHT_CALL_S))
        except Exception as error:  # a timeout, or whatever Hivemind makes of its daemon's words
            log.warning("the record %s/%s was not stored: %r", key, subkey, error)
            return False

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        """As `Transport.fetch`."""
        try:
            found = await asyncio.wait_for(self._node.get(key, latest=True), DHT_CALL_S)
        except asyncio.TimeoutError:
            raise Unreachable(f"the DHT didn't answer within {DHT_CALL_S:g} s") from None
        except Exception as error:  # whatever Hivemind makes of its daemon's words, or of strangers'
            raise Unreachable(f"the DHT can't be asked: {error!r}") from None
        if found is None or not isinstance(found.value, dict):
            return {}
        return newest_records(found.value, now=time.time(), peer_of_key=_peer_of_key)

    # -- ending

    async def close(self) -> None:
        """End the daemon, in bounded time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._node is not None and self._p2p._child.returncode is None:  # else nobody answers
            with contextlib.suppress(asyncio.TimeoutError, P2PDaemonError, OSError):
                await asyncio.wait_for(self._node.shutdown(), CLOSE_S)
        if self._p2p is not None:
            try:
                await asyncio.wait_for(self._p2p.shutdown(), CLOSE_S)
            except asyncio.TimeoutError:
                self._p2p._child.kill()
            self._p2p._child._transport.close()  # or it complains when it is collected after the loop
            await asyncio.sleep(0)
        self._identity.release()


class SignedRecords(RSASignatureValidator):  # type: ignore[misc]  # Hivemind has no types
    """What this peer stores for others and believes: small, short-lived, well-formed, and signed where owned.

    Plain values (without a subkey) are refused, for nobody owns them, and one that lives long would displace
    a whole key. So is anything that doesn't decode: Hivemind's own reader would wait for ever over it.
    """

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record may be stored or believed."""
        try:
            return self._within_limits(record) and bool(super().validate(record)) and self._decodes(record)
        except Exception as error:  # whatever a stranger's bytes make the parsers raise
            log.debug("a record was ignored: %r", error)
            return False

    def _within_limits(self, record: DHTRecord) -> bool:
        return (
            record.subkey not in (DHTProtocol.IS_REGULAR_VALUE, DHTProtocol.IS_DICTIONARY)
            and len(record.subkey) <= KEY_BYTES_MAX + _OWNER_BYTES
            and len(record.value) <= VALUE_BYTES_MAX + _SIGNATURE_BYTES
            and record.expiration_time <= time.time() + TTL_S_MAX + CLOCK_DIFFERENCE_S_MAX
        )

    def _decodes(self, record: DHTRecord) -> bool:
        name, value = msgpack.unpackb(record.subkey), msgpack.unpackb(self.strip_value(record))
        return isinstance(name, bytes) and isinstance(value, bytes) and len(value) <= VALUE_BYTES_MAX


def _channel(
    exchange: Exchange,
    ask: Callable[[str], Awaitable[tuple[Pipe, str]]],
    known_at: Callable[[str], Sequence[str]],
    hosts: Sequence[str],
    port: int,
) -> DirectChannel:
    """Direct connections for what an exchange sends and takes.

    Raises:
        ConfigError: the port can't be listened on.
    """
    try:
        return DirectChannel(
            exchange.streams,
            open_stream=ask,
            addresses=known_at,
            serve=exchange.receiver.serve_direct,
            hosts=hosts,
            port=port,
        )
    except OSError as error:
        mend = "choose another port, or 0 to let the system choose"
        raise ConfigError(f"can't be listened on ({error})", key="direct_port", value=port, mend=mend) from None


async def _all_refuse(addresses: Sequence[Multiaddr]) -> bool:
    """Whether at each of these addresses a machine answers that nobody listens: asked by a plain socket."""

    async def refuses(address: Multiaddr) -> bool:
        match str(address).split("/"):
            case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port, *_]:
                try:
                    _, writer = await asyncio.open_connection(host, int(port))
                except OSError as error:
                    return isinstance(error, ConnectionRefusedError)
                writer.close()
        return False

    return bool(addresses) and all(await asyncio.gather(*map(refuses, addresses)))


def _private_key(identity: IdentityFile) -> RSAPrivateKey:
    """The key in an identity file, for signing records.

    Raises:
        ConfigError: it is no RSA key in libp2p's form.
    """
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    try:
        key.__setstate__({"_private_key": crypto_pb2.PrivateKey.FromString(identity.content).data})
    except Exception as error:  # each of its parsers raises something else
        mend = "name another file, and a key is made there"
        path = str(identity.path)
        raise ConfigError(f"holds no RSA key ({error})", key="identity_path", value=path, mend=mend) from None
    return key


@lru_cache(maxsize=1024)
def _peer_of_key(key: bytes) -> str:
    """The id of the peer that a public key in OpenSSH's form belongs to (libp2p's peer-ids specification)."""
    encoded = serialization.load_ssh_public_key(key).public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    message = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=encoded).SerializeToString()
    return str(PeerID(b"\x12\x20" + sha256(message).digest()))


class _Relay(logging.Handler):
    """Hivemind's warnings as lines of our own log."""

    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, "hivemind: %s", record.getMessage())


def _quieten_hivemind() -> None:
    """Undo what importing Hivemind does to this process's logging."""
    use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")
    theirs = logging.getLogger("hivemind")
    theirs.setLevel(logging.WARNING)
    theirs.propagate = False
    theirs.addHandler(_Relay())


_quieten_hivemind()
