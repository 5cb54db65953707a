"""Draws curves, as text and as a PNG.

Law: draws the points that it is given, and knows nothing of runs. matplotlib (the extra "plot") is loaded only to write
a PNG.
"""

from __future__ import annotations

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


def text_plot(
    curves: Sequence[Curve],
    moments: Sequence[Moment],
    x_max: float,
    width: int,
    height: int,
    x_label: str,
    *,
    ends: tuple[str, str] | None = None,
) -> list[str]:
    """Draw a plot as lines of text: `height` rows of at most `width` characters, then axis and legend. There are no
    lines if no curve has a point.

    The x axis goes from 0 to `x_max`. `ends`: what its two ends are called, if 0 and `x_max` stand for other values, as
    on a logarithmic scale; None: 0 and `x_max`. Where curves overlap, the first one is drawn.
    """
    ys = [y for curve in curves for _, y in curve.points]
    if not ys:
        return []
    low, high = min(ys), max(ys)
    span = (high - low) or 1.0
    columns = max(8, width - 7)
    cells = [[" "] * columns for _ in range(height)]
    for moment in moments:
        for line in cells:
            line[_column(moment.x, x_max, columns)] = "┊"
    for curve in reversed(curves):
        for column in range(columns):
            y = value_at(curve.points, (column + 0.5) / columns * x_max)
            if y is not None:
                cells[round((high - y) / span * (height - 1))][column] = curve.mark
    scale = [f"{high - span * row / max(1, height - 1):5.2f}" for row in range(height)]
    shown = [f"{scale[row]} ┤{''.join(cells[row])}".rstrip() for row in range(height)]
    first, last = ends or ("0", f"{x_max:,.0f}")
    shown.append(f"{'' if ends else first:>5} └{'─' * columns}")
    shown += [" " * 7 + line for line in _labels(moments, x_max, columns)]
    legend = "   ".join(f"{curve.mark} {curve.label}" for curve in curves)
    return [*shown, f"{'':7}{legend}", f"{'':7}{x_label}: {first} to {last}"]


def value_at(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The curve's y at x, interpolated linearly. None if x is before the first or after the last point."""
    if not points or not points[0][0] <= x <= points[-1][0]:
        return None
    after = bisect_left(points, x, key=itemgetter(0))
    (x0, y0), (x1, y1) = points[max(0, after - 1)], points[after]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def write_png(
    path: Path,
    curves: Sequence[Curve],
    moments: Sequence[Moment],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
) -> None:
    """Write the curves as a PNG. `log_x`: True: the x axis is logarithmic; False: it begins at 0.

    Raises:
        ImportError: matplotlib isn't there. OSError: the file can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    for curve, colour, style in zip(curves, COLOURS, STYLES, strict=False):
        xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
        last = f" ({ys[-1]:.3f})" if ys and not log_x else ""
        axes.plot(xs, ys, style, color=colour, linewidth=2, marker="o", markersize=3, label=curve.label + last)
    for number, moment in enumerate(moments):
        axes.axvline(moment.x, color="#888888", linewidth=1, linestyle=":")
        axes.annotate(
            moment.label, (moment.x, 1), xycoords=("data", "axes fraction"), xytext=(4, -4 - 12 * number),
            textcoords="offset points", va="top", fontsize=9, color="#555555",
        )  # fmt: skip
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    if log_x:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    # matplotlib's "best" would put the legend over the moments' labels at the top
    if log_x:
        axes.legend(loc="upper left", framealpha=1, edgecolor="none")
    else:
        axes.legend(loc="lower left" if moments else "best", framealpha=1, edgecolor="none")
    figure.savefig(path, format="png")


def _column(x: float, x_max: float, columns: int) -> int:
    return min(columns - 1, max(0, int(x / x_max * columns))) if x_max else 0


def _labels(moments: Sequence[Moment], x_max: float, columns: int) -> Iterator[str]:
    """A line below the axis for each moment's label, as near to its x as the width allows."""
    for moment in sorted(moments, key=lambda moment: moment.x):
        text = f"↑{moment.label}"
        yield " " * max(0, min(_column(moment.x, x_max, columns), columns - len(text))) + text
