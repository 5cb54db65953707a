"""Unlike speeds in synchronous mode: all contributions of a round arrive together."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.core.messages import Summary
from p2p_diloco.core.pace import LATE_MAX, STEPS_MAX, StepTimes, is_over, speeds, trains_for
from p2p_diloco.core.version import ModelVersion


def summary(speed: float, **values: Any) -> Summary:
    return Summary(**{"incarnation": 1, "role": "worker", "eligible": True, "model": ModelVersion(),
                      "idle": False, "speed": speed, **values})  # fmt: skip


def steps_made(step_s: float, planned_s: float, most: int) -> int:
    """How many steps a peer of constant speed makes."""
    made = 1
    while made < most and not is_over(made * step_s, step_s, planned_s):
        made += 1
    return made


@pytest.mark.parametrize(
    ("table", "steps", "made"),
    [
        ((1.0, 0.5, 0.2), 20, (20, 10, 4)),
        ((1.0, 0.5, 0.2), 100, (100, 50, 20)),
        ((7.0, 7.0, 7.0), 500, (500, 500, 500)),
        ((1.0, 0.01), 20, (20, 1)),  # at least one, though it takes as long as five rounds
        ((1.0, 0.27), 20, (20, 5)),  # 5.4: a sixth step would be late by more than half a step
        ((1.0, 0.28), 20, (20, 6)),  # 5.6: six steps are nearer to the plan than five
        ((1.0, 0.135), 20, (20, 2)),  # 2.7: a third one would be late by a ninth of the round
        ((1.0, 0.14), 20, (20, 3)),  # 2.8: by a fourteenth
    ],
)
def test_steps_in_proportion_to_speed(table: tuple[float, ...], steps: int, made: tuple[int, ...]) -> None:
    """The fastest makes H steps; each other peer as many as take about as long, at least one."""
    run = {str(index): summary(speed) for index, speed in enumerate(table)}
    planned_s = [trains_for(steps, 0, peer, run) for peer in run]
    assert planned_s == [steps / max(table)] * len(table)
    assert tuple(steps_made(1 / v, p, steps) for v, p in zip(table, planned_s, strict=True)) == made


def test_a_links_time_is_counted_in() -> None:
    """Steps and transfers together take all peers equally long: 20 s and 2 s for the fastest, 12 s and 10 s for one
    with a five times slower link. The fastest is the peer whose H steps arrive first."""
    run = {"a": summary(1.0, bandwidth=500.0), "b": summary(0.5, bandwidth=100.0)}
    assert trains_for(20, 1000, "a", run) == pytest.approx(20.0)
    assert trains_for(20, 1000, "b", run) == pytest.approx(12.0)
    run["b"] = summary(1.25, bandwidth=100.0)  # 16 s of training, 10 s of transfer
    assert trains_for(20, 1000, "a", run) == pytest.approx(20.0)
    assert trains_for(20, 1000, "b", run) == pytest.approx(12.0)  # 15 steps


def test_a_link_that_takes_longer_than_the_round_leaves_one_step() -> None:
    """The plan is negative then, and the first step is the last."""
    run = {"a": summary(1.0, bandwidth=1e9), "b": summary(1.0, bandwidth=10.0)}
    planned_s = trains_for(20, 1000, "b", run)
    assert planned_s < 0
    assert is_over(1.0, 1.0, planned_s)


def test_an_invented_speed_leaves_the_others_some_of_their_steps() -> None:
    """Of three workers or more none counts for more than sixteen times the median one. Of two neither is known to
    lie."""
    run = {"a": summary(1.0), "b": summary(0.5), "c": summary(2.0**40)}
    assert speeds(run) == {"a": 1.0, "b": 0.5, "c": 16.0}
    assert trains_for(20, 0, "a", run) == 1.25
    del run["b"]
    assert speeds(run) == {"a": 1.0, "c": 2.0**40}


@pytest.mark.parametrize("other", [{"idle": True}, {"role": "aggregator"}, {"speed": 0.0}], ids=str)
def test_a_peer_that_does_not_train_sets_no_pace(other: dict[str, Any]) -> None:
    """Speeds of idle peers, of aggregators, and unknown ones do not count."""
    run = {"a": summary(1.0), "b": summary(**{"speed": 9.0, **other})}
    assert speeds(run) == {"a": 1.0}
    assert trains_for(20, 0, "a", run) == 20.0


def test_while_no_speed_is_known_nothing_is_planned() -> None:
    """The time is never over then: H steps are made."""
    planned_s = trains_for(20, 0, "a", {"a": summary(0.0)})
    assert planned_s == math.inf
    assert not is_over(1e9, 1.0, planned_s)


def test_a_peer_that_is_slowed_down_makes_fewer_steps_in_that_round() -> None:
    """A plan of 19 s and steps of 1 s; after ten of them each takes 4 s. The peer stops after two of these, or after
    three while it still expects quick steps."""
    assert not is_over(10 + 4.0, 4.0, 19.0)
    assert is_over(10 + 2 * 4.0, 4.0, 19.0)
    assert not is_over(10 + 2 * 4.0, 1.0, 19.0)
    assert is_over(10 + 3 * 4.0, 1.0, 19.0)


@given(st.floats(0.01, 100.0), st.floats(0.1, 1000.0))
def test_no_peer_plans_to_end_late_by_much(step_s: float, planned_s: float) -> None:
    """A peer of constant speed ends at most LATE_MAX of the plan late, unless its first step does; and at most a step
    early."""
    ends_s = step_s * steps_made(step_s, planned_s, 10**6)
    assert ends_s <= max(step_s, (1 + LATE_MAX) * planned_s) * (1 + 1e-9)
    assert ends_s >= planned_s - step_s


def test_a_lone_slow_or_quick_step_changes_nothing() -> None:
    """The usual time of a step stays the same, wherever it falls, also if rounds have one step."""
    for round_steps in (1, 4, 100):
        times = StepTimes()
        for number in range(40):
            times.add({17: 300.0, 25: 0.0}.get(number, 2.0), round_steps)
            assert times.usual == 2.0


@pytest.mark.parametrize(("round_steps", "within"), [(1, 2), (4, 3), (20, 11), (1000, STEPS_MAX // 2 + 1)])
def test_a_change_that_lasts_is_followed_within_a_round(round_steps: int, within: int) -> None:
    """If a round has fewer than three steps, after two steps."""
    times = StepTimes()
    for _ in range(2 * STEPS_MAX):
        times.add(1.0, round_steps)
    for _ in range(within):
        assert times.usual < 4.0
        times.add(4.0, round_steps)
    assert times.usual == 4.0
