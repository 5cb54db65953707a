"""The status of a peer: one dataclass, which the node writes and `status --json` shows.

Law: the names are the same in `p2p-diloco status --json` and in its views. A DHT record is the list of the fields, so a
new field is the last one here, with a default; one line in `node.reporting` fills it in, and one in `observe.sections`
shows it. Records come from strangers: a field of another type is read as its default, and text is cut and stripped of
control characters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from p2p_diloco.net.interface import CONTENT_BYTES_MAX
from p2p_diloco.node.board import Count, Measure, pack, unpack

AGGREGATES_MAX, EVENTS_MAX, EVENT_LETTERS_MAX, ADDRESSES_MAX = 16, 3, 80, 4
REFUSED_MAX, NAME_LETTERS_MAX, WHY_LETTERS_MAX, WAITS_LETTERS_MAX = 2, 40, 100, 120
DEATHS_MAX = 3
Seconds = Annotated[float, Meta(ge=0, le=1e30)]


@dataclass(frozen=True, slots=True)
class LastRound:
    """A peer's last round: the seconds of each of its six parts, without pauses."""

    inner: Seconds
    encode: Seconds
    group: Seconds
    transfer: Seconds
    outer_step: Seconds
    merge: Seconds
    hidden: Seconds
    """Seconds of the round's exchange that were hidden behind training. They are in none of the parts."""
    ended: Seconds
    """When the round ended, in seconds since 1970."""

    @property
    def shares(self) -> dict[str, float]:
        """Each part's share of the round's time; these add up to 1. `hidden`: the share of the exchange's time that was
        hidden behind training."""
        *parts, hidden_s, _ = dataclasses.astuple(self)
        whole_s, exchange_s = sum(parts), sum(parts[1:]) + hidden_s
        spent = (part / max(whole_s, 1e-9) for part in parts)
        return dict(zip(SHARES, (*spent, hidden_s / max(exchange_s, 1e-9)), strict=True))


SHARES = tuple(field.name for field in dataclasses.fields(LastRound))[:-1]
"""The names of a round's parts, in the order of `LastRound`, and `hidden`."""


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """The progress of a round: how many of its contributions to one fragment have arrived."""

    fragment: Count
    got: Count
    """Contributions that have arrived."""
    want: Annotated[int, Meta(ge=1)]
    """Contributions that the round waits for, at least 1."""


@dataclass(frozen=True, slots=True)
class Ways:
    """For each kind of path, the number of live peers whose latest payload took it."""

    direct: Count
    libp2p: Count
    relayed: Count
    """Over libp2p through a relay, which is a third peer."""

    @classmethod
    def counted(cls, ways: Iterable[str]) -> Ways:
        """Count the peers for each kind of path."""
        ways = list(ways)
        return cls(*(ways.count(name) for name in cls.__slots__))


@dataclass(frozen=True, slots=True)
class Submissions:
    """How a peer's submissions ended so far, in asynchronous mode."""

    counted: Count
    refused: Count
    """Submissions that were not counted: too stale, or made on a lineage that lost."""
    staleness: tuple[Count, ...]
    """The number of counted submissions in each bin of `node.ledger.STALENESS_FROM`, by epochs behind; empty bins at
    the end are left out."""


@dataclass(frozen=True, slots=True)
class Buffered:
    """How many submissions are in the Delayed Nesterov buffers of the fragments that a peer leads."""

    least: Count
    most: Count


@dataclass(frozen=True, slots=True)
class DataProgress:
    """How far the peers of a run are with a data set that they share, counted in samples over all epochs."""

    name: str
    length: Annotated[int, Meta(ge=1)]
    """The samples of an epoch."""
    epochs: Count
    """How many epochs the run makes; 0: without end."""
    used: Count
    """Samples that a commit has counted."""
    leased: Count
    """Samples that peers hold now."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of the GPUs that a peer's trainer uses, in bytes."""

    reserved: Count
    """What torch holds of it for the trainer's process, as it was when the last round ended."""
    total: Count
    """All that these GPUs have."""


@dataclass(frozen=True, slots=True)
class Event:
    """A line of a peer's event log."""

    time: Measure
    """Seconds since 1970, by that peer's clock."""
    text: str


CAUSES = {
    "trainer": "died: its trainer was killed, or has crashed",
    "node": "died: its node was killed, or has crashed",
    "silent": "is silent: its machine has vanished, is frozen or cut off",
}
"""What a peer died of -> the rest of a sentence that begins with the peer."""


@dataclass(frozen=True, slots=True)
class Death:
    """The death of another peer."""

    time: Measure
    """When it was noticed, in seconds since 1970, by the clock of the peer that noticed it."""
    peer: str
    """The dead peer's name, as far as it is known, and the last letters of its id."""
    cause: Annotated[str, Meta(pattern="^(trainer|node|silent)$")]

    @property
    def text(self) -> str:
        return f"{self.peer} {CAUSES[self.cause]}"


@dataclass(frozen=True, slots=True)
class Deaths:
    """How many deaths of peers there were, by their cause."""

    trainer: Count = 0
    """Trainers that ended without leaving the run."""
    node: Count = 0
    """Nodes that died; the whole peer may have been killed."""
    silent: Count = 0
    """Peers that were silent for `heartbeat_timeout`: their machines vanished, froze or were cut off."""

    @property
    def count(self) -> int:
        return self.trainer + self.node + self.silent

    @property
    def text(self) -> str:
        """As text: 3 deaths (2 trainer, 1 silent)."""
        by_cause = ", ".join(f"{count:,} {cause}" for cause, count in dataclasses.asdict(self).items() if count)
        return f"{self.count:,} death{'' if self.count == 1 else 's'}{f' ({by_cause})' if by_cause else ''}"

    def one_more(self, cause: str) -> Deaths:
        """These deaths and one of this cause."""
        return dataclasses.replace(self, **{cause: getattr(self, cause) + 1})


@dataclass(frozen=True, slots=True)
class RefusedPeer:
    """Another peer, some of whose messages the peer that publishes this has refused."""

    peer: str
    """The other peer's name, as far as it is known, and the last letters of its id."""
    count: Count
    why: str
    """Why the last one was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """The status of one peer, as that peer publishes it. A field is None if its value is unknown or not published."""

    peer_id: str
    name: str = ""
    host: str = ""
    role: str = ""
    state: str = ""
    """joining, training, waiting, paused, idle, aggregating (no trainer), leaving, finished, or dead: its trainer
    has died, and its node says so before it ends."""
    time: Measure = 0.0
    """The time at which this was written, in seconds since 1970."""
    incarnation: Count | None = None
    """Identifies this start of the peer. Later starts have greater numbers if the clock is right."""
    epoch: Count | None = None
    """The lowest number of outer steps over the peer's fragments; None while it holds no state."""
    step: Count | None = None
    """Inner steps since the peer's start."""
    steps_per_second: Measure | None = None
    loss: Measure | None = None
    """The loss that the trainer reported last."""
    held_out_loss: Measure | None = None
    """The loss of the global parameters on held-out data, as the trainer reported it last."""
    samples: Count | None = None
    counted_samples: Count | None = None
    """The samples of all peers that the commits up to the peer's state have counted, since the run's start."""
    bytes_sent: Count | None = None
    bytes_received: Count | None = None
    revision: Count | None = None
    """The lowest revision over the peer's fragments."""
    outer_lr: Measure | None = None
    """The outer learning rate of that revision."""
    outer_momentum: Measure | None = None
    """The outer momentum of that revision."""
    revision_known: Count | None = None
    """The highest revision that the peer knows of: each fragment adopts it with its next commit."""
    changed: tuple[tuple[str, float | None], ...] = ()
    """The settings that this revision changes, with their values. None in place of a value: no stop."""
    checkpoint: Count | None = None
    """The epoch of the peer's newest checkpoint, complete or being written; 0: none yet; None: it keeps none."""
    unsaved: str = ""
    """Why that checkpoint couldn't be written; empty if it could."""
    waiting_s: Measure | None = None
    """Total seconds for which training has stood still for exchanges."""
    waits_for: str = ""
    """What the peer waits for now, as a sentence."""
    cpu: Measure | None = None
    """The cores that the peer's trainer and node keep busy, over the time since its last record."""
    memory_bytes: Count | None = None
    """The memory of the trainer's process and of the node's."""
    gpu_memory: GpuMemory | None = None
    """None without a CUDA device, and before the first round is over."""
    node_threads: Count = 1
    """Threads with which the peer's node computes."""
    last_round: LastRound | None = None
    """None before the first round is over."""
    bandwidth: Count | None = None
    """Bandwidth of the peer's link in bytes a second, in the slower direction."""
    ways: Ways | None = None
    reach: str | None = None
    """Whether other peers can dial the peer: public, mapped (at its router's address) or private; None: unknown."""
    aggregates: tuple[Count, ...] = ()
    """The slices that the peer aggregates now, at most `AGGREGATES_MAX` of them."""
    aggregates_count: Count = 0
    """The number of slices that the peer aggregates now."""
    round: RoundProgress | None = None
    """The progress of a round that the peer leads."""
    sync_every: Count | None = None
    """Inner steps between two of the peer's exchanges of the whole model; with dylu or pace="time" the peer's own
    latest number."""
    submissions: Submissions | None = None
    """None in synchronous mode."""
    buffered: Buffered | None = None
    """None without Delayed Nesterov, and for a peer that leads no fragment."""
    data: tuple[DataProgress, ...] = ()
    """The data sets that the run's peers share, by the newest state that the peer holds."""
    addresses: tuple[str, ...] = ()
    """The addresses at which other peers may dial the peer."""
    refused: tuple[RefusedPeer, ...] = ()
    """The peers whose messages this peer has refused, at most `REFUSED_MAX`: those refused last, newest last."""
    doubt: str = ""
    """Why the peer suspects that its own machine is faulty; empty if it doesn't."""
    newest_deaths: tuple[Death, ...] = ()
    """The last deaths of other peers that the peer has noticed, at most `DEATHS_MAX`, oldest first."""
    deaths: Deaths | None = None
    """All deaths of the run's peers since its founding, as far as the peer knows."""
    events: tuple[Event, ...] = ()
    """The newest lines of the peer's event log, oldest first."""

    @property
    def death(self) -> Event | None:
        """The last death of another peer that the peer has noticed."""
        return next((Event(one.time, one.text) for one in self.newest_deaths[-1:]), None)

    @property
    def gone(self) -> bool:
        """Whether this is the peer's last record: it leaves, or its trainer has died."""
        return self.state in ("leaving", "dead")

    def pack(self) -> bytes:
        """Encode the record in at most CONTENT_BYTES_MAX bytes. To make it fit, events are left out first, then
        refused peers, then deaths but the last one, then addresses, then slices, then data sets."""
        fitting = self
        while len(value := pack(fitting)) > CONTENT_BYTES_MAX:
            trimmed = next(key for key, least in _TRIMMED.items() if len(getattr(fitting, key)) > least)
            kept = slice(1, None) if trimmed in ("events", "refused", "newest_deaths") else slice(-1)  # oldest first
            fitting = dataclasses.replace(fitting, **{trimmed: getattr(fitting, trimmed)[kept]})
        return value

    @classmethod
    def unpack(cls, value: bytes) -> PeerStatus:
        """Decode a record that `pack` encoded. Raises ValueError for anything else."""
        try:
            return unpack(cls, value)
        except ValueError as error:
            raise ValueError(f"these bytes are not a peer's status: {error}") from None


def highest(peers: Iterable[PeerStatus]) -> Deaths:
    """The highest count of deaths that any of these peers tells."""
    return max((peer.deaths or Deaths() for peer in peers), key=lambda deaths: deaths.count, default=Deaths())


def cut(text: str) -> str:
    """An event's text in `EVENT_LETTERS_MAX` letters. If some are left out, it ends in an ellipsis."""
    return text if len(text) <= EVENT_LETTERS_MAX else text[: EVENT_LETTERS_MAX - 1] + "…"


_TRIMMED = {"events": 0, "refused": 0, "newest_deaths": 1, "addresses": 0, "aggregates": 0, "data": 0}
"""The fields of which something is left out, in this order, and how many of their values stay."""
