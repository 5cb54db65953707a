"""Columns fit a width: first they are narrowed, then whole ones drop out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.observe.fitting import GAP, Widths, cut, fit, total

COLUMNS = {"peer": Widths(8, 20), "host": Widths(8, 12), "epoch": Widths(5, 5)}


@pytest.mark.parametrize(
    ("width", "given"),
    [(99, {"peer": 20, "host": 12, "epoch": 5}), (38, {"peer": 20, "host": 9, "epoch": 5}),
     (25, {"peer": 8, "host": 8, "epoch": 5}), (24, {"peer": 17, "epoch": 5}), (3, {"peer": 8, "epoch": 5})],
)  # fmt: skip
def test_columns_are_narrowed_before_one_drops_out(width: int, given: dict[str, int]) -> None:
    """What can't drop out stays, even if the screen is too narrow for it."""
    assert fit(COLUMNS, ("host",), width) == given


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.tuples(st.integers(1, 20), st.integers(0, 20))),
    st.integers(0, 99),
)
def test_what_is_shown_fits(columns: dict[str, tuple[int, int]], width: int) -> None:
    """If all columns may drop out, the width is never exceeded; no column is wider than its longest text."""
    widths = {title: Widths(least, least + more) for title, (least, more) in columns.items()}
    shown = fit(widths, widths, width)
    assert total(shown.values()) <= width
    assert all(widths[title].least <= room <= widths[title].whole for title, room in shown.items())
    assert list(shown) == [title for title in widths if title in shown]


def test_gaps_are_between_columns() -> None:
    assert total([]) == 0
    assert total([3, 4]) == 7 + GAP


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [("alice", 8, "alice"), ("workstation-basement-1", 8, "work…t-1"), ("workstation-basement-1", 9, "work…nt-1")],
)
def test_names_are_cut_in_the_middle(text: str, width: int, shown: str) -> None:
    """Names of machines often differ at their end."""
    assert cut(text, width) == shown
