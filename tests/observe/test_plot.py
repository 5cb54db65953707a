"""Curves as text and as a PNG: points end up where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from p2p_diloco.observe.plot import Curve, Moment, Plot

FALLING = Curve("falling", "●", ((0.0, 2.0), (100.0, 1.0)))
FLAT = Curve("flat", "○", ((50.0, 1.0), (100.0, 1.0)))


def plot(*curves: Curve, moments: Sequence[Moment] = ()) -> Plot:
    return Plot("t", "x", "y", 0, 100, curves, moments)


def test_a_curve_goes_from_corner_to_corner() -> None:
    """The highest value is in the first row, the lowest in the last, and each column has one mark."""
    lines = plot(FALLING).text(27, 5)
    rows = [line[7:].ljust(20) for line in lines[:5]]
    assert [line[:5] for line in lines[:5]] == [" 2.00", " 1.75", " 1.50", " 1.25", " 1.00"]
    assert rows[0].startswith("●")
    assert rows[4].endswith("●")
    assert all("".join(column).count("●") == 1 for column in zip(*rows, strict=True))
    assert [row.index("●") for row in rows] == sorted(row.index("●") for row in rows)


def test_moments_stand_at_their_x_and_their_labels_never_overlap() -> None:
    """A label that has no room beside another gets a line of its own; none leaves the plot."""
    moments = [Moment(50, "first"), Moment(55, "second"), Moment(99, "at the very end")]
    lines = plot(FALLING, moments=moments).text(47, 4)
    assert all(line[7 + 20] == "┊" or line[7 + 20] == "●" for line in lines[:4])
    labels = lines[5:-2]
    assert labels[0].index("↑first") == 7 + 20
    assert "second" in labels[1]
    assert max(len(line) for line in labels) <= 47
    powers = Plot("t", "x", "y", 1, 10_000, [FLAT], [Moment(100, "half-way")], log_x=True).text(47, 4)
    assert powers[5].index("↑half-way") == 7 + 20


def test_no_points_no_plot_and_one_value_no_division_by_zero() -> None:
    """A run that has nothing to show yet is no error."""
    assert plot(Curve("empty", "●", ())).text(40, 5) == []
    assert any("○" in line for line in plot(FLAT).text(40, 5)[:5])


def test_the_png_is_a_png_with_the_curves(tmp_path: Path) -> None:
    """It has the size that was asked for, and isn't the same without the curves."""
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("matplotlib.image")
    drawn, empty = tmp_path / "drawn.png", tmp_path / "empty.png"
    half = [Moment(50, "half")]
    plot(FALLING, FLAT, moments=half).png(drawn)
    plot(Curve("falling", "●", ()), Curve("flat", "○", ()), moments=half).png(empty)
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    with_curves, without = image.imread(drawn), image.imread(empty)
    assert with_curves.shape[:2] == (675, 1200)
    assert (with_curves[:, :, :3].min(axis=2) < 0.9).sum() > (without[:, :, :3].min(axis=2) < 0.9).sum() + 1000
