"""Curves as text and as a PNG: points end up where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.observe.plot import Curve, Moment, text_plot, value_at, write_png

FALLING = Curve("falling", "●", ((0.0, 2.0), (100.0, 1.0)))
FLAT = Curve("flat", "○", ((50.0, 1.0), (100.0, 1.0)))


def test_values_lie_on_straight_lines_between_points() -> None:
    """Half-way is the mean, a point is itself, and outside there is nothing."""
    assert [value_at(FALLING.points, x) for x in (0.0, 25.0, 100.0)] == [2.0, 1.75, 1.0]
    assert value_at(FLAT.points, 49.0) is None
    assert value_at(FLAT.points[:1], 51.0) is None


def test_a_curve_goes_from_corner_to_corner() -> None:
    """The highest value is in the first row, the lowest in the last, and each column has one mark."""
    lines = text_plot([FALLING], [], 100, width=27, height=5, x_label="x")
    rows = [line[7:].ljust(20) for line in lines[:5]]
    assert [line[:5] for line in lines[:5]] == [" 2.00", " 1.75", " 1.50", " 1.25", " 1.00"]
    assert rows[0].startswith("●")
    assert rows[4].endswith("●")
    assert all("".join(column).count("●") == 1 for column in zip(*rows, strict=True))
    assert [row.index("●") for row in rows] == sorted(row.index("●") for row in rows)


def test_ends_with_other_names_stand_for_other_values() -> None:
    """As on a logarithmic scale: the axis then has no 0."""
    lines = text_plot([FALLING], [], 100, width=40, height=3, x_label="speed", ends=("1 Mbit/s", "1 Gbit/s"))
    assert lines[-1].strip() == "speed: 1 Mbit/s to 1 Gbit/s"
    assert lines[3].strip().startswith("└")


def test_the_first_curve_is_seen_where_two_meet_and_the_second_elsewhere() -> None:
    """Neither hides the other altogether."""
    lines = text_plot([FALLING, FLAT], [], 100, width=27, height=3, x_label="x")
    assert lines[2][7:] == " " * 10 + "○" * 5 + "●" * 5  # rows are half a unit high: the last quarter is shared
    assert lines[-2].split() == ["●", "falling", "○", "flat"]


def test_moments_stand_at_their_x_and_their_labels_never_overlap() -> None:
    """A label that has no room beside another gets a line of its own; none leaves the plot."""
    moments = [Moment(50, "first"), Moment(55, "second"), Moment(99, "at the very end")]
    lines = text_plot([FALLING], moments, 100, width=47, height=4, x_label="x")
    assert all(line[7 + 20] == "┊" or line[7 + 20] == "●" for line in lines[:4])
    labels = lines[5:-2]
    assert labels[0].index("↑first") == 7 + 20
    assert "second" in labels[1]
    assert max(len(line) for line in labels) <= 47


def test_no_points_no_plot_and_one_value_no_division_by_zero() -> None:
    """A run that has nothing to show yet is no error."""
    assert text_plot([Curve("empty", "●", ())], [], 100, 40, 5, "x") == []
    assert any("○" in line for line in text_plot([FLAT], [], 100, 40, 5, "x")[:5])


def test_the_png_is_a_png_with_the_curves(tmp_path: Path) -> None:
    """It has the size that was asked for, and isn't the same without the curves."""
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("matplotlib.image")
    drawn, empty = tmp_path / "drawn.png", tmp_path / "empty.png"
    words = {"title": "t", "x_label": "x", "y_label": "y"}
    write_png(drawn, [FALLING, FLAT], [Moment(50, "half")], **words)
    write_png(empty, [Curve("falling", "●", ()), Curve("flat", "○", ())], [Moment(50, "half")], **words)
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    with_curves, without = image.imread(drawn), image.imread(empty)
    assert with_curves.shape[:2] == (675, 1200)
    assert (with_curves[:, :, :3].min(axis=2) < 0.9).sum() > (without[:, :, :3].min(axis=2) < 0.9).sum() + 1000


def test_the_legend_of_a_png_hides_no_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where curves fall there is room above them and below, and the moments have theirs above."""
    figure_module = pytest.importorskip("matplotlib.figure")
    saved: list[Any] = []
    savefig = figure_module.Figure.savefig
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda *a, **k: (saved.append(a[0]), savefig(*a, **k)))
    curves = [Curve(name, "●", FALLING.points) for name in ("the run's global parameters", "one peer alone")]
    moments = [Moment(float(x), f"peer {x} joined") for x in (20, 52)]
    write_png(tmp_path / "it.png", curves, moments, title="t", x_label="x", y_label="y")
    (axes,) = saved[0].axes
    legend = axes.get_legend().get_window_extent()
    assert len(axes.texts) == 2
    assert not any(legend.overlaps(text.get_window_extent()) for text in axes.texts)
