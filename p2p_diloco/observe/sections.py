"""How the peers' statuses are shown: as tables, each narrow enough for a screen of 80 columns, and as sentences.

Law: a field of `PeerStatus` is shown by one line in `SECTIONS`, or by a sentence in `told_of`, on the terminal and in
the browser. Cells are texts; nothing here draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from p2p_diloco.errors import listed
from p2p_diloco.node.status import SHARES, DataProgress, PeerStatus
from p2p_diloco.observe.figures import UNKNOWN, bytes_of, figure, seconds
from p2p_diloco.observe.snapshot import Snapshot

WRAPPED = ("peer", "host", "behind", "data", "used", "of", "leased")
"""Columns whose texts may be wrapped."""
TEXTS = ("peer", "host", "behind", "data", "state", "role", "reach")
"""Columns that are aligned to the left."""
SLICES_SHOWN = 4
BINS = ("0", "1", "2", "3", "4–5", "6–7", "8–11", "12–15", "16–23", "24–31", "32–63", "64+")
"""The bins of a staleness histogram, in epochs."""

Cell = Callable[[Snapshot, PeerStatus], str]


@dataclass(frozen=True, slots=True)
class Section:
    """A table of peers. It has a row for each peer for which `shown` returns true."""

    title: str
    shown: Callable[[PeerStatus], bool]
    columns: Mapping[str, Cell]

    @property
    def titles(self) -> tuple[str, ...]:
        """The titles of the columns."""
        return "peer", *self.columns

    def rows(self, seen: Snapshot, peers: Iterable[PeerStatus]) -> list[tuple[PeerStatus, list[str]]]:
        """The peers that have a row, each with its cells."""
        cells, names = self.columns.values(), names_of(seen)
        return [
            (peer, [names[peer.peer_id], *(cell(seen, peer) for cell in cells)]) for peer in peers if self.shown(peer)
        ]


def names_of(seen: Snapshot) -> dict[str, str]:
    """The names of the peers, by id. If several have the same one, the last letters of their ids are added, as in the
    log."""
    count = Counter(peer.name for peer in seen.peers)
    return {p.peer_id: f"{p.name} (…{p.peer_id[-6:]})" if count[p.name] > 1 else p.name for p in seen.peers}


def _share(name: str) -> Cell:
    return lambda _, peer: figure(None if peer.last_round is None else peer.last_round.shares[name], ".1%")


SECTIONS = (
    Section(
        "peers",
        lambda peer: True,
        {
            "state": lambda seen, peer: seen.state(peer) or UNKNOWN,
            "epoch": lambda _, peer: figure(peer.epoch, ","),
            "step": lambda _, peer: figure(peer.step, ","),
            "steps/s": lambda _, peer: figure(peer.steps_per_second, ".2f"),
            "loss": lambda _, peer: figure(peer.loss, ".4f"),
            "held-out": lambda _, peer: figure(peer.held_out_loss, ".4f"),
            "seen": lambda seen, peer: seconds(seen.last_seen_s(peer)),
        },
    ),
    Section(
        "machines",
        lambda peer: True,
        {
            "role": lambda _, peer: peer.role or UNKNOWN,
            "host": lambda _, peer: peer.host or UNKNOWN,
            "cpu": lambda _, peer: figure(peer.cpu, ".1f"),
            "memory": lambda _, peer: bytes_of(peer.memory_bytes),
            "gpu": lambda _, peer: _gpu_memory(peer),
        },
    ),
    Section(
        "exchanges",
        lambda peer: peer.epoch is not None,
        {
            "samples": lambda _, peer: figure(peer.samples, ","),
            "waiting": lambda _, peer: seconds(peer.waiting_s),
            "sent": lambda _, peer: bytes_of(peer.bytes_sent),
            "received": lambda _, peer: bytes_of(peer.bytes_received),
            "aggregates": lambda _, peer: _aggregates(peer),
        },
    ),
    Section(
        "the network",
        lambda peer: peer.bandwidth is not None or peer.ways is not None or peer.reach is not None,
        {
            "reach": lambda _, peer: peer.reach or UNKNOWN,
            "bandwidth": lambda _, peer: bytes_of(peer.bandwidth) + ("" if peer.bandwidth is None else "/s"),
            "direct": lambda _, peer: _direct(peer),
        },
    ),
    Section(
        "the last round: shares of its time; hidden: of its exchange",
        lambda peer: peer.last_round is not None,
        {
            "sync_every": lambda _, peer: figure(peer.sync_every, ","),
            **{name: _share(name) for name in SHARES},
        },
    ),
    Section(
        "submissions, and how many epochs behind",
        lambda peer: peer.submissions is not None,
        {
            "counted": lambda _, peer: figure(getattr(peer.submissions, "counted", None), ","),
            "refused": lambda _, peer: figure(getattr(peer.submissions, "refused", None), ","),
            "buffered": lambda _, peer: _buffered(peer),
            "behind": lambda _, peer: _behind(peer),
        },
    ),
    Section(
        "shared data: samples of all epochs",
        lambda peer: bool(peer.data),
        {
            "data": lambda _, peer: ", ".join(one.name for one in peer.data) or UNKNOWN,
            "used": lambda _, peer: ", ".join(map(_used, peer.data)) or UNKNOWN,
            "of": lambda _, peer: ", ".join(map(_whole, peer.data)) or UNKNOWN,
            "leased": lambda _, peer: ", ".join(figure(one.leased, ",") for one in peer.data) or UNKNOWN,
        },
    ),
)


def told_of(peers: Sequence[PeerStatus]) -> list[str]:
    """The sentences: why peers believe their own machines to be faulty or couldn't save, who waits for what, and whose
    messages were refused, by whom, and why."""
    told = [f"{peer.name}: {why}" for peer in peers for why in (peer.doubt, peer.unsaved) if why]
    waiting: dict[str, list[str]] = {}
    for peer in peers:
        if peer.waits_for:
            waiting.setdefault(peer.waits_for, []).append(peer.name)
    told += [f"{listed(names, 3)}: {waits_for}" for waits_for, names in waiting.items()]
    return told + [f"{peer.name}: refused {one.count:,} of {one.peer}, the last one: {one.why}"
                   for peer in peers for one in peer.refused]  # fmt: skip


def _behind(peer: PeerStatus) -> str:
    """The peer's staleness histogram as text: how many submissions had a staleness in each bin. A bin is a range of
    epochs."""
    counts = () if peer.submissions is None else peer.submissions.staleness
    return ",".join(f"{title}:{count}" for title, count in zip(BINS, counts, strict=False) if count) or UNKNOWN


def _used(data: DataProgress) -> str:
    """The share of the samples of all epochs that is used; for data without end, the number of used samples."""
    return f"{data.used / (data.length * data.epochs):.1%}" if data.epochs else f"{data.used:,}"


def _whole(data: DataProgress) -> str:
    """The number of samples of all epochs, in words if the data has no end."""
    return f"{data.length * data.epochs:,}" if data.epochs else "no end"


def _buffered(peer: PeerStatus) -> str:
    """How many submissions are in the Delayed Nesterov buffers of the fragments that the peer leads: the least
    and the most."""
    if (found := peer.buffered) is None:
        return UNKNOWN
    return str(found.least) if found.least == found.most else f"{found.least}–{found.most}"


def _gpu_memory(peer: PeerStatus) -> str:
    """Text such as `11.2GB/85.0GB`: what its trainer holds of the memory of its GPUs."""
    if (memory := peer.gpu_memory) is None:
        return UNKNOWN
    return f"{bytes_of(memory.reserved)}/{bytes_of(memory.total)}"


def _direct(peer: PeerStatus) -> str:
    """Text such as `3/5 (1 relayed)`: of the 5 peers to which this one sends payloads, 3 get them directly and 1 over a
    relay."""
    if (ways := peer.ways) is None or not (total := ways.direct + ways.libp2p + ways.relayed):
        return UNKNOWN
    relayed = f" ({ways.relayed} relayed)" if ways.relayed else ""
    return f"{ways.direct}/{total}{relayed}"


def _aggregates(peer: PeerStatus) -> str:
    """The numbers of the slices that the peer aggregates. If there are many, only the first few numbers, and how many
    there are in all."""
    first = ",".join(str(index) for index in peer.aggregates[:SLICES_SHOWN])
    return f"{first}… ({peer.aggregates_count})" if peer.aggregates_count > SLICES_SHOWN else first or UNKNOWN
