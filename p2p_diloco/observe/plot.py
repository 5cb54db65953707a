"""Draws a plot of curves: as lines of text, and as a PNG.

Law: draws the points that it is given, and knows nothing of runs. matplotlib (the extra "plot") is loaded only to write
a PNG.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

DPI = 150
COLOURS = ("#0b6e99", "#d1663c", "#5a5a5a", "#3c8d40")
STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve. In a text plot it is drawn with the character `mark`."""

    label: str
    mark: str
    points: tuple[tuple[float, float], ...]
    """(x, y) pairs with rising x."""


@dataclass(frozen=True, slots=True)
class Moment:
    """An event at the position `x`, marked in the plot with its label."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves and moments on one x axis, from `low` to `high`. `log_x`: the axis is logarithmic."""

    title: str
    x_label: str
    y_label: str
    low: float
    high: float
    curves: Sequence[Curve]
    moments: Sequence[Moment] = ()
    log_x: bool = False

    def text(self, width: int, height: int) -> list[str]:
        """The plot as lines of text: `height` rows of at most `width` characters, then axis and legend. There are no
        lines if no curve has a point. Where curves overlap, the first one is drawn."""
        ys = [y for curve in self.curves for _, y in curve.points]
        if not ys:
            return []
        least, most, columns = min(ys), max(ys), max(8, width - 7)
        step = (most - least) / max(1, height - 1) or 1.0
        cells = [[" "] * columns for _ in range(height)]
        for moment in self.moments:
            for line in cells:
                line[self._column(moment.x, columns)] = "┊"
        for curve in reversed(self.curves):
            places = [(self._place(x), y) for x, y in curve.points]
            for column in range(columns):
                if (y := value_at(places, (column + 0.5) / columns)) is not None:
                    cells[round((most - y) / step)][column] = curve.mark
        drawn = [f"{most - step * row:5.2f} ┤{''.join(line)}".rstrip() for row, line in enumerate(cells)]
        legend = "   ".join(f"{curve.mark} {curve.label}" for curve in self.curves)
        ends = " to ".join(f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in (self.low, self.high))
        below = [*self._labels(columns), legend, f"{self.y_label} by {self.x_label}: {ends}"]
        return [*drawn, f"{'':5} └{'─' * columns}", *(f"{'':7}{line}" for line in below)]

    def png(self, path: Path) -> None:
        """Write the plot as a PNG.

        Raises:
            ImportError: matplotlib isn't there. OSError: the file can't be written.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), dpi=DPI, layout="constrained")
        axes = figure.add_subplot()
        for curve, colour, style in zip(self.curves, COLOURS, STYLES, strict=False):
            xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
            last = f" ({ys[-1]:.3f})" if ys and not self.log_x else ""
            axes.plot(xs, ys, style, color=colour, linewidth=2, marker="o", markersize=3, label=curve.label + last)
        for number, moment in enumerate(self.moments):
            axes.axvline(moment.x, color="#888888", linewidth=1, linestyle=":")
            axes.annotate(
                moment.label, (moment.x, 1), xycoords=("data", "axes fraction"), xytext=(4, -4 - 12 * number),
                textcoords="offset points", va="top", fontsize=9, color="#555555",
            )  # fmt: skip
        axes.set(title=self.title, xlabel=self.x_label, ylabel=self.y_label, xscale="log" if self.log_x else "linear")
        axes.set_xlim(left=self.low)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        # the moments' labels are at the top
        axes.legend(loc="upper left" if self.log_x else "lower left", framealpha=1, edgecolor="none")
        figure.savefig(path, format="png")

    def _place(self, x: float) -> float:
        """Where an x is between the two ends of the axis: from 0 to 1."""
        if self.log_x:
            return math.log(x / self.low) / math.log(self.high / self.low)
        return (x - self.low) / ((self.high - self.low) or 1.0)

    def _column(self, x: float, columns: int) -> int:
        return min(columns - 1, max(0, int(self._place(x) * columns)))

    def _labels(self, columns: int) -> Iterator[str]:
        """A line below the axis for each moment's label, as near to its x as the width allows."""
        for moment in sorted(self.moments, key=lambda moment: moment.x):
            text = f"↑{moment.label}"
            yield " " * max(0, min(self._column(moment.x, columns), columns - len(text))) + text


def value_at(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The curve's y at x, interpolated linearly. None if x is before the first or after the last point."""
    if not points or not points[0][0] <= x <= points[-1][0]:
        return None
    after = bisect_left(points, x, key=itemgetter(0))
    (x0, y0), (x1, y1) = points[max(0, after - 1)], points[after]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
