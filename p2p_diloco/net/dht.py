"""A member of the DHT: a libp2p daemon with Hivemind's DHT node. It works without a run; the command `bootstrap` starts
such a member.

Law: joins, stays joined, stores and fetches records; knows no messages. All of it runs in the caller's event loop: no
fork, no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from p2p_diloco.addresses import canonical, peer_of
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import Refused
from p2p_diloco.net.attempts import within
from p2p_diloco.net.daemon import Daemon
from p2p_diloco.net.hivemind_library import DHTID, DHTNode, DHTRecord, DictionaryDHTValue, P2PDaemonError, PeerID
from p2p_diloco.net.interface import CLOCK_DIFFERENCE_S_MAX, Unreachable, check_record
from p2p_diloco.net.private_files import IdentityFile
from p2p_diloco.net.probing import ask
from p2p_diloco.net.reach import listens_at
from p2p_diloco.net.reasons import none_reached
from p2p_diloco.net.records import CappedStorage, NoCache, SignedRecords, bound_requests, newest_records
from p2p_diloco.net.signing import SigningKey, as_text, from_text, signed_by
from p2p_diloco.net.stale_sockets import check_writable
from p2p_diloco.net.streams import stop

Found = dict[bytes, tuple[bytes, float]]
"""Subkey -> (value, expiration)."""


class Anchors:
    """The initial peers of a DHT node, and the node itself: each record is stored there too, and they are asked for
    each key. If nobody has a record of it, peers that were met earlier are asked as well.

    The DHT keeps a record at the members whose ids are nearest to its key. Ids are free: one stranger can invent as
    many as it likes, all nearer to a run's keys than any honest member, and would then be the only one that is asked.
    It can't put itself in the place of an initial peer, whose id the user has given, and which the connection proves.

    An initial peer that doesn't answer costs one deadline, and isn't asked again for a while.
    """

    def __init__(self, node: Any, initial_peers: Sequence[str], records: SignedRecords) -> None:
        self._node, self._records = node, records
        self._peers = [PeerID.from_base58(peer) for peer in {peer_of(address) for address in initial_peers}]
        self._met: list[Any] = []

    def add(self, peer: str) -> None:
        """Ask this peer, too, for what nobody else has. Each member stores its own records at itself."""
        self._met.append(PeerID.from_base58(peer))

    async def store(self, key: str, subkey: bytes, value: bytes, until: float) -> bool:
        """Store a record; returns whether this peer or an initial peer has it now."""
        protocol, key_id = self._node.protocol, DHTID.generate(source=key)
        name, packed = protocol.serializer.dumps(subkey), protocol.serializer.dumps(value)
        signed = self._records.sign_value(DHTRecord(key_id.to_bytes(), name, packed, until))
        here = bool(protocol.storage.store(key_id, signed, until, subkey=subkey))

        async def at(peer: Any) -> bool:
            if peer in self._node.blacklist:
                return False
            stored = await protocol.call_store(peer, [key_id], [signed], until, subkeys=[subkey])
            (self._node.blacklist.register_failure if stored is None else self._node.blacklist.register_success)(peer)
            return bool(stored and stored[0])

        return any([here, *await asyncio.gather(*map(at, self._peers))])

    async def fetch(self, key: str) -> Found:
        """What the initial peers have under a key. Of several records with one subkey the one that expires last."""
        return await self._ask(self._peers, key)

    async def fetch_from_the_met(self, key: str) -> Found:
        """What peers that were met earlier have under a key."""
        return await self._ask(self._met, key)

    async def _ask(self, peers: Sequence[Any], key: str) -> Found:
        key_id = DHTID.generate(source=key)
        answers = await asyncio.gather(*(self._node._call_find_with_blacklist(peer, [key_id]) for peer in peers))
        return latest(*(self._read(key_id, answer[key_id][0]) for answer in answers if answer))

    def _read(self, key_id: Any, found: Any) -> Found:
        """The valid records in an initial peer's answer; Hivemind has checked them."""
        if found is None or not isinstance(found.value, DictionaryDHTValue):
            return {}
        serializer, read = self._node.protocol.serializer, {}
        for subkey, (signed, until) in found.value.items():
            record = DHTRecord(key_id.to_bytes(), serializer.dumps(subkey), signed, until)
            read[subkey] = serializer.loads(self._records.strip_value(record)), until
        return read


def latest(*found: Found) -> Found:
    """All that was found; of several records with one subkey the one that expires last."""
    kept: Found = {}
    for records in found:
        for subkey, (value, until) in records.items():
            if until > kept.get(subkey, (b"", 0.0))[1]:
                kept[subkey] = value, until
    return kept


log = logging.getLogger(__name__)

RPC_S = 3.0
"""Deadline for one DHT peer's answer. A peer that misses it isn't asked again for a while."""
CALL_S = 15.0
"""Deadline for a whole `store` or `fetch`."""
REJOIN_EVERY_S = 15.0
"""Seconds between two attempts to reconnect to initial peers that the DHT has lost."""
START_S = 60.0
"""How long the daemon may take to start."""
CLOCK_S = 2.0
"""Deadline for asking an initial peer for its time."""
MET_MAX = 8
"""The most addresses of peers met earlier that are dialled at the start."""
CLOSE_S = 3.0
"""How long the DHT node may take to end."""


class DhtPeer:
    """A member of the DHT. Made by `create`, ended by `close`."""

    def __init__(
        self,
        daemon: Daemon,
        node: Any,
        anchors: Anchors,
        key: SigningKey,
        records: SignedRecords,
        made: contextlib.AsyncExitStack,
    ) -> None:
        self.daemon = daemon
        self.peer_id = daemon.peer_id
        self._node, self._anchors = node, anchors
        self.key = key
        """This peer's private key."""
        self._records = records
        self._made = made

    @classmethod
    async def create(
        cls,
        local: PeerConfig,
        *,
        on_daemon_death: Callable[[str], None] | None = None,
        on_reached: Callable[[Daemon, Sequence[str]], Awaitable[bool]] | None = None,
    ) -> DhtPeer:
        """Start a daemon and join the DHT of the initial peers, at least one of which must answer. Without initial
        peers, found a DHT.

        `on_reached`: called with the daemon and the initial peers that answer, but not in client mode; returns whether
        other peers can dial this peer. If they can't, this peer serves no records: no request for them would reach it.

        Raises:
            as `HivemindTransport.create`.
        """
        initial_peers = [canonical(address) for address in local.initial_peers]
        check_writable()
        async with contextlib.AsyncExitStack() as made:
            identity = IdentityFile.claim(None if local.identity_path is None else str(local.identity_path))
            made.callback(identity.release)
            daemon = await Daemon.start(
                identity_path=str(identity.path),
                host_maddrs=listens_at(local),
                announce_maddrs=local.announce_maddrs,
                client_mode=local.client_mode,
                map_port=local.map_port,
                timeout_s=START_S,
                on_death=on_daemon_death,
            )
            made.push_async_callback(daemon.close)
            identity.forget_if_ephemeral()
            reached = await _greet(daemon, initial_peers)
            serves = not local.client_mode and (on_reached is None or await on_reached(daemon, reached))
            records = SignedRecords(identity.key)
            bound_requests()
            node = await DHTNode.create(
                p2p=daemon.p2p,
                initial_peers=reached or None,
                client_mode=not serves,
                record_validator=records,
                wait_timeout=RPC_S,
                ensure_bootstrap_success=False,  # checked below, with errors of our own
                strict=False,
                cache_locally=False,  # every `fetch` asks for the latest record, so a cache would never be read
                cache_nearest=0,
                cache_on_store=False,
                cache_refresh_before_expiry=0,
            )
            node.protocol.storage, node.protocol.cache = CappedStorage(), NoCache()
            made.push_async_callback(_end_node, node, daemon)
            if reached:
                await _check_clocks(daemon, reached)
            staying = asyncio.create_task(_stay_joined(daemon, node, initial_peers))
            made.push_async_callback(stop, staying)
            anchors = Anchors(node, initial_peers, records)
            return cls(daemon, node, anchors, identity.key, records, made.pop_all())

    def sign(self, kind: bytes, statement: bytes) -> str:
        return as_text(self.key.sign(kind, statement))

    def signed_by(self, peer: str, proof: str, kind: bytes, statement: bytes) -> bool:
        try:
            return signed_by(peer, from_text(proof), kind, statement)
        except ValueError:
            return False

    async def store(self, key: str, subkey: str, value: bytes, ttl_s: float, *, owned: bool = True) -> bool:
        check_record(key, subkey, value, ttl_s)
        name = self._records.owned(subkey.encode()) if owned else subkey.encode()
        until = time.time() + ttl_s
        storing = self._node.store(key, value, expiration_time=until, subkey=name)
        anchored = self._anchors.store(key, name, value, until)
        try:
            return any(await within(CALL_S, asyncio.gather(storing, anchored)))
        except Exception as error:  # a timeout, or any exception of Hivemind's
            log.warning("the record %s/%s was not stored: %r", key, subkey, error)
            return False

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        try:
            getting = asyncio.gather(self._node.get(key, latest=True), self._anchors.fetch(key))
            found, anchored = await within(CALL_S, getting)
            if found is None and not anchored:
                anchored = await within(CALL_S, self._anchors.fetch_from_the_met(key))
        except asyncio.TimeoutError:
            raise Unreachable(f"the DHT didn't answer within {CALL_S:g} s") from None
        except Exception as error:  # Hivemind raises exceptions of many kinds for answers of its daemon or of strangers
            raise Unreachable(f"the DHT request failed: {error!r}") from None
        near = found.value if found is not None and isinstance(found.value, dict) else {}
        return newest_records(latest(near, anchored))

    def meet(self, addresses: Sequence[str]) -> None:
        """Connect in the background to peers that were met earlier, at these addresses. Those that answer are asked for
        records that nobody else has: a stranger may surround a key, and the initial peers may have restarted."""
        for address in addresses[:MET_MAX]:
            self._made.push_async_callback(stop, asyncio.create_task(self._meet(address)))

    async def _meet(self, address: str) -> None:
        if peer_of(address) != self.peer_id and await self.daemon.greet(address) is None:
            self._anchors.add(peer_of(address))

    async def close(self) -> None:
        await self._made.aclose()


async def _greet(daemon: Daemon, initial_peers: Sequence[str]) -> list[str]:
    """Connect to all initial peers; returns the addresses of those that answer.

    Raises:
        NoBootstrapReached: none of them answers.
    """
    for address in initial_peers:
        daemon.introduce(peer_of(address), [address])
    outcomes = dict(zip(initial_peers, await asyncio.gather(*map(daemon.greet, initial_peers)), strict=True))
    reached = [address for address, reason in outcomes.items() if reason is None]
    if outcomes and not reached:
        raise none_reached(outcomes)
    return reached


async def _check_clocks(daemon: Daemon, reached: Sequence[str]) -> None:
    """Compare this machine's clock with the clocks of the initial peers.

    Raises:
        NoBootstrapReached: none of them answers as a peer of the DHT.
        Refused: even the clock nearest to this machine's differs too much.
    """
    differences = await asyncio.gather(*(_clock_difference_s(daemon, peer_of(address)) for address in reached))
    known = [difference for difference in differences if difference is not None]
    if not known:
        raise none_reached(dict.fromkeys(reached, "something else answers there, not Hivemind's DHT"))
    least = min(known, key=abs)
    if abs(least) > CLOCK_DIFFERENCE_S_MAX:
        mend = f"set the clocks (NTP): at most {CLOCK_DIFFERENCE_S_MAX:g} s may lie between them"
        side = "behind" if least > 0 else "ahead of"
        raise Refused(f"this machine's clock is {abs(least):.1f} s {side} the initial peers'", mend=mend)


async def _clock_difference_s(daemon: Daemon, peer: str) -> float | None:
    """Ask a DHT peer for its time; returns the seconds by which its clock is ahead of this machine's. None if the peer
    doesn't answer the DHT's ping."""
    try:
        return (await ask(daemon, peer, timeout_s=CLOCK_S)).clock_ahead_s
    except Unreachable as error:
        log.debug("the clock of an initial peer can't be read: %s", error)
        return None


async def _stay_joined(daemon: Daemon, node: Any, initial_peers: Sequence[str]) -> None:
    """Until cancelled, update this peer's addresses, and reconnect to initial peers that the DHT has lost: they may
    have restarted, or may be back after a network partition. A bootstrap without an identity file has another id then;
    whoever joins through it finds the others because they have met it."""
    while True:
        await asyncio.sleep(REJOIN_EVERY_S)
        try:
            present = {str(peer) for peer in node.protocol.routing_table.peer_id_to_uid}
            for address in initial_peers:
                if peer_of(address) in present or (met := await daemon.meet(address)) is None or met in present:
                    continue
                peer = PeerID.from_base58(met)
                if await node.protocol.call_ping(peer) is not None:
                    node.blacklist.register_success(peer)  # else it would not be asked for as long as it was gone
            await daemon.look_up_addresses()
        except Exception as error:  # Hivemind raises exceptions of many kinds; the next turn may succeed
            log.debug("reconnecting to the DHT failed; the next attempt follows soon: %r", error)


async def _end_node(node: Any, daemon: Daemon) -> None:
    if daemon.runs:  # without a daemon the node would wait for answers in vain
        with contextlib.suppress(asyncio.TimeoutError, P2PDaemonError, OSError):
            await asyncio.wait_for(node.shutdown(), CLOSE_S)
