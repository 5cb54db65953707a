"""What is seen while the demo goes on: a live view on a terminal, lines anywhere else. All of it on stderr.

Law: draws a `View` and knows nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2p_diloco.observe.plot import Curve, Moment, text_plot

LINE_EVERY_S = 10.0
EVENTS_MAX = 8
PLOT_ROWS = (5, 12)
"""Fewest and most; with less room there is no plot."""
PLOT_FOOT_ROWS, HEAD_ROWS = 4, 5
STYLES = {"training": "green", "finished": "blue", "killed": "bold red", "waiting": "yellow", "paused": "cyan"}


@dataclass(frozen=True, slots=True)
class Happening:
    """A sentence of the story."""

    at_s: float
    """Seconds since the demo's start."""
    text: str


@dataclass(frozen=True, slots=True)
class Actor:
    """A line of the table."""

    name: str
    state: str
    epoch: int | None = None
    steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    waited_s: float | None = None
    sent: int | None = None
    averages_next: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """The demo at one moment."""

    elapsed_s: float
    epoch: int
    epochs: int
    steps: int
    """Inner steps of a peer in the whole run."""
    folder: str
    actors: tuple[Actor, ...]
    curves: tuple[Curve, ...]
    moments: tuple[Moment, ...]
    happenings: tuple[Happening, ...]


class Screen(Protocol):
    """Somewhere to show a view."""

    def show(self, view: View) -> None:
        """Show it, as far as it is new."""


@contextmanager
def screen() -> Iterator[Screen]:
    """The live view if stderr is a terminal that can be drawn on, else lines."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield Lines()
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        drawing = Drawing(live)
        try:
            yield drawing
        finally:
            drawing.leave()


class Lines:
    """Each happening once, and now and then how far all have come."""

    def __init__(self) -> None:
        self._told = 0
        self._line_at = time.monotonic()

    def show(self, view: View) -> None:
        """As `Screen.show`."""
        for happening in view.happenings[self._told :]:
            self._line_at = time.monotonic()
            sys.stderr.write(f"{clock(happening.at_s)} {happening.text}\n")
        self._told = len(view.happenings)
        if time.monotonic() - self._line_at >= LINE_EVERY_S:
            self._line_at = time.monotonic()
            sys.stderr.write(f"{clock(view.elapsed_s)} {progress(view)}\n")
        sys.stderr.flush()


class Drawing:
    """A table, the curves and the last happenings, as much of it as the terminal has room for."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._last: View | None = None

    def show(self, view: View) -> None:
        """As `Screen.show`."""
        self._last = view
        size = self._live.console.size
        room = size.height - len(view.actors) - HEAD_ROWS - EVENTS_MAX - PLOT_FOOT_ROWS
        plotted = _plotted(view, size.width, min(room, PLOT_ROWS[1])) if room >= PLOT_ROWS[0] else []
        told = [_happening(happening) for happening in view.happenings[-EVENTS_MAX:]]
        for text in told:
            text.truncate(size.width, overflow="ellipsis")
        self._draw(view, [Text(), *plotted, *told])

    def leave(self) -> None:
        """What is to remain on the terminal: the whole story, and no curves, for the report has them."""
        if self._last is not None:
            self._draw(self._last, [Text(), *(_happening(happening) for happening in self._last.happenings)])

    def _draw(self, view: View, below: list[Text]) -> None:
        head = Text(f"p2p_diloco demo  {clock(view.elapsed_s)}  outer step {view.epoch} of {view.epochs}", "bold")
        head.append(f"  logs in {view.folder}", "dim")
        head.truncate(self._live.console.size.width, overflow="ellipsis")
        self._live.update(Group(head, Text(), _table(view), *below), refresh=True)


def progress(view: View) -> str:
    """One line on how far all have come."""
    parts = []
    for actor in view.actors:
        if actor.state == "killed" or actor.steps is None:
            parts.append(f"{actor.name} {actor.state}")
        else:
            loss = "" if actor.val_loss is None else f", held-out {actor.val_loss:.3f}"
            parts.append(f"{actor.name} {actor.steps} steps{loss}")
    return f"outer step {view.epoch} of {view.epochs}: " + "; ".join(parts)


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def bytes_of(amount: float | None) -> str:
    """An amount of bytes, in decimal units."""
    if amount is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.2f} GB"


def _table(view: View) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, width in (("peer", 6), ("state", 8)):
        table.add_column(title, no_wrap=True, min_width=width)
    for title in ("epoch", "steps", "loss", "held-out", "waited", "sent"):
        table.add_column(title, justify="right", no_wrap=True, min_width=5)
    table.add_column("", no_wrap=True)
    for actor in view.actors:
        table.add_row(
            actor.name,
            Text(actor.state, STYLES.get(actor.state, "dim")),
            "-" if actor.epoch is None else f"{actor.epoch}",
            "-" if actor.steps is None else f"{actor.steps:,}",
            "-" if actor.loss is None else f"{actor.loss:.2f}",
            "-" if actor.val_loss is None else f"{actor.val_loss:.3f}",
            "-" if actor.waited_s is None else f"{actor.waited_s:.0f} s",
            bytes_of(actor.sent),
            Text("averages next" if actor.averages_next else "", "magenta"),
        )
    return table


def _plotted(view: View, width: int, height: int) -> list[Text]:
    lines = text_plot(
        view.curves, view.moments, view.steps, min(width - 1, 78), height, "held-out loss by own inner steps"
    )
    drawn = [Text(line, no_wrap=True, overflow="crop") for line in lines]
    for line in drawn:
        for curve, colour in zip(view.curves, ("green", "yellow"), strict=False):
            line.highlight_regex(curve.mark, colour)
        line.highlight_regex("┊", "dim")
    return drawn


def _happening(happening: Happening) -> Text:
    return Text(f"{clock(happening.at_s):>5}  {happening.text}")
