"""What the node asks of a transport, and what a transport asks of the node.

Law: types only. No socket, no loop, no Hivemind; any class that satisfies `Transport` is an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from p2p_diloco.net.bandwidth import Bandwidth

VALUE_BYTES_MAX = 1024
"""The largest value that one DHT record holds. The signature and the owner's marker add about 750 bytes. All records
under one key travel in one message, and 4 MiB of them would cut a peer off from the DHT for good."""

KEY_BYTES_MAX = 256
"""The longest key or subkey of a DHT record, in UTF-8."""

TTL_S_MAX = 24 * 3600.0
"""The longest life of a DHT record. Records can't be deleted, so each must expire."""

PEERS_COUNTED_MAX = 4096
"""How many peers `Traffic` counts apart. Identities cost nothing, so the table needs a bound; the totals count all
peers."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a transport lets other peers cost it, in bytes and seconds. The default timeouts are those of a peer that is
    in no run yet; a run sets its own, from its `heartbeat_timeout`.
    """

    header_bytes_max: int = 64 * 1024
    """The longest header, with or without a payload."""
    payload_bytes_max: int = 256 * 1024 * 1024
    """The longest payload, even if `Inbox.admit` allows more. A run whose shards need more can't be joined."""
    connect_timeout_s: float = 5.0
    """How long it may take to dial a peer and open a stream."""
    read_timeout_s: float = 10.0
    """How long a transfer may stand still, and how long an answer may take."""
    write_timeout_s: float = 10.0
    """How long a frame may wait until the transport takes more."""
    streams_max: int = 64
    """How many payloads may be under way at once in each direction; further ones wait."""
    links_max: int = 1024
    """How many links other peers may keep open to this one; a newer link of the same peer replaces the older one. As
    many streams over libp2p may wait for further payloads."""
    rate_bytes_per_s_min: float = 64 * 1024.0
    """The slowest transfer that isn't cut off (see `transfer_timeout_s`)."""

    def transfer_timeout_s(self, payload_bytes: int) -> float:
        """How long a payload of so many bytes may take at most, even if it comes steadily."""
        return self.read_timeout_s + payload_bytes / self.rate_bytes_per_s_min


class Refusal(Exception):
    """The remote, or a check on this side, refused a message. The peer is there, and would refuse it again."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unreachable(Exception):
    """The peer couldn't be dialled, the stream broke, or a deadline passed. The message may or may not have arrived.

    `refused`: every known address of the peer refused the connection. It stays False after a broken stream or a passed
    deadline, and for a peer whose address isn't known.
    """

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class Inbox(Protocol):
    """What the node gives the transport. Every method is called in the transport's event loop."""

    def admit(self, sender: str, header: bytes) -> int:
        """How many bytes of payload may come with this header (0: none). Called for every message, before `deliver`.

        Raises:
            Refusal: with the reason that goes back to the sender.
        """
        ...

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        """Take a message. Once this returns, the message is accepted and the sender's `send` returns.

        The inbox may keep the payload's memory. Messages of a link are delivered one after the other, so return soon:
        after its `read_timeout_s` the sender gives up.

        Raises:
            Refusal: with the reason that goes back to the sender.
        """
        ...

    def closed(self, peer: str) -> None:
        """A stream to or from that peer broke: its process may have died, or it left. Only a hint."""
        ...

    def moving(self, peer: str) -> None:
        """Part of a payload has come from that peer, or has reached it. So the peer is alive, though its small messages
        may wait behind the payload. Called now and then during a transfer.
        """
        ...


@dataclass(slots=True)
class PeerTraffic:
    """Bytes exchanged with one peer, and how many of its messages were refused here."""

    bytes_sent: int = 0
    bytes_received: int = 0
    refused: int = 0
    way: str | None = None
    """How the latest payload to it went: "direct", over "libp2p", or over libp2p and "relayed" by a third peer. None:
    no payload went to it."""


@dataclass(slots=True)
class Traffic:
    """Bytes of messages (headers, payloads, frames) since the start. The DHT's own traffic isn't counted."""

    bytes_sent: int = 0
    bytes_received: int = 0
    refused: int = 0
    peers: dict[str, PeerTraffic] = field(default_factory=dict)
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    receiving: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while a payload comes in, to measure how long that takes."""

    def sent(self, peer: str, count: int) -> None:
        """Count bytes sent to a peer."""
        self.bytes_sent += count
        self._of(peer).bytes_sent += count

    def received(self, peer: str, count: int) -> None:
        """Count bytes received from a peer."""
        self.bytes_received += count
        self._of(peer).bytes_received += count

    def went(self, peer: str, way: str) -> None:
        """Note how a payload goes to a peer."""
        self._of(peer).way = way

    def ways(self) -> dict[str, str]:
        """How the latest payload went, for each peer to which one went."""
        return {peer: entry.way for peer, entry in self.peers.items() if entry.way is not None}

    def refuse(self, peer: str) -> None:
        """Count a message of a peer that was refused here."""
        self.refused += 1
        self._of(peer).refused += 1

    def _of(self, peer: str) -> PeerTraffic:
        """The counts of a peer. Those of a peer for which there is no room are thrown away."""
        entry = self.peers.get(peer)
        if entry is None:
            entry = PeerTraffic()
            if len(self.peers) < PEERS_COUNTED_MAX:
                self.peers[peer] = entry
        return entry


class Transport(Protocol):
    """How a node reaches others. `limits` bounds every call, and may be replaced: calls that begin later heed the new
    ones. Every call may be cancelled."""

    peer_id: str
    limits: Limits
    traffic: Traffic

    async def send(self, peer: str, header: bytes, payload: memoryview | None = None) -> None:
        """Hand a message to a peer; returns once its inbox has accepted.

        Messages without a payload arrive in the order of the calls to one peer. A message with a payload (of any
        length, even 0) goes on another stream, and may arrive before or after them. The payload must not change until
        this ends.

        Raises:
            Refusal: the remote, or a limit on this side, refused it.
            Unreachable: it wasn't accepted in time.
        """
        ...

    def addresses(self) -> list[str]:
        """The full multiaddrs, with /p2p/<peer id>, under which others may reach this peer, public ones first."""
        ...

    async def introduce(self, peer: str, addresses: Sequence[str]) -> None:
        """Learn where a peer can be dialled, without dialling. Addresses that can't be read are ignored."""
        ...

    async def store(self, key: str, subkey: str, value: bytes, ttl_s: float, *, owned: bool = True) -> bool:
        """Put a record into the DHT. False if it wasn't stored: an older record lives longer, or no peer answered.

        An owned record is signed, and only this peer can replace it. If its subkey is a peer id, or starts with one and
        a slash, readers accept it from that peer alone. Under any other subkey the latest expiration wins.

        Raises:
            ValueError: the value is longer than `VALUE_BYTES_MAX`, a name than `KEY_BYTES_MAX`, or the life than
                `TTL_S_MAX`.
        """
        ...

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        """The live, valid records under a key: subkey -> (value, expiration in seconds since 1970).

        Raises:
            Unreachable: the DHT didn't answer in time, so what it holds is unknown.
        """
        ...

    def sign(self, statement: bytes) -> str:
        """A proof that this peer makes the statement."""
        ...

    def signed_by(self, peer: str, statement: bytes, proof: str) -> bool:
        """Whether the proof shows that the peer made the statement. Needs no network."""
        ...

    async def close(self) -> None:
        """End every stream, task and process of the transport, in bounded time. Others see their links close."""
        ...


def check_outgoing(limits: Limits, header: bytes, payload: memoryview | None) -> None:
    """Check a message against the limits before it is sent.

    Raises:
        Refusal: it exceeds one.
    """
    if len(header) > limits.header_bytes_max:
        raise Refusal(f"the header has {len(header)} bytes, at most {limits.header_bytes_max} are allowed")
    if payload is not None and payload.nbytes > limits.payload_bytes_max:
        raise Refusal(f"the payload has {payload.nbytes} bytes, at most {limits.payload_bytes_max} are allowed")


def check_announced(limits: Limits, payload_bytes: int, admitted_bytes: int) -> None:
    """Check the announced length of a payload against what the inbox admits with its header.

    Raises:
        Refusal: it is too long.
    """
    allowed = min(admitted_bytes, limits.payload_bytes_max)
    if payload_bytes > allowed:
        raise Refusal(f"a payload of {payload_bytes} bytes is announced, at most {allowed} may come with it")


def check_record(key: str, subkey: str, value: bytes, ttl_s: float) -> None:
    """Check a record against the limits of the DHT.

    Raises:
        ValueError: it exceeds one.
    """
    if len(value) > VALUE_BYTES_MAX:
        raise ValueError(f"the record {key}/{subkey} has {len(value)} bytes; the DHT takes {VALUE_BYTES_MAX}")
    if max(len(key.encode()), len(subkey.encode())) > KEY_BYTES_MAX:
        raise ValueError(f"the record's name {key}/{subkey} is longer than {KEY_BYTES_MAX} bytes")
    if not 0 < ttl_s <= TTL_S_MAX:
        raise ValueError(f"the record {key}/{subkey} is to live {ttl_s} s; allowed are 0 to {TTL_S_MAX} s")
