"""The display during the demo, on stderr. It prints events as lines; on a terminal there is a live view below them.

Law: draws a `Stage` and changes nothing.
"""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2p_diloco.cli.demo.stage import Stage
from p2p_diloco.observe.figures import UNKNOWN, bytes_of, figure
from p2p_diloco.observe.plot import text_plot

LINE_EVERY_S = 10.0
PLOT_ROWS = (5, 12)
"""The fewest and most rows of the plot; with less room there is no plot."""
PLOT_FOOT_ROWS, HEAD_ROWS = 4, 5
STYLES = {"training": "green", "finished": "blue", "killed": "bold red", "waiting": "yellow", "paused": "cyan"}


class Screen:
    """Prints the demo's events. On a terminal it also draws a live view; elsewhere it now and then prints a line of
    progress."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        drawable = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop") if drawable else None
        self._told = 0
        self._line_at = time.monotonic()
        self._head = Group()

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._head)  # without the plot: the report draws it
            self._live.stop()

    def show(self, stage: Stage) -> None:
        for at_s, text in stage.story[self._told :]:
            self._line(at_s, text)
        self._told = len(stage.story)
        if self._live is not None:
            self._head = Group(_headline(stage), Text(), _table(stage))
            size = self._console.size
            room = min(size.height - len(stage.everyone) - HEAD_ROWS - PLOT_FOOT_ROWS, PLOT_ROWS[1])
            plot = _plot(stage, size.width, room) if room >= PLOT_ROWS[0] else []
            self._live.update(Group(self._head, Text(), *plot), refresh=True)
        elif time.monotonic() - self._line_at >= LINE_EVERY_S:
            self._line(stage.elapsed_s, progress(stage))

    def _line(self, at_s: float, text: str) -> None:
        self._line_at = time.monotonic()
        self._console.print(f"{clock(at_s)} {text}", soft_wrap=True, markup=False, highlight=False)


def progress(stage: Stage) -> str:
    """One line with the progress of all training processes."""
    parts = []
    for player in stage.everyone:
        if player.child.killed or not player.rows:
            parts.append(f"{player.name} {player.state}")
        else:
            loss = "" if player.val_loss is None else f", held-out {player.val_loss:.3f}"
            parts.append(f"{player.name} {player.steps} steps{loss}")
    return f"outer step {stage.epoch} of {stage.script.epochs}: " + "; ".join(parts)


def clock(seconds: float) -> str:
    """A time as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _headline(stage: Stage) -> Text:
    head = Text(f"p2p_diloco demo  {clock(stage.elapsed_s)}  outer step {stage.epoch} of {stage.script.epochs}", "bold")
    head.append(f"  logs in {stage.children.folder}", "dim")
    head.no_wrap, head.overflow = True, "ellipsis"
    return head


def _table(stage: Stage) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, width in (("peer", 6), ("state", 8)):
        table.add_column(title, no_wrap=True, min_width=width)
    for title in ("epoch", "steps", "loss", "held-out", "waited", "sent"):
        table.add_column(title, justify="right", no_wrap=True, min_width=5)
    table.add_column("", no_wrap=True)
    averager = stage.averages_next(stage.epoch)
    for player in stage.everyone:
        table.add_row(
            player.name,
            Text(player.state, STYLES.get(player.state, "dim")),
            f"{player.epoch}" if player.rows and player.in_run else UNKNOWN,
            f"{player.steps:,}" if player.rows else UNKNOWN,
            figure(player.loss, ".2f"),
            figure(player.val_loss, ".3f"),
            figure(player.told.get("waiting_s"), ".0f", " s"),
            bytes_of(player.told.get("bytes_sent"), " "),
            Text("averages next" if player.name == averager and player.trains else "", "magenta"),
        )
    return table


def _plot(stage: Stage, width: int, height: int) -> list[Text]:
    label, curves = "held-out loss by own inner steps", stage.curves()
    lines = text_plot(curves, stage.moments, stage.script.steps, min(width - 1, 78), height, label)
    drawn = [Text(line, no_wrap=True, overflow="crop") for line in lines]
    for line in drawn:
        for curve, colour in zip(curves, ("green", "yellow"), strict=True):
            line.highlight_regex(curve.mark, colour)
        line.highlight_regex("┊", "dim")
    return drawn
