"""Curves as text and as a PNG: points end up where they belong."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.observe.plot import Curve, Moment, text_plot, write_png

FALLING = Curve("falling", "●", ((0.0, 2.0), (100.0, 1.0)))
FLAT = Curve("flat", "○", ((50.0, 1.0), (100.0, 1.0)))


def test_a_curve_goes_from_corner_to_corner() -> None:
    """The highest value is in the first row, the lowest in the last, and each column has one mark."""
    lines = text_plot([FALLING], [], 100, width=27, height=5, x_label="x")
    rows = [line[7:].ljust(20) for line in lines[:5]]
    assert [line[:5] for line in lines[:5]] == [" 2.00", " 1.75", " 1.50", " 1.25", " 1.00"]
    assert rows[0].startswith("●")
    assert rows[4].endswith("●")
    assert all("".join(column).count("●") == 1 for column in zip(*rows, strict=True))
    assert [row.index("●") for row in rows] == sorted(row.index("●") for row in rows)


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
