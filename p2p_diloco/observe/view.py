"""Draws a `Snapshot` for people: tables on a terminal, lines of text anywhere else.

Law: only draws; it uses neither DHT nor clock, and the caller chooses the terminal. Both views show the same sections.
The tables fit any terminal of 60 columns and more: names are cut in their middle, to 8 letters at least; then whole
columns drop out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from p2p_diloco.node.status import PeerStatus
from p2p_diloco.observe.browsing import KEYS, KEYS_OF_ONE, Browsing
from p2p_diloco.observe.figures import figure
from p2p_diloco.observe.fitting import GAP, Widths, cut, fit, total
from p2p_diloco.observe.sections import SECTIONS, Section
from p2p_diloco.observe.snapshot import RunStatus, Snapshot
from p2p_diloco.observe.trend import Trend, sparkline

COLOURS = {"training": "green", "waiting": "yellow", "joining": "cyan", "idle": "red", "finished": "blue",
           "silent": "red"}  # fmt: skip
BAR_CELLS = 20
SPARK_CELLS = 40
EVENTS_SHOWN = 5
NAME_LEAST = 8
NAMES = ("peer", "host")
"""Columns whose texts are cut on a narrow screen."""
TEXTS = (*NAMES, "state", "role", "behind")
"""Columns that are aligned to the left."""
BETWEEN = 4
"""Characters between two tables that are side by side."""
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


@dataclass(frozen=True, slots=True)
class Drawing:
    """A run, as rich draws it in the width that there is."""

    seen: Snapshot
    trend: Trend = field(default_factory=Trend)
    browsing: Browsing | None = None
    """What the person in front of the screen has chosen. None: there are no keys."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        browsing = self.browsing or Browsing()
        one = browsing.chosen(self.seen.peers) if browsing.alone else None
        yield Text(_headline(self.seen), "bold")
        if one is None:
            yield from (Text(line, "dim") for line in _settings(self.seen.run))
            yield from _trends(self.trend)
            yield from (Text(line, "bold red" if above else "") for line, above in _compared(self.seen.run))
            yield from _progress(self.seen.run)
        rows = [one] if one is not None else browsing.sort(self.seen.peers)
        tables = (_table(section, self.seen, rows, options.max_width, browsing.marked) for section in SECTIONS)
        yield from _side_by_side([table for table in tables if table is not None], options.max_width)
        yield Text()
        below = _told_below(self.seen) if one is None else _details(self.seen, one)
        yield from (Text(line, "dim") for line in below)
        if self.browsing is not None:
            yield Text(KEYS_OF_ONE if one is not None else f"{KEYS}   sorted by {browsing.order}", "dim")


def lines(snapshot: Snapshot) -> list[str]:
    """The run as plain text: a line for the run, one for its settings, one for each peer, then the newest events."""
    told = [_headline(snapshot), *(f"  {line}" for line in _settings(snapshot.run))]
    told += [f"  {line}" for line, _ in _compared(snapshot.run)]
    for peer in snapshot.peers:
        columns = (pair for section in SECTIONS if section.shown(peer) for pair in section.columns.items())
        told.append(" ".join([f"  {peer.name}", *(f"{title}={cell(snapshot, peer)}" for title, cell in columns)]))
    return [*told, *(f"  {line}" for line in _told_below(snapshot))]


# -- tables


def _table(
    section: Section, seen: Snapshot, peers: Iterable[PeerStatus], width: int, marked: str | None
) -> tuple[Table, int] | None:
    """The section's table in at most this width, and its width. None if the table would have no row."""
    rows = [peer for peer in peers if section.shown(peer)]
    if not rows:
        return None
    texts = {"peer": [peer.name for peer in rows]}
    texts |= {title: [cell(seen, peer) for peer in rows] for title, cell in section.columns.items()}
    widths = fit({title: _widths(title, cells) for title, cells in texts.items()}, section.dropped, width)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), title_justify="left",
                  title=section.title, title_style="dim")  # fmt: skip
    for title, room in widths.items():
        table.add_column(title, justify="left" if title in TEXTS else "right", overflow="fold", width=room)
    for number, peer in enumerate(rows):
        cells = [_cell(title, texts[title][number], room) for title, room in widths.items()]
        table.add_row(*cells, style="reverse" if peer.peer_id == marked else "")
    return table, total(widths.values())


def _widths(title: str, cells: Iterable[str]) -> Widths:
    whole = max(map(len, (title, *cells)))
    can_shrink = title in (*NAMES, "behind")
    return Widths(min(whole, NAME_LEAST) if can_shrink else whole, whole)


def _cell(title: str, text: str, width: int) -> Text:
    return Text(cut(text, width) if title in NAMES else text, COLOURS.get(text, "dim") if title == "state" else "")


def _side_by_side(tables: Iterable[tuple[Table, int]], width: int) -> Iterator[RenderableType]:
    """The tables, as many beside each other as fit."""
    line, used = Table.grid(padding=(0, BETWEEN, 0, 0)), 0
    row: list[Table] = []
    for table, room in tables:
        if row and used + BETWEEN + room > width:
            line.add_row(*row)
            yield from (Text(), line)
            line, row, used = Table.grid(padding=(0, BETWEEN, 0, 0)), [], 0
        used += room + (BETWEEN if row else 0)
        row.append(table)
    if row:
        line.add_row(*row)
        yield from (Text(), line)


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
    """One line with the run's settings at its present revision. Without known settings there is no line."""
    now = {**(run.config or {}), **run.changed, "outer_lr": run.outer_lr, "outer_momentum": run.outer_momentum}
    shown = (*SETTINGS_SHOWN, *SHOWN_ASYNCHRONOUS) if run.mode == "async" else SETTINGS_SHOWN
    settings = [(key, now[key]) for key in shown if now.get(key) is not None]
    revised = f" (revision {run.revision})" if run.revision else ""
    return [" ".join(f"{key}={value}" for key, value in settings) + revised] if settings else []


def _compared(run: RunStatus) -> list[tuple[str, bool]]:
    """One line with the run's loss beside its baseline, and whether it is above the bound."""
    if (one := run.compared) is None:
        return []
    side = "above" if one.excess > 0 else "below"
    than = f"{abs(one.excess):.1%} {side} the baseline's {one.baseline:.4f} at {one.samples:,} samples"
    return [(f"{one.told} {one.loss:.4f}: {than}", one.above)]


def _refused(peers: Iterable[PeerStatus]) -> list[str]:
    """One line for each peer and each other peer of which it refused messages."""
    told = [(peer.name, one) for peer in peers for one in peer.refused]
    return [f"{name}: refused {one.count:,} of {one.peer}, the last one: {one.why}" for name, one in told]


def _doubts(peers: Iterable[PeerStatus]) -> list[str]:
    """One line for each peer that takes its own machine for faulty."""
    return [f"{peer.name}: {peer.doubt}" for peer in peers if peer.doubt]


def _waits(peers: Iterable[PeerStatus]) -> list[str]:
    """What the peers wait for: one line for each peer that waits for something."""
    return [f"{peer.name}: {peer.waits_for}" for peer in peers if peer.waits_for]


def _told_below(seen: Snapshot) -> list[str]:
    """What is told of the peers in whole lines."""
    return [*_doubts(seen.peers), *_waits(seen.peers), *_refused(seen.peers), *_events(seen.run)]


def _details(seen: Snapshot, peer: PeerStatus) -> list[str]:
    """What only a look at one peer shows."""
    told = [f"id {peer.peer_id}", *(f"address {address}" for address in peer.addresses)]
    if peer.revision is not None:
        told.append(f"revision {peer.revision}: outer_lr={peer.outer_lr} outer_momentum={peer.outer_momentum}")
    events = [f"{max(0.0, seen.time - event.time):.0f} s ago: {event.text}" for event in peer.events]
    return [*told, *_doubts([peer]), *_waits([peer]), *_refused([peer]), *events]


def _trends(trend: Trend) -> list[Text]:
    """A line for each value that has a history."""
    shown = (("loss", trend.loss, ".4f"), ("held-out", trend.held_out, ".4f"), ("steps/s", trend.speed, ".2f"))
    drawn = [
        (name, sparkline(values, SPARK_CELLS), figure(values[-1] if values else None, form))
        for name, values, form in shown
    ]
    return [Text.assemble(f"{name:<9}", (bars, "cyan"), f" {now}") for name, bars, now in drawn if bars]


def _events(run: RunStatus) -> list[str]:
    return [f"{event.peer}: {event.text}" for event in run.events[-EVENTS_SHOWN:]]


def _progress(run: RunStatus) -> list[Text]:
    if run.round is None:
        return []
    full = round(BAR_CELLS * min(1.0, run.round.got / run.round.want))
    bar = "█" * full + "░" * (BAR_CELLS - full)
    return [Text(f"{bar} fragment {run.round.fragment}: {run.round.got} of {run.round.want} contributions")]
