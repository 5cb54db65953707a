"""Dynamic local updates: the formula's numbers, and a steady number under noise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.core.pace import READINGS, STAYS_WITHIN, Pace
from p2p_diloco.core.schedule import dylu_steps

speeds = st.floats(0.01, 1000.0)


@pytest.mark.parametrize(
    ("table", "base", "steps"),
    [((10.0, 5.0, 2.0), 500, (500, 250, 100)), ((100.0, 0.01), 10, (10, 1)), ((20.0, 5.0), 100, (100, 25))],
)
def test_steady_speeds_give_the_formulas_numbers(table: tuple[float, ...], base: int, steps: tuple[int, ...]) -> None:
    """From the first reading on."""
    for speed, expected in zip(table, steps, strict=True):
        pace = Pace(base)
        assert [pace.adjust(speed, table) for _ in range(10)] == [expected] * 10


def test_the_number_stays_while_the_formulas_differs_by_no_more_than_a_tenth() -> None:
    pace = Pace(100)
    assert [pace.adjust(speed, [100.0]) for speed in (100.0, 90.0, 90.0)] == [100, 100, 100]
    pace = Pace(100)
    assert [pace.adjust(speed, [100.0]) for speed in (100.0, 89.0)] == [100, 89]


def test_an_unknown_speed_gives_the_base() -> None:
    """Before the first reading, and whenever this peer's speed is unknown; earlier readings are dropped. Others of
    unknown speed are ignored."""
    pace = Pace(500)
    assert pace.steps == 500
    assert pace.adjust(1.0, [10.0]) == 50
    assert pace.adjust(0.0, [10.0]) == 500
    assert pace.adjust(5.0, [10.0]) == 250
    assert Pace(500).adjust(3.0, [0.0, -1.0]) == 500


@given(speeds, speeds, st.lists(st.tuples(speeds, speeds), min_size=4, max_size=4), st.integers(1, 1000))
def test_four_wrong_readings_of_nine_change_nothing(
    speed: float, fastest: float, wrong: list[tuple[float, float]], base: int
) -> None:
    """Outliers of any size and order: the number is that of the other readings."""
    pace = Pace(base)
    for _ in range(READINGS - 4):
        steps = pace.adjust(speed, [fastest])
    for own, other in wrong:
        assert pace.adjust(own, [other]) == steps
    for _ in range(READINGS):
        assert pace.adjust(speed, [fastest]) == steps


@given(st.lists(st.tuples(speeds, speeds), max_size=20), speeds, speeds, st.integers(1, 1000))
def test_a_speed_that_lasts_is_followed(
    before: list[tuple[float, float]], speed: float, fastest: float, base: int
) -> None:
    """After nine equal readings the number is within a tenth of the formula's, whatever was read before."""
    pace = Pace(base)
    for own, other in before:
        pace.adjust(own, [other])
    for _ in range(READINGS):
        pace.adjust(speed, [fastest])
    wanted = dylu_steps(speed, max(speed, fastest), base)
    assert abs(wanted - pace.steps) <= STAYS_WITHIN * pace.steps


@given(st.lists(st.tuples(speeds, speeds), min_size=1, max_size=20), st.integers(1, 1000))
def test_the_number_is_at_least_one_and_at_most_the_base(readings: list[tuple[float, float]], base: int) -> None:
    """Whatever the table says."""
    pace = Pace(base)
    for own, other in readings:
        assert 1 <= pace.adjust(own, [other]) <= base
