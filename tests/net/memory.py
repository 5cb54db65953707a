"""A swarm within one event loop: the transport without sockets, for tests.

Law: behaves towards the node as the libp2p adapter does, refusals, limits and hints included. A test can cut, heal and
kill. Payloads are copied, so sender and receiver share no memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from hashlib import blake2b

from p2p_diloco.net.interface import (
    Inbox,
    Limits,
    Reach,
    Refusal,
    Traffic,
    Unreachable,
    Written,
    check_announced,
    check_outgoing,
    check_record,
    unnoticed,
)
from p2p_diloco.net.signing import as_text
from tests.net.inboxes import Quiet

log = logging.getLogger(__name__)


def signed(peer: str, kind: bytes, statement: bytes) -> str:
    """A stand-in for a peer's signature."""
    return as_text(blake2b(b"\0".join((peer.encode(), kind, statement))).digest())


class MemoryNetwork:
    """The peers, the cuts between them, and the DHT that they share.

    `delay_s`: how long a message takes. `clock`: the DHT's time, in seconds since 1970.
    """

    def __init__(self, *, delay_s: float = 0.0, clock: Callable[[], float] = time.time) -> None:
        self.delay_s = delay_s
        self.clock = clock
        self.peers: dict[str, MemoryTransport] = {}
        self.names: set[str] = set()
        self.records: dict[str, dict[tuple[str, str], tuple[bytes, float]]] = {}
        self._cuts: set[frozenset[str]] = set()

    def join(self, peer_id: str, inbox: Inbox, *, limits: Limits | None = None) -> MemoryTransport:
        """Add a peer. It may have the name of one that has ended."""
        assert peer_id not in self.peers, f"{peer_id} is already there"
        transport = MemoryTransport(self, peer_id, inbox, limits or Limits())
        self.peers[peer_id] = transport
        self.names.add(peer_id)
        return transport

    def cut(self, a: str, b: str) -> None:
        """Lose all messages between two peers; the sender notices at its deadline."""
        self._cuts.add(frozenset((a, b)))

    def heal(self) -> None:
        """Undo every cut."""
        self._cuts.clear()

    def kill(self, peer: str) -> None:
        """End a peer at once, as SIGKILL does. Peers with a link to it are told that it closed."""
        self.peers[peer].end()

    def is_cut(self, a: str, b: str) -> bool:
        """Whether messages between two peers are lost."""
        return frozenset((a, b)) in self._cuts


class DeafInbox(Quiet):
    """An inbox that refuses every message."""

    def admit(self, sender: str, header: bytes) -> int:
        """Refuse the message."""
        raise Refusal("this inbox takes no messages")


class MemoryTransport:
    """One peer of a `MemoryNetwork`; a `Transport`."""

    def __init__(self, network: MemoryNetwork, peer_id: str, inbox: Inbox, limits: Limits) -> None:
        self.peer_id = peer_id
        self.limits = limits
        self.traffic = Traffic()
        self.reach = Reach()
        self._network = network
        self._inbox = inbox
        self._links: dict[str, MemoryTransport] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._ended = asyncio.Event()

    async def send(
        self, peer: str, header: bytes, payload: memoryview | None = None, *, written: Written = unnoticed
    ) -> None:
        """As `Transport.send`."""
        check_outgoing(self.limits, header, payload)
        if payload is not None:
            await self._send_now(peer, header, payload)
        else:
            async with self._turns.setdefault(peer, asyncio.Lock()):
                await self._send_now(peer, header, None)

    async def _send_now(self, peer: str, header: bytes, payload: memoryview | None) -> None:
        remote = self._network.peers.get(peer)
        if self._ended.is_set():
            raise Unreachable("this peer is closing")
        if self._network.is_cut(self.peer_id, peer):
            await asyncio.sleep(self.limits.connect_timeout_s)
            raise Unreachable(f"{peer}: no answer within {self.limits.connect_timeout_s:g} s")
        if remote is None or remote is self:
            raise Unreachable(f"{peer}: no such peer", refused=peer in self._network.names)
        if self._network.delay_s:
            with nullcontext() if payload is None else remote.traffic.receiving():
                await asyncio.sleep(self._network.delay_s)
        self._links[peer], remote._links[self.peer_id] = remote, self
        size = len(header) + (payload.nbytes if payload is not None else 0)
        self.traffic.sent(peer, size)
        delivery = asyncio.ensure_future(remote._receive(self.peer_id, header, payload, size))
        either_end = [asyncio.ensure_future(end.wait()) for end in (self._ended, remote._ended)]
        try:
            timeout_s = self.limits.read_timeout_s
            await asyncio.wait([delivery, *either_end], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not delivery.done():
                raise Unreachable(f"{peer}: the stream broke, or no answer came in time")
            delivery.result()
        finally:
            for task in (delivery, *either_end):
                task.cancel()

    async def _receive(self, sender: str, header: bytes, payload: memoryview | None, size: int) -> None:
        try:
            await self._judge(sender, header, payload)
        except Refusal:
            self.traffic.refuse(sender)
            raise
        except Exception:
            log.exception("an error while receiving a message of %s", sender)
            self.traffic.refuse(sender)
            raise Refusal("the receiver failed on this message") from None
        self.traffic.received(sender, size)

    async def _judge(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        admitted_bytes = self._inbox.admit(sender, header)
        if payload is not None:
            check_announced(self.limits, payload.nbytes, admitted_bytes)
            payload = memoryview(bytearray(payload))
        await self._inbox.deliver(sender, header, payload)

    def addresses(self) -> list[str]:
        """As `Transport.addresses`; nothing can be dialled there."""
        return [f"/memory/{self.peer_id}/p2p/{self.peer_id}"]

    async def introduce(self, peer: str, addresses: Sequence[str]) -> None:
        """As `Transport.introduce`; every peer can be reached here anyway."""

    async def store(self, key: str, subkey: str, value: bytes, ttl_s: float, *, owned: bool = True) -> bool:
        """As `Transport.store`."""
        check_record(key, subkey, value, ttl_s)
        records = self._network.records.setdefault(key, {})
        owner = self.peer_id if owned else ""
        until = self._network.clock() + ttl_s
        _, known_until = records.get((subkey, owner), (b"", 0.0))
        if self._ended.is_set() or until <= known_until:
            return False
        records[subkey, owner] = (bytes(value), until)
        return True

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        """As `Transport.fetch`."""
        now = self._network.clock()
        newest: dict[str, tuple[bytes, float]] = {}
        for (subkey, owner), (value, until) in self._network.records.get(key, {}).items():
            named = subkey.partition("/")[0]
            foreign = named in self._network.names and named != owner
            if until > now and not foreign and until > newest.get(subkey, (b"", 0.0))[1]:
                newest[subkey] = (value, until)
        return newest

    def sign(self, kind: bytes, statement: bytes) -> str:
        """As `Transport.sign`."""
        return signed(self.peer_id, kind, statement)

    def signed_by(self, peer: str, proof: str, kind: bytes, statement: bytes) -> bool:
        """As `Transport.signed_by`."""
        return proof == signed(peer, kind, statement)

    async def close(self) -> None:
        """As `Transport.close`."""
        self.end()

    def end(self) -> None:
        """Leave the network at once."""
        if self._ended.is_set():
            return
        self._ended.set()
        del self._network.peers[self.peer_id]
        for peer, remote in self._links.items():
            remote._links.pop(self.peer_id, None)
            if not self._network.is_cut(self.peer_id, peer):
                asyncio.get_running_loop().call_soon(remote._inbox.closed, self.peer_id)
