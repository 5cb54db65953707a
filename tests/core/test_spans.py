"""Spans are sets: each function agrees with Python's own sets, and returns the one form that a set has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.core.spans import Spans, joined, length, minus, sound, taken, union, within

SETS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8).map(joined)


def members(spans: Spans) -> set[int]:
    return {x for start, stop in spans for x in range(start, stop)}


@given(SETS, SETS)
def test_spans_agree_with_sets(a: Spans, b: Spans) -> None:
    """Union, difference, subset and length are those of the sets."""
    x, y = members(a), members(b)
    assert members(union(a, b)) == x | y
    assert members(minus(a, b)) == x - y
    assert within(a, b) == (x <= y)
    assert length(a) == len(x)
    assert length(union(a, b)) == length(a) + length(minus(b, a))


@given(SETS, SETS, st.integers(-2, 70))
def test_results_have_the_one_form(a: Spans, b: Spans, count: int) -> None:
    """Each result is sorted, disjoint and not adjacent, so equal sets are equal spans."""
    first, rest = taken(a, count)
    for spans in (a, union(a, b), minus(a, b), first, rest):
        assert sound(spans)


@given(SETS, st.integers(-2, 70))
def test_what_is_taken_is_the_lowest_and_nothing_is_lost(a: Spans, count: int) -> None:
    """`taken` cuts a set in two: the lowest positions, and the others."""
    first, rest = taken(a, count)
    assert length(first) == min(max(0, count), length(a))
    assert union(first, rest) == a
    assert not first or not rest or first[-1][1] <= rest[0][0] or first[-1][1] == rest[0][0]
