"""Which fragment is due when, by the numbers of the papers."""

from __future__ import annotations

import pytest

from p2p_diloco.core.schedule import fragment_by_log, fragment_due, fragment_interval


@pytest.mark.parametrize(
    ("epochs", "due"),
    [([0, 0, 0], 0), ([1, 0, 0], 1), ([1, 1, 0], 2), ([1, 1, 1], 0), ([3, 5, 2], 2), ([None, 7, 9], 1)],
)
def test_the_log_names_the_lowest_epoch_then_the_lowest_index(epochs: list[int | None], due: int) -> None:
    """A finished fragment is skipped."""
    assert fragment_by_log(epochs) == due


@pytest.mark.parametrize(("sync_every", "fragments"), [(600, 3), (500, 1), (500, 7), (3, 3), (10, 4), (99, 98)])
def test_each_fragment_is_due_once_in_h_steps(sync_every: int, fragments: int) -> None:
    """Fragment i is due floor((i + 1) · H / N) steps after each multiple of H: each once in H steps, in turn, none
    before the first step, and the intervals differ by one at most."""
    expected = [(number + 1) * sync_every // fragments for number in range(fragments)]
    found = {step: fragment_due(step, sync_every, fragments) for step in range(-sync_every, 2 * sync_every + 1)}
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
