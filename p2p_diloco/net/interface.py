"""What the node asks of a transport, and what a transport asks of the node.

Law: types only. No socket, no loop, no Hivemind; an adapter is whatever satisfies `Transport`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from p2p_diloco.net.bandwidth import Bandwidth

VALUE_BYTES_MAX = 1024
"""The largest value that one DHT record holds. Signed and owner-marked it grows by about 750 bytes; all the
records under one key travel in one message, and 4 MiB of them would cut a peer off from the DHT for good."""

KEY_BYTES_MAX = 256
"""The longest key or subkey of a DHT record, in UTF-8."""

TTL_S_MAX = 24 * 3600.0
"""The longest life of a DHT record. Nothing there can be deleted, so nothing may be pinned for ever."""

PEERS_COUNTED_MAX = 4096
"""How many peers `Traffic` counts apart. Identities cost nothing, so the table needs an end; totals count
everyone."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a transport allows others to cost it. Bytes and seconds; every wait in `net` is bounded by one of
    these. The timeouts here are those of a peer that is in no run yet; a run has its own, by its ladder.
    """

    header_bytes_max: int = 64 * 1024
    """The longest header, with or without a payload."""
    payload_bytes_max: int = 256 * 1024 * 1024
    """The longest payload, whatever `Inbox.admit` says. A run whose shards need more can't be joined."""
    connect_timeout_s: float = 5.0
    """Until a peer must have been dialled and a stream opened."""
    read_timeout_s: float = 10.0
    """How long a transfer may stand still, and how long an answer may take."""
    write_timeout_s: float = 10.0
    """How long a frame may wait for the peer's buffers."""
    streams_max: int = 64
    """Payloads under way at once, in each direction. More wait their turn."""
    links_max: int = 1024
    """Links that others may keep open to this peer; a newer link of the same peer takes the older one's place. As many
    streams over libp2p may wait for further payloads."""
    rate_bytes_per_s_min: float = 64 * 1024.0
    """The slowest transfer that is still let through: one that trickles is cut off (see
    `transfer_timeout_s`)."""

    def transfer_timeout_s(self, payload_bytes: int) -> float:
        """The longest that a payload of so many bytes may take, however steadily it comes."""
        return self.read_timeout_s + payload_bytes / self.rate_bytes_per_s_min


class Refusal(Exception):
    """The remote said no, or a check on this side did. The peer is there; repeating the same message won't
    help.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unreachable(Exception):
    """The peer couldn't be dialled, the stream broke, or a deadline passed. The message may or may not have
    arrived.

    `refused`: where the peer was known to be, nobody listens any more. A broken stream, a deadline or a peer whose
    address isn't known tells nothing of the kind.
    """

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class Inbox(Protocol):
    """What the node gives the transport. All of it is called in the transport's event loop."""

    def admit(self, sender: str, header: bytes) -> int:
        """How many bytes of payload may come with this header (0 = none). Called for every message, before
        `deliver`.

        Raises:
            Refusal: with the reason that goes back to the sender.
        """
        ...

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        """Take a message. It counts as accepted, and the sender's `send` returns, once this returns.

        The payload's memory is the receiver's to keep. Messages of a link are delivered one after the other,
        so return soon: what takes longer than the sender's `read_timeout_s` is taken for a failure.

        Raises:
            Refusal: with the reason that goes back to the sender.
        """
        ...

    def closed(self, peer: str) -> None:
        """A stream to or from that peer broke: its process died, was reset, or left. A hint, not a
        verdict.
        """
        ...

    def moving(self, peer: str) -> None:
        """Part of a payload has come from that peer, or it has told that part of one has reached it: it lives, though
        its small messages may be waiting behind the payload. Now and then while a transfer goes on.
        """
        ...


@dataclass(slots=True)
class PeerTraffic:
    """Bytes exchanged with one peer, and how many of its messages were refused here."""

    bytes_sent: int = 0
    bytes_received: int = 0
    refused: int = 0
    way: str | None = None
    """How the newest payload went to it: "direct", over "libp2p", or over libp2p and "relayed" by a third peer; None:
    there was none."""


@dataclass(slots=True)
class Traffic:
    """Bytes of messages (headers, payloads, frames) since the start. The DHT's own traffic isn't counted."""

    bytes_sent: int = 0
    bytes_received: int = 0
    refused: int = 0
    peers: dict[str, PeerTraffic] = field(default_factory=dict)
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    receiving: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while a payload comes in; set by who wants to know how long that takes."""

    def sent(self, peer: str, count: int) -> None:
        """Count bytes sent to a peer."""
        self.bytes_sent += count
        if (entry := self._of(peer)) is not None:
            entry.bytes_sent += count

    def received(self, peer: str, count: int) -> None:
        """Count bytes received from a peer."""
        self.bytes_received += count
        if (entry := self._of(peer)) is not None:
            entry.bytes_received += count

    def went(self, peer: str, way: str) -> None:
        """Note which way a payload goes to a peer."""
        if (entry := self._of(peer)) is not None:
            entry.way = way

    def ways(self) -> dict[str, str]:
        """How the newest payload went, for each peer that was sent one."""
        return {peer: entry.way for peer, entry in self.peers.items() if entry.way is not None}

    def refuse(self, peer: str) -> None:
        """Count a message of a peer that was refused here."""
        self.refused += 1
        if (entry := self._of(peer)) is not None:
            entry.refused += 1

    def _of(self, peer: str) -> PeerTraffic | None:
        entry = self.peers.get(peer)
        if entry is None and len(self.peers) < PEERS_COUNTED_MAX:
            entry = self.peers[peer] = PeerTraffic()
        return entry


class Transport(Protocol):
    """How a node speaks to the others. Every call is bounded by `limits`, which may be set anew, for what begins then,
    and may be cancelled."""

    peer_id: str
    limits: Limits
    traffic: Traffic

    async def send(self, peer: str, header: bytes, payload: memoryview | None = None) -> None:
        """Hand a message to a peer; returns once its inbox has accepted.

        Without a payload, messages to one peer arrive in the order of the calls. One with a payload (of any
        length, even 0) goes on another stream, in no order with the others. The payload must not change until
        this ends.

        Raises:
            Refusal: the remote, or a limit on this side, said no.
            Unreachable: it couldn't be brought there in time.
        """
        ...

    def addresses(self) -> list[str]:
        """The full multiaddrs, with /p2p/<peer id>, under which others may reach this peer: public ones
        first.
        """
        ...

    async def introduce(self, peer: str, addresses: Sequence[str]) -> None:
        """Learn where a peer can be dialled. Dials nothing; addresses that can't be read are ignored."""
        ...

    async def store(self, key: str, subkey: str, value: bytes, ttl_s: float, *, owned: bool = True) -> bool:
        """Put a record into the DHT. False if it wasn't taken: an older record lives longer, or nobody could
        be asked.

        An owned record is signed, and only this peer can replace it. If its subkey is a peer id, or starts
        with one and a slash, then readers accept it from that peer alone; under any other subkey the latest
        expiration wins.

        Raises:
            ValueError: the value is longer than `VALUE_BYTES_MAX`, a name than `KEY_BYTES_MAX`, the life than
                `TTL_S_MAX`.
        """
        ...

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        """The live records under a key: subkey -> (value, expiration in seconds since 1970), no bad ones.

        Raises:
            Unreachable: the DHT didn't answer in time, so nobody knows what it holds.
        """
        ...

    def sign(self, statement: bytes) -> str:
        """The proof that this peer says so."""
        ...

    def signed_by(self, peer: str, statement: bytes, proof: str) -> bool:
        """Whether the proof shows that the peer has said this, whoever hands it on. Asks nobody."""
        ...

    async def close(self) -> None:
        """End every stream and whatever the transport started, in bounded time. Others see their links
        close.
        """
        ...


def check_outgoing(limits: Limits, header: bytes, payload: memoryview | None) -> None:
    """Hold a message against the limits before it is sent.

    Raises:
        Refusal: it breaks one.
    """
    if len(header) > limits.header_bytes_max:
        raise Refusal(f"the header has {len(header)} bytes, at most {limits.header_bytes_max} are allowed")
    if payload is not None and payload.nbytes > limits.payload_bytes_max:
        raise Refusal(f"the payload has {payload.nbytes} bytes, at most {limits.payload_bytes_max} may go")


def check_announced(limits: Limits, payload_bytes: int, admitted_bytes: int) -> None:
    """Hold the announced length of a payload against what the inbox admits with its header.

    Raises:
        Refusal: it is longer.
    """
    allowed = min(admitted_bytes, limits.payload_bytes_max)
    if payload_bytes > allowed:
        raise Refusal(f"a payload of {payload_bytes} bytes is announced, at most {allowed} may come with it")


def check_record(key: str, subkey: str, value: bytes, ttl_s: float) -> None:
    """Hold a record against the limits of the DHT.

    Raises:
        ValueError: it breaks one.
    """
    if len(value) > VALUE_BYTES_MAX:
        raise ValueError(f"the record {key}/{subkey} has {len(value)} bytes; the DHT takes {VALUE_BYTES_MAX}")
    if max(len(key.encode()), len(subkey.encode())) > KEY_BYTES_MAX:
        raise ValueError(f"the record's name {key}/{subkey} is longer than {KEY_BYTES_MAX} bytes")
    if not 0 < ttl_s <= TTL_S_MAX:
        raise ValueError(f"the record {key}/{subkey} is to live {ttl_s} s; allowed are 0 to {TTL_S_MAX} s")
