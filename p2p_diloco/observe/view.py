"""Draws a `Snapshot` for people: tables on a terminal, lines of text anywhere else.

Law: only draws; it uses neither DHT nor clock, and the caller chooses the terminal. Both views show the same sections.
The tables fit any terminal of 60 columns and more: names are cut in their middle, to 8 letters at least; then whole
columns drop out. On a terminal with few lines, whole parts drop out, the settings first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from p2p_diloco.node.status import PeerStatus
from p2p_diloco.observe.browsing import KEYS, KEYS_OF_ONE, Browsing
from p2p_diloco.observe.figures import figure, seconds
from p2p_diloco.observe.fitting import GAP, Widths, cut, fit, total
from p2p_diloco.observe.sections import NAMES, SECTIONS, TEXTS, Section, told_of
from p2p_diloco.observe.snapshot import RunStatus, Snapshot
from p2p_diloco.observe.trend import Trend, sparkline

COLOURS = {"training": "green", "waiting": "yellow", "joining": "cyan", "paused": "magenta", "idle": "red",
           "aggregating": "green", "finished": "blue", "silent": "red", "dead": "bold red"}  # fmt: skip
SPARK_CELLS = 40
EVENTS_SHOWN = 5
TOLD_SHOWN, TOLD_FEW = 12, 4
"""The most sentences below the tables: if every peer has a row, and if peers are left out."""
NAME_LEAST = 8
BETWEEN = 4
"""Characters between two tables that are side by side."""
LINES_BESIDE_ROWS = 13
"""Lines of the screen that are not for rows of peers: the headline, the heads of the table, the keys, sentences."""
ROWS_LEAST = 3
SETTINGS_SHOWN = ("sync_every", "pace", "num_fragments", "codec", "outer", "outer_optimizer", "outer_lr",
                  "outer_momentum", "min_peers", "stop_after_epochs", "stop_after_samples")  # fmt: skip
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
    height: int | None = None
    """The most lines that are drawn, those of the screen. None: any number."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        drawn = self._parts(options.max_width)
        parts = [(rank, console.render_lines(part, options, pad=False)) for rank, part in drawn]
        while self.height is not None and sum(len(lines) for _, lines in parts) > self.height and len(parts) > 1:
            parts.remove(max(parts, key=lambda part: part[0]))
        for _, lines in parts:
            for line in lines:
                yield from line
                yield Segment.line()

    def _parts(self, width: int) -> Iterator[tuple[int, RenderableType]]:
        """Yield (rank, part) for each part of the screen, from top to bottom. If the screen has too few lines for
        all parts, the part with the greatest number as its rank is left out first."""
        browsing, seen = self.browsing or Browsing(), self.seen
        one = browsing.chosen(seen.peers) if browsing.alone else None
        peers = [one] if one is not None else browsing.sort(seen.peers)
        rows, left_out = self._window(peers, browsing.marked)
        yield 0, Text(_headline(seen), "bold")
        if one is None:
            yield 99, Group(*(Text(line, "dim") for line in _settings(seen.run)))
            yield 3, Group(*_trends(self.trend))
            yield 1, Group(*(Text(line, "bold red" if above else "") for line, above in _compared(seen.run)))
        tables = [(rank, *table) for rank, section in enumerate(SECTIONS)
                  if (table := _table(section, seen, rows, width, browsing.marked)) is not None]  # fmt: skip
        for row in _side_by_side(tables, width):
            first, *_ = row
            grid = Table.grid(padding=(0, BETWEEN, 0, 0))
            grid.add_row(*(table for _, table, _ in row))
            yield 4 + first[0] if first[0] else 1, Group(Text(), grid)
        if left_out:
            yield 1, Text(left_out, "dim")
        told = _told_below(seen)[: TOLD_FEW if left_out else TOLD_SHOWN] if one is None else _details(seen, one)
        yield 2, Group(Text(), *(Text(line, "dim") for line in told))
        if self.browsing is not None:
            yield 0, Text(KEYS_OF_ONE if one is not None else f"{KEYS}   sorted by {browsing.order}", "dim")

    def _window(self, peers: Sequence[PeerStatus], marked: str | None) -> tuple[Sequence[PeerStatus], str]:
        """The peers that there is room for, the marked one among them, and a line about those left out; empty if none
        is."""
        most = len(peers) if self.height is None else max(ROWS_LEAST, self.height - LINES_BESIDE_ROWS)
        if len(peers) <= most:
            return peers, ""
        at = next((at for at, peer in enumerate(peers) if peer.peer_id == marked), 0)
        first = min(max(0, at - most // 2), len(peers) - most)
        return peers[first : first + most], f"peers {first + 1} to {first + most} of {len(peers)}: ↑ ↓ shows the others"


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
    if not (rows := section.rows(seen, peers)):
        return None
    columns = zip(*(cells for _, cells in rows), strict=True)
    whole = {title: _widths(title, texts) for title, texts in zip(section.titles, columns, strict=True)}
    widths = fit(whole, section.dropped, width)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), title_justify="left",
                  title=section.title, title_style="dim")  # fmt: skip
    for title, room in widths.items():
        table.add_column(title, justify="left" if title in TEXTS else "right", overflow="fold", width=room)
    for peer, cells in rows:
        texts = dict(zip(section.titles, cells, strict=True))
        table.add_row(*(_cell(title, texts[title], room) for title, room in widths.items()),
                      style="reverse" if peer.peer_id == marked else "")  # fmt: skip
    return table, total(widths.values())


def _widths(title: str, cells: Iterable[str]) -> Widths:
    whole = max(map(len, (title, *cells)))
    can_shrink = title in (*NAMES, "behind")
    return Widths(min(whole, NAME_LEAST) if can_shrink else whole, whole)


def _cell(title: str, text: str, width: int) -> Text:
    return Text(cut(text, width) if title in NAMES else text, COLOURS.get(text, "dim") if title == "state" else "")


def _side_by_side(tables: Iterable[tuple[int, Table, int]], width: int) -> Iterator[list[tuple[int, Table, int]]]:
    """The tables (rank, table, width) in their order, grouped into rows of as many as fit side by side."""
    row: list[tuple[int, Table, int]] = []
    for table in tables:
        if row and sum(room + BETWEEN for _, _, room in row) + table[2] > width:
            yield row
            row = []
        row.append(table)
    if row:
        yield row


# -- the run


def _headline(snapshot: Snapshot) -> str:
    run, count = snapshot.run, len(snapshot.peers)
    if run.config is None and not count:
        return f"run {run.run_id}: no peer of it is seen (--run-id names another run)"
    parts = [f"run {run.run_id}", run.mode, f"epoch {run.epoch}", f"{count} peer{'' if count == 1 else 's'}"]
    if run.shards is not None:
        parts.append(f"{run.shards} shard{'' if run.shards == 1 else 's'}")
    if run.round is not None:
        parts.append(f"fragment {run.round.fragment}: {run.round.got} of {run.round.want} contributions")
    if run.deaths.count:
        parts.append(run.deaths.text)
    if run.ends_in_s:
        parts.append(f"ends in about {seconds(run.ends_in_s)}")
    return ", ".join(filter(None, parts))


def _settings(run: RunStatus) -> list[str]:
    """One line with the run's settings at its present revision. Without known settings there is no line."""
    now = {**(run.config or {}), **run.changed, "outer_lr": run.outer_lr, "outer_momentum": run.outer_momentum}
    shown = (*SETTINGS_SHOWN, *SHOWN_ASYNCHRONOUS) if run.mode == "async" else SETTINGS_SHOWN
    settings = [(key, now[key]) for key in shown if now.get(key) is not None]
    revised = f" (revision {run.revision})" if run.revision else ""
    return [" ".join(f"{key}={_short(value)}" for key, value in settings) + revised] if settings else []


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"


def _compared(run: RunStatus) -> list[tuple[str, bool]]:
    """One line with the run's loss beside its baseline, and whether it is above the bound."""
    if (one := run.compared) is None:
        return []
    side = "above" if one.excess > 0 else "below"
    than = f"{abs(one.excess):.1%} {side} the baseline's {one.baseline:.4f} at {one.samples:,} samples"
    return [(f"{one.told} {one.loss:.4f}: {than}", one.above)]


def _trends(trend: Trend) -> Iterator[Text]:
    """A line for each value that has a history."""
    for name, values, form in (("loss", trend.loss, ".4f"), ("held-out", trend.held_out, ".4f"),
                               ("steps/s", trend.speed, ".2f")):  # fmt: skip
        if bars := sparkline(values, SPARK_CELLS):
            yield Text.assemble(f"{name:<9}", (bars, "cyan"), f" {figure(values[-1], form)}")


# -- what is told in whole lines


def _told_below(seen: Snapshot) -> list[str]:
    """The sentences about all peers, then the newest events, the oldest of them first."""
    events = [f"{event.peer}: {event.text}" for event in seen.run.events[-EVENTS_SHOWN:]]
    ages = [seconds(max(0.0, seen.time - event.time)) for event in seen.run.events[-EVENTS_SHOWN:]]
    wide = max(map(len, ages), default=0)
    return [*told_of(seen.peers), *(f"{age:>{wide}} ago  {event}" for age, event in zip(ages, events, strict=True))]


def _details(seen: Snapshot, peer: PeerStatus) -> list[str]:
    """The lines about the peer that is shown alone: its id, addresses, revision, sentences and events."""
    told = [f"id {peer.peer_id}", *(f"address {address}" for address in peer.addresses)]
    if peer.revision is not None:
        told.append(
            f"revision {peer.revision}: outer_lr={_short(peer.outer_lr)} outer_momentum={_short(peer.outer_momentum)}"
        )
    events = [f"{seconds(max(0.0, seen.time - event.time))} ago  {event.text}" for event in peer.events]
    return [*told, *told_of([peer]), *events]
