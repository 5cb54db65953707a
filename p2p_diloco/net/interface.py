"""The interface between node and transport: the methods that each calls on the other.

Law: defines types only, without a socket, an event loop or Hivemind. Any class that satisfies `Transport` is an
adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from p2p_diloco.errors import printable
from p2p_diloco.net.bandwidth import Bandwidth

VALUE_BYTES_MAX = 2048
"""The largest value that one DHT record holds. The signature and the owner's id add 124 bytes. All records
under one key travel in one message, and a message of 4 MiB would cut the peer that receives it off from the DHT for
good."""

CONTENT_BYTES_MAX = VALUE_BYTES_MAX - 1128
"""The longest content of a record before it is signed, sealed for the members of a private run, and given the
certificates of the member that stores it."""

KEY_BYTES_MAX = 256
"""The longest key or subkey of a DHT record, in UTF-8."""

TTL_S_MAX = 24 * 3600.0
"""The longest life of a DHT record. Records can't be deleted, so each must expire."""

CLOCK_DIFFERENCE_S_MAX = 3.0
"""How far two clocks may differ. The writer's clock sets a record's expiration, and the reader's clock checks it."""

PEERS_COUNTED_MAX = 4096
"""The most peers that `Traffic` counts one by one. Anyone can make identities at no cost, so the table needs a bound;
the totals count all peers."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits, in bytes and seconds, on what other peers may cost a transport. The default timeouts hold until this peer
    is in a run; from then on the run's `heartbeat_timeout` sets them."""

    header_bytes_max: int = 64 * 1024
    """The longest header, with or without a payload."""
    payload_bytes_max: int = 256 * 1024 * 1024
    """The longest payload, even if `Inbox.admit` allows more. A peer can't join a run whose slices need longer ones."""
    connect_timeout_s: float = 5.0
    """Deadline for dialling a peer and opening a stream."""
    read_timeout_s: float = 10.0
    """How long a transfer may stall, and the deadline for an answer."""
    write_timeout_s: float = 10.0
    """How long a frame may wait while the transport's buffer is full."""
    streams_max: int = 64
    """The most payloads that are written at once, or received at once; further ones wait."""
    links_max: int = 1024
    """The most links that other peers may keep open to this peer; a newer link of the same peer replaces the older one.
    At most as many streams over libp2p may wait for their next payload."""
    rate_bytes_per_s_min: float = 64 * 1024.0
    """The lowest rate of a transfer; a slower one is cut off (see `transfer_timeout_s`)."""

    def transfer_timeout_s(self, payload_bytes: int) -> float:
        """The longest time in seconds that the transfer of a payload of this length may take. A slower transfer is cut
        off, even if its bytes come steadily."""
        return self.read_timeout_s + payload_bytes / self.rate_bytes_per_s_min


class Refusal(Exception):
    """Raised when a message is refused, by its receiver or by a check before it is sent. The receiver can be reached,
    but would refuse the same message again. The reason may be another peer's text, so it has no control characters."""

    def __init__(self, reason: str) -> None:
        self.reason = printable(reason)
        super().__init__(self.reason)


class Unreachable(Exception):
    """Raised when a peer couldn't be dialled, a stream broke, or a deadline passed. It is unknown whether the message
    has arrived.

    `refused`: the peer can be regarded as dead, because every known address of it refused the connection, a relay has
    just lost its connection to it, or the process with its id is no member of the private run. False after a broken
    stream or a passed deadline, and for a peer whose address isn't known.
    """

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


Written = Callable[[], None]
"""A function that the transport calls when another payload may be sent."""


def unnoticed() -> None:
    """Do nothing: the default for `written`, for callers that need not know when the next payload may be sent."""


class Inbox(Protocol):
    """The methods of the node that the transport calls, all in the transport's event loop."""

    def admit(self, sender: str, header: bytes) -> int:
        """Check the header of a message with a payload; returns the longest payload, in bytes, that may come with it
        (0: none may). The transport calls this before it receives the payload, and `deliver` once that is here.

        Raises:
            Refusal: with the reason that goes back to the sender.
        """
        ...

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> bool | None:
        """Process a message that has arrived. When this returns, the message is accepted, and the sender's `send`
        returns. True: the sender sends more than it should, and its next message is read later.

        The inbox may keep the payload's memory. Messages of a link are delivered one after the other, so return soon:
        the sender gives up after its `read_timeout_s`.

        Raises:
            Refusal: with the reason that goes back to the sender.
        """
        ...

    def closed(self, peer: str) -> None:
        """The transport calls this when a stream to or from `peer` broke. That peer may have died, may have left, or
        may still be alive."""
        ...

    def moving(self, peer: str) -> None:
        """The transport calls this now and then while a payload to or from `peer` makes progress. So that peer is
        alive, even if its small messages are delayed by the payload."""
        ...


@dataclass(slots=True)
class PeerTraffic:
    """The bytes exchanged with one peer, and the number of its messages that this peer has refused."""

    bytes_sent: int = 0
    bytes_received: int = 0
    refused: int = 0
    way: str | None = None
    """The path of the latest payload to this peer: "direct", "libp2p", or "relayed" (over libp2p through a third peer).
    None: no payload was sent to it."""


@dataclass(slots=True)
class Traffic:
    """Counts the bytes of messages (headers, payloads, frames) since the start. The DHT's own traffic isn't counted."""

    bytes_sent: int = 0
    bytes_received: int = 0
    refused: int = 0
    peers: dict[str, PeerTraffic] = field(default_factory=dict)
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    receiving: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context that is entered while a payload comes in, to measure how long that takes."""

    def sent(self, peer: str, count: int) -> None:
        self.bytes_sent += count
        self._of(peer).bytes_sent += count

    def received(self, peer: str, count: int) -> None:
        self.bytes_received += count
        self._of(peer).bytes_received += count

    def went(self, peer: str, way: str) -> None:
        """Record the path that a payload to a peer takes."""
        self._of(peer).way = way

    def ways(self) -> dict[str, str]:
        """For each peer to which a payload was sent, the path of the latest payload."""
        return {peer: entry.way for peer, entry in self.peers.items() if entry.way is not None}

    def refuse(self, peer: str) -> None:
        self.refused += 1
        self._of(peer).refused += 1

    def _of(self, peer: str) -> PeerTraffic:
        """The counts of one peer. If the table is full, a new peer gets counts that are not kept."""
        entry = self.peers.get(peer)
        if entry is None:
            entry = PeerTraffic()
            if len(self.peers) < PEERS_COUNTED_MAX:
                self.peers[peer] = entry
        return entry


@dataclass(frozen=True, slots=True)
class Reach:
    """Whether other peers can dial this peer, by what they have reported. `kind` is "public" if they reach it at one of
    its own addresses, "mapped" if they reach it at a router's address, "private" if they can't dial it, and "unknown"
    until a peer has reported."""

    kind: str = "unknown"
    why: str = "no peer has told yet"

    @property
    def private(self) -> bool:
        """Whether this peer is private: other peers can't dial it, so it shouldn't aggregate."""
        return self.kind == "private"


class Records(Protocol):
    """Access to the DHT's records. Every call may be cancelled."""

    peer_id: str

    async def store(self, key: str, subkey: str, value: bytes, ttl_s: float, *, owned: bool = True) -> bool:
        """Store a record in the DHT for `ttl_s` seconds. Returns False if it wasn't stored: an earlier record under the
        same key and subkey expires later, or no peer answered.

        `owned`: this peer signs the record, and only this peer can replace it. If the subkey is a peer id, or starts
        with one and a slash, readers accept the record only from that peer. If several peers store records under any
        other subkey, readers get the one that expires last.

        Raises:
            ValueError: the value, the key, the subkey or `ttl_s` exceeds its limit, or `ttl_s` is not above 0.
        """
        ...

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        """The live, valid records under a key: subkey -> (value, expiration in seconds since 1970).

        Raises:
            Unreachable: the DHT didn't answer in time, so its records are unknown.
        """
        ...

    def sign(self, kind: bytes, statement: bytes) -> str:
        """Sign a statement with this peer's identity; returns the signature as text: the proof that this peer has made
        the statement. `kind`: the statement's purpose; the signature is valid for no other purpose."""
        ...

    def signed_by(self, peer: str, proof: str, kind: bytes, statement: bytes) -> bool:
        """Whether `proof` shows that `peer` has made the statement of this kind. This works without the network."""
        ...


class Transport(Records, Protocol):
    """A node's access to the network. `limits` bounds every call, and may be replaced: calls that begin later use the
    new limits. Every call may be cancelled."""

    limits: Limits
    traffic: Traffic

    @property
    def reach(self) -> Reach:
        """Whether other peers can dial this peer."""
        ...

    async def send(
        self, peer: str, header: bytes, payload: memoryview | None = None, *, written: Written = unnoticed
    ) -> None:
        """Send a message to a peer; returns once that peer's inbox has accepted the message. `written` is called when
        the next payload may be sent, because this one is written or another connection is free. It may be called
        several times, or never.

        Messages without a payload arrive in the order of the calls to one peer. A message with a payload (of any
        length, even 0) goes on another stream, and may arrive before or after them. The payload must not change until
        this call ends.

        Raises:
            Refusal: the receiver, or a limit on this side, refused the message.
            Unreachable: the message wasn't accepted in time.
        """
        ...

    def addresses(self) -> list[str]:
        """The full multiaddrs, with /p2p/<peer id>, at which other peers may reach this peer, public ones first."""
        ...

    async def introduce(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember a peer's addresses for later dials; nothing is dialled now. Addresses that can't be read are
        ignored."""
        ...

    async def close(self) -> None:
        """End every stream, task and process of the transport, in bounded time. Other peers see their links close."""
        ...


def check_outgoing(limits: Limits, header: bytes, payload: memoryview | None) -> None:
    """Check a message against the limits before it is sent.

    Raises:
        Refusal: it exceeds a limit.
    """
    if len(header) > limits.header_bytes_max:
        raise Refusal(f"the header has {len(header)} bytes, at most {limits.header_bytes_max} are allowed")
    if payload is not None and payload.nbytes > limits.payload_bytes_max:
        raise Refusal(f"the payload has {payload.nbytes} bytes, at most {limits.payload_bytes_max} are allowed")


def check_announced(limits: Limits, payload_bytes: int, admitted_bytes: int) -> None:
    """Check the announced length of a payload against the limits, and against `admitted_bytes`: what the inbox admits
    with this header.

    Raises:
        Refusal: the payload is too long.
    """
    allowed = min(admitted_bytes, limits.payload_bytes_max)
    if payload_bytes > allowed:
        raise Refusal(
            f"a payload of {payload_bytes} bytes is announced, at most {allowed} are allowed with this header"
        )


def check_record(key: str, subkey: str, value: bytes, ttl_s: float) -> None:
    """Check that a record's value, key, subkey and life are within the limits of the DHT, before it is stored.

    Raises:
        ValueError: it exceeds a limit.
    """
    if len(value) > VALUE_BYTES_MAX:
        raise ValueError(f"the record {key}/{subkey} has {len(value)} bytes; the DHT takes at most {VALUE_BYTES_MAX}")
    if max(len(key.encode()), len(subkey.encode())) > KEY_BYTES_MAX:
        raise ValueError(f"the record's name {key}/{subkey} is longer than {KEY_BYTES_MAX} bytes")
    if not 0 < ttl_s <= TTL_S_MAX:
        raise ValueError(f"the record {key}/{subkey} has a life of {ttl_s} s; allowed are 0 to {TTL_S_MAX} s")
