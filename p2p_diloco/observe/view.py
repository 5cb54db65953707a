"""Draws a `Snapshot` for people: tables on a terminal, lines of text anywhere else.

Law: only draws a snapshot; it uses neither DHT nor clock, and the caller chooses the terminal. Both views show the same
sections. A section is a list of columns, so a field of `PeerStatus` is shown by one line in `SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2p_diloco.node.status import LastRound, PeerStatus
from p2p_diloco.observe.figures import UNKNOWN, bytes_of, figure
from p2p_diloco.observe.snapshot import RunStatus, Snapshot

COLOURS = {"training": "green", "waiting": "yellow", "joining": "cyan", "idle": "red", "finished": "blue"}
BAR_CELLS = 20
EVENTS_SHOWN = 5
SHARDS_SHOWN = 4
SETTINGS_SHOWN = (
    "sync_every",
    "pace",
    "num_fragments",
    "codec",
    "outer_optimizer",
    "outer_lr",
    "outer_momentum",
    "min_peers",
    "stop_after_epochs",
    "stop_after_samples",
)
"""The settings of the run that are shown; `--json` has all."""
SHOWN_ASYNCHRONOUS = ("dn_buffer_size", "dylu", "async_grace", "max_staleness", "successors")
"""Further settings, which are shown only in asynchronous mode."""
BINS = ("0", "1", "2", "3", "4–5", "6–7", "8–11", "12–15", "16–23", "24–31", "32–63", "64+")
"""The bins of a staleness histogram, in epochs."""

WRAPPED = ("peer", "host", "behind")
"""Columns whose text is wrapped on a narrow screen."""
TEXTS = (*WRAPPED, "state", "role")
"""Columns that are aligned to the left."""

Cell = Callable[[Snapshot, PeerStatus], str]


@dataclass(frozen=True, slots=True)
class Section:
    """A table of peers. It has a row for each peer for which `shown` returns true."""

    title: str
    shown: Callable[[PeerStatus], bool]
    columns: Mapping[str, Cell]


def _share(name: str) -> Cell:
    return lambda _, peer: figure(getattr(peer.last_round, name, None), ".1%")


SECTIONS = (
    Section(
        "",
        lambda peer: True,
        {
            "state": lambda _, peer: peer.state or UNKNOWN,
            "role": lambda _, peer: peer.role or UNKNOWN,
            "host": lambda _, peer: peer.host or UNKNOWN,
            "epoch": lambda _, peer: figure(peer.epoch, ","),
            "step": lambda _, peer: figure(peer.step, ","),
            "steps/s": lambda _, peer: figure(peer.steps_per_second, ".2f"),
            "loss": lambda _, peer: figure(peer.loss, ".4f"),
            "seen": lambda seen, peer: _seconds(seen.last_seen_s(peer)),
        },
    ),
    Section(
        "exchanges",
        lambda peer: peer.epoch is not None,
        {
            "samples": lambda _, peer: figure(peer.samples, ","),
            "waiting": lambda _, peer: _seconds(peer.waiting_s),
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
        "the last round: shares of its time, and of its exchange",
        lambda peer: peer.last_round is not None,
        {
            "sync_every": lambda _, peer: figure(peer.sync_every, ","),
            **{field.name: _share(field.name) for field in fields(LastRound)},
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
)


def drawn(snapshot: Snapshot) -> RenderableType:
    """Draw the run: a headline, its settings, its round's progress, tables of its peers, and the newest events."""
    settings = [Text(line, "dim") for line in _settings(snapshot.run)]
    tables = [table for section in SECTIONS for table in _tables(section, snapshot)]
    events = [Text(line, "dim") for line in _events(snapshot.run)]
    return Group(Text(_headline(snapshot), "bold"), *settings, *_progress(snapshot.run), *tables, *events)


def _tables(section: Section, snapshot: Snapshot) -> list[Table]:
    """The section's table. An empty list if the table would have no row."""
    rows = [peer for peer in snapshot.peers if section.shown(peer)]
    if not rows:
        return []
    heading = f"\n{section.title}" if section.title else None
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=heading, title_justify="left")
    for title in ("peer", *section.columns):
        text, wraps = title in TEXTS, title in WRAPPED
        table.add_column(title, justify="left" if text else "right", overflow="fold", no_wrap=not wraps,
                         min_width=9 if wraps else None)  # fmt: skip
    for peer in rows:
        cells = [Text(cell(snapshot, peer), COLOURS.get(peer.state, "dim") if title == "state" else "")
                 for title, cell in section.columns.items()]  # fmt: skip
        table.add_row(Text(peer.name), *cells)
    return [table]


def lines(snapshot: Snapshot) -> list[str]:
    """The run as plain text: a line for the run, one for its settings, one for each peer, then the newest events."""
    told = [_headline(snapshot), *(f"  {line}" for line in _settings(snapshot.run))]
    for peer in snapshot.peers:
        columns = (pair for section in SECTIONS if section.shown(peer) for pair in section.columns.items())
        told.append(" ".join([f"  {peer.name}", *(f"{title}={cell(snapshot, peer)}" for title, cell in columns)]))
    return [*told, *(f"  {line}" for line in _events(snapshot.run))]


# -- the run


def _headline(snapshot: Snapshot) -> str:
    run, count = snapshot.run, len(snapshot.peers)
    parts = [f"run {run.run_id}", f"epoch {run.epoch}", f"{count} peer{'' if count == 1 else 's'}"]
    if run.mode:
        parts.insert(1, run.mode)
    if run.shards is not None:
        parts.append(f"{run.shards} shard{'' if run.shards == 1 else 's'}")
    if run.round is not None:
        parts.append(f"round {run.round.got} of {run.round.want}")
    if run.config is None and not snapshot.peers:
        parts = [f"run {run.run_id}: no peer has founded it yet"]
    return ", ".join(parts)


def _settings(run: RunStatus) -> list[str]:
    """One line with the run's settings. The outer rates in it are the present ones. Without known settings there is no
    line."""
    now = {**(run.config or {}), "outer_lr": run.outer_lr, "outer_momentum": run.outer_momentum}
    shown = (*SETTINGS_SHOWN, *SHOWN_ASYNCHRONOUS) if run.mode == "async" else SETTINGS_SHOWN
    settings = [(key, now[key]) for key in shown if now.get(key) is not None]
    revised = f" (revision {run.revision})" if run.revision else ""
    return [" ".join(f"{key}={value}" for key, value in settings) + revised] if settings else []


def _events(run: RunStatus) -> list[str]:
    return [f"{event.peer}: {event.text}" for event in run.events[-EVENTS_SHOWN:]]


def _progress(run: RunStatus) -> list[Text]:
    if run.round is None:
        return []
    full = round(BAR_CELLS * min(1.0, run.round.got / run.round.want))
    bar = "█" * full + "░" * (BAR_CELLS - full)
    return [Text(f"{bar} fragment {run.round.fragment}: {run.round.got} of {run.round.want} contributions")]


# -- cells


def _behind(peer: PeerStatus) -> str:
    """The peer's staleness histogram as text: how many submissions had a staleness in each bin. A bin is a range of
    epochs."""
    counts = () if peer.submissions is None else peer.submissions.staleness
    return ",".join(f"{title}:{count}" for title, count in zip(BINS, counts, strict=False) if count) or UNKNOWN


def _buffered(peer: PeerStatus) -> str:
    """How many submissions are in the Delayed Nesterov buffers of the shards that the peer aggregates: the least and
    the most."""
    if (found := peer.buffered) is None:
        return UNKNOWN
    return str(found.least) if found.least == found.most else f"{found.least}–{found.most}"


def _direct(peer: PeerStatus) -> str:
    """Text such as `3/5 (1 relayed)`: of the 5 peers to which this one sends payloads, 3 get them directly and 1 over a
    relay."""
    if (ways := peer.ways) is None or not (total := ways.direct + ways.libp2p + ways.relayed):
        return UNKNOWN
    relayed = f" ({ways.relayed} relayed)" if ways.relayed else ""
    return f"{ways.direct}/{total}{relayed}"


def _aggregates(peer: PeerStatus) -> str:
    """The numbers of the shards that the peer aggregates. If there are many, only the first few numbers, and how many
    there are in all."""
    first = ",".join(str(shard) for shard in peer.aggregates[:SHARDS_SHOWN])
    return f"{first}… ({peer.aggregates_count})" if peer.aggregates_count > SHARDS_SHOWN else first or UNKNOWN


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}s" if value < 600 else f"{value / 60:.0f}min"
