"""The papers' model gives the papers' figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning import paper
from tests.planning.paper import GRID_GBIT, Setting, cells


def test_each_published_cell_is_at_most_one_grid_step_from_ours() -> None:
    """75 cells of table 4 of Streaming DiLoCo, 25 of table 7 of Scaling Laws for DiLoCo."""
    found = list(cells())
    assert len(found) == 100
    assert [cell for cell in found if not cell.fits] == []


def test_without_the_payload_factor_cells_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the test above: it sees a model that is off by a quarter."""
    monkeypatch.setattr(paper, "PAYLOAD_FACTOR", 1.0)
    assert sum(not cell.fits for cell in cells()) > 10


def test_the_grid_is_that_of_the_papers() -> None:
    """50 values from 0.1 to 1000 in equal ratios of 1.21. A published value is one of them, to a decimal."""
    assert (len(GRID_GBIT), GRID_GBIT[0], GRID_GBIT[-1]) == (50, pytest.approx(0.1), pytest.approx(1000))
    for published in {value for rows in paper.TABLE_4.values() for row in rows for value in row}:
        assert any(abs(value - published) < 0.06 for value in GRID_GBIT)


def test_many_buckets_stall_by_a_third_of_a_step_and_the_transfer() -> None:
    """In the limit the stall is T/3 + C − (τ + 1) T, C being the bits over the bandwidth."""
    setting = Setting(1e9, 1.0, 10, 10_000, overlap=1)
    sent_s = paper.PAYLOAD_FACTOR * 16 * 1e9 / 5e9
    assert setting.utilisation(5) == pytest.approx(10 / (10 + 1 / 3 + sent_s - 2), rel=1e-3)


def test_a_utilisation_that_no_bandwidth_reaches_needs_an_infinite_one() -> None:
    setting = Setting(1e15, 1e-3, 1, 1)
    assert setting.needed_gbit(0.99) == float("inf")
    assert replace(setting, params=1.0).utilisation(0.1) == pytest.approx(1, abs=1e-3)
