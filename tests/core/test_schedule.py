"""Which fragment is due when, by the numbers of the papers."""

from __future__ import annotations

import pytest

from p2p_diloco.core.schedule import dylu_steps, fragment_by_log, fragment_due, fragment_interval


@pytest.mark.parametrize(
    ("step", "fragment"),
    [(200, 0), (400, 1), (600, 2), (800, 0), (1000, 1), (0, None), (100, None), (201, None), (399, None), (-200, None)],
)
def test_three_fragments_in_600_steps(step: int, fragment: int | None) -> None:
    """H = 600 and 3 fragments: one is due every 200 steps, in turn; before the first step none is."""
    assert fragment_due(step, 600, 3) == fragment


def test_one_fragment_is_plain_diloco() -> None:
    """Without fragments the whole model is due every H steps."""
    assert [step for step in range(1, 2001) if fragment_due(step, 500, 1) == 0] == [500, 1000, 1500, 2000]


def test_each_fragment_goes_once_in_h_steps() -> None:
    assert (fragment_interval(600, 3), fragment_interval(500, 1), fragment_interval(4, 4)) == (200, 500, 1)


@pytest.mark.parametrize(
    ("epochs", "due"),
    [([0, 0, 0], 0), ([1, 0, 0], 1), ([1, 1, 0], 2), ([1, 1, 1], 0), ([3, 5, 2], 2), ([None, 7, 9], 1)],
)
def test_the_log_names_the_lowest_epoch_then_the_lowest_index(epochs: list[int | None], due: int) -> None:
    """A finished fragment is skipped."""
    assert fragment_by_log(epochs) == due


def test_nothing_is_due_when_all_is_finished() -> None:
    assert fragment_by_log([None, None]) is None
    assert fragment_by_log([]) is None


@pytest.mark.parametrize(("sync_every", "fragments"), [(500, 3), (500, 7), (3, 3), (10, 4), (1, 1), (99, 98)])
def test_steps_that_fragments_cant_share_evenly(sync_every: int, fragments: int) -> None:
    """Fragment i is due floor((i + 1) · H / N) steps after each multiple of H: each once in H steps, in turn, and the
    intervals differ by one at most."""
    expected = [(number + 1) * sync_every // fragments for number in range(fragments)]
    found = {step: fragment_due(step, sync_every, fragments) for step in range(2 * sync_every + 1)}
    due = [(step, fragment) for step, fragment in found.items() if fragment is not None]
    assert due == [(turn * sync_every + step, n) for turn in (0, 1) for n, step in enumerate(expected)]
    intervals = [fragment_interval(sync_every, fragments, number) for number in range(fragments)]
    assert sum(intervals) == sync_every
    assert max(intervals) - intervals[0] <= 1
    assert min(intervals) == intervals[0] > 0


def test_the_log_agrees_with_the_step_count() -> None:
    """A peer without faults follows the schedule by steps exactly."""
    epochs = [0, 0, 0]
    for step in range(1, 4000):
        due = fragment_due(step, 600, 3)
        if due is not None:
            assert fragment_by_log(list(epochs)) == due
            epochs[due] += 1


@pytest.mark.parametrize(
    ("speeds", "base", "steps"),
    [
        ((10, 5, 2), 500, (500, 250, 100)),
        ((100, 0.01), 10, (10, 1)),
        ((20, 5), 100, (100, 25)),
        ((3, 1), 10, (10, 3)),
        ((1.0, 0.5), 10, (10, 5)),
    ],
)
def test_dynamic_local_updates(speeds: tuple[float, ...], base: int, steps: tuple[int, ...]) -> None:
    """H_w = max(1, floor(v_w / v_max · H_base))."""
    assert tuple(dylu_steps(v, max(speeds), base) for v in speeds) == steps


@pytest.mark.parametrize(("speed", "fastest"), [(0, 10), (-1, 10), (0, 0), (5, 0), (5, -1)])
def test_an_unknown_speed_gives_the_base(speed: float, fastest: float) -> None:
    """A peer without a measured speed makes as many steps as the fastest."""
    assert dylu_steps(speed, fastest, 500) == 500


def test_due_at_every_step() -> None:
    """With as many fragments as steps one is due at each, from the first on."""
    assert [fragment_due(step, 2, 2) for step in range(5)] == [None, 0, 1, 0, 1]
