"""What a peer says of itself: one dataclass, from the node that writes it to the `--json` that shows it.

Law: the names are the same everywhere: in the DHT record, in `p2p-diloco status --json` and in its views. A new field
is one line here with a default, one in `node.reporting`, which fills it in, and one in `observe.view`. Records come from
strangers: a field of another type is read as its default, and text is cut and freed of control characters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import msgpack

from p2p_diloco.net.interface import VALUE_BYTES_MAX
from p2p_diloco.node.plain import Record, Unfit, read_float, read_int, read_text

AGGREGATES_MAX, EVENTS_MAX, EVENT_LETTERS_MAX, ADDRESSES_MAX = 16, 3, 80, 4
TEXT_MAX = 256
"""Longer text of a stranger is cut; an address over a relay is about 150 letters long."""


@dataclass(frozen=True, slots=True)
class LastRound:
    """Where the time of a peer's last round went: six shares of it that add up to 1, pauses left out."""

    inner: float
    encode: float
    group: float
    transfer: float
    outer_step: float
    merge: float
    hidden: float
    """The share of the round's exchange that was hidden behind training."""

    def __post_init__(self) -> None:
        if not all(0 <= getattr(self, name) <= 1 for name in self.__slots__):
            raise ValueError("no share")


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """How far the averaging of a fragment has come."""

    fragment: int
    got: int
    """Contributions that have arrived."""
    want: int
    """Contributions that are waited for, at least 1."""

    def __post_init__(self) -> None:
        if self.want < 1:
            raise ValueError("no round")


@dataclass(frozen=True, slots=True)
class Ways:
    """To how many of the live peers the newest payload went each way."""

    direct: int
    libp2p: int
    relayed: int
    """Over libp2p, and passed on by a third peer."""

    @classmethod
    def counted(cls, ways: Iterable[str]) -> Ways:
        """From each peer's way."""
        ways = list(ways)
        return cls(*(ways.count(name) for name in cls.__slots__))


@dataclass(frozen=True, slots=True)
class Submissions:
    """What became of a peer's submissions, in asynchronous mode."""

    counted: int
    refused: int
    """Not counted, in part or in whole: too stale, or of a lineage that was left."""
    staleness: tuple[int, ...]
    """How many of the counted ones were as many epochs behind as each bin of `submissions.STALENESS_FROM` says; empty
    bins at the end are left out."""


@dataclass(frozen=True, slots=True)
class Buffered:
    """How many submissions are in the Delayed Nesterov buffers of the shards that a peer aggregates."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Event:
    """A line of a peer's event log."""

    time: float
    """Seconds since 1970, by that peer's clock."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """What one peer says of itself. None: it doesn't know, or doesn't tell."""

    name: str = ""
    peer_id: str
    host: str = ""
    role: str = ""
    state: str = ""
    """joining, training, waiting, paused, idle, leaving or finished."""
    time: float = 0.0
    """When this was written, in seconds since 1970."""
    incarnation: int | None = None
    """Distinguishes this start of the peer from any other. Later starts have greater ones, as clocks go."""
    epoch: int | None = None
    """Outer steps, the lowest over its shards; None while it holds no state."""
    step: int | None = None
    """Inner steps since it started."""
    steps_per_second: float | None = None
    loss: float | None = None
    samples: int | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None
    revision: int | None = None
    """The lowest over its shards."""
    outer_lr: float | None = None
    """The outer learning rate of that revision."""
    outer_momentum: float | None = None
    """Its outer momentum."""
    revision_known: int | None = None
    """The highest revision that it has heard of: each shard adopts it with its next commit."""
    waiting_s: float | None = None
    """Seconds that its training has stood still for exchanges, in all."""
    last_round: LastRound | None = None
    """None before it has made one."""
    bandwidth: int | None = None
    """Bytes a second that its link carries, the slower direction."""
    ways: Ways | None = None
    aggregates: tuple[int, ...] = ()
    """Shards that it aggregates now, at most `AGGREGATES_MAX` of them."""
    aggregates_count: int = 0
    """All of the shards that it aggregates now."""
    round: RoundProgress | None = None
    """Of a round that it aggregates."""
    sync_every: int | None = None
    """Inner steps between two of its exchanges of the whole model; with dylu or pace="time" its own number, as it
    last made them."""
    submissions: Submissions | None = None
    """None in synchronous mode."""
    buffered: Buffered | None = None
    """None without Delayed Nesterov, and for a peer that aggregates nothing."""
    addresses: tuple[str, ...] = ()
    """Where others may dial it."""
    events: tuple[Event, ...] = ()
    """The newest lines of its event log, oldest first."""

    def pack(self) -> bytes:
        """The record's bytes, at most VALUE_BYTES_MAX. What doesn't fit is left out: events first, then addresses, then
        shards.
        """
        events = self.events[-EVENTS_MAX:]
        fitting = dataclasses.replace(
            self,
            aggregates=self.aggregates[:AGGREGATES_MAX],
            addresses=self.addresses[:ADDRESSES_MAX],
            events=tuple(Event(event.time, event.text[:EVENT_LETTERS_MAX]) for event in events),
        )
        content = _RECORD.write(fitting)
        while len(value := msgpack.packb(content)) > VALUE_BYTES_MAX:
            trimmed = next(key for key in ("events", "addresses", "aggregates") if content.get(key))
            content[trimmed] = content[trimmed][1:] if trimmed == "events" else content[trimmed][:-1]
        return bytes(value)

    @classmethod
    def unpack(cls, value: bytes) -> PeerStatus:
        """What `pack` wrote, in this version or another. Raises ValueError for anything else."""
        try:
            return _RECORD.read(msgpack.unpackb(value))
        except (ValueError, msgpack.UnpackException, Unfit) as error:
            raise ValueError(f"no status of a peer: {error}") from None


def clean(text: str) -> str:
    """Text that can't move a cursor or fill a screen."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:TEXT_MAX])


def _read_count(value: object) -> int:
    count = read_int(value)
    if count < 0:
        raise Unfit("negative")
    return count


def _read_text(value: object) -> str:
    return clean(value) if type(value) is str else read_text(value)


_RECORD = Record(PeerStatus, {int: _read_count, float: read_float, str: _read_text})
