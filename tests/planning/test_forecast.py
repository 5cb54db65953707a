"""Forecasts: identities of time, bytes and memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.config import RunConfig
from p2p_diloco.planning.exchange import HEADERS, Machine
from p2p_diloco.planning.forecast import Forecast, memory

M = 10**6


def forecast(
    peers: int = 4, params: int = 10 * M, mbit: float = 50, steps_s: tuple[float, ...] = (1.0,), **run: Any
) -> Forecast:
    each = steps_s * peers if len(steps_s) == 1 else steps_s
    machines = [Machine(mbit * 1e6 / 8, 0.05, step_s) for step_s in each]
    return Forecast(params, machines, RunConfig(**{"sync_every": 100, **run}), 1000)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 8), st.integers(1000, 10**9), st.floats(1, 1000), st.integers(1, 1000))
def test_utilisation_rises_with_bandwidth_and_with_h(peers: int, params: int, mbit: float, steps: int) -> None:
    found = forecast(peers, params, mbit, sync_every=steps)
    assert 0 < found.utilisation < 1
    assert forecast(peers, params, 4 * mbit, sync_every=steps).utilisation >= found.utilisation
    assert found.changed(sync_every=2 * steps).utilisation > found.utilisation


def test_one_peer_alone_only_trains() -> None:
    found = forecast(peers=1)
    assert (found.utilisation, found.sent, found.stall_s) == (1, 0, 0)
    assert found.course == found.alone == found.data_parallel


def test_h_of_1_sends_what_data_parallel_training_sends() -> None:
    """For each token, and 1/H of it with a longer H."""
    found = forecast(sync_every=1)
    assert found.course.sent_per_unit == pytest.approx(found.data_parallel.sent_per_unit)
    assert forecast(sync_every=50).course.sent_per_unit * 50 == pytest.approx(found.course.sent_per_unit)


def test_overlap_hides_an_exchange_but_not_the_trainers_own_work() -> None:
    """Without overlap the whole exchange stalls; with a long one only pseudo-gradient and merge do."""
    assert forecast().stall_s == pytest.approx(forecast().exchange_s)
    hidden = forecast(overlap_steps=50)
    assert hidden.stall_s == pytest.approx(hidden.exchange.own_s)


def test_the_measured_run_with_overlap() -> None:
    """docs/performance.md: 40 steps of 0.2 s, four fragments, 100 Mbit/s, without overlap and with one of 8 steps."""
    machines = [Machine(1e8 / 8, 0.0, 0.2)] * 2
    run = RunConfig(sync_every=40, num_fragments=4)
    waits = Forecast(25 * M, machines, run)
    assert waits.round_s == pytest.approx(12.9, rel=0.1)
    assert waits.changed(overlap_steps=8).round_s == pytest.approx(8.14, rel=0.1)


def test_the_slowest_peer_sets_the_time_unless_paced_by_time() -> None:
    """Speeds of 1 : 0.5 : 0.2, H = 100: 100 steps of each in five times the time, or 100, 50 and 20."""
    speeds = (1.0, 2.0, 5.0)
    waiting, by_time = forecast(3, steps_s=speeds), forecast(3, steps_s=speeds, pace="time")
    assert (waiting.steps, waiting.training_s) == ((100, 100, 100), 500)
    assert (by_time.steps, by_time.training_s) == ((100, 50, 20), 100)


def test_data_parallel_hides_two_thirds_of_a_step() -> None:
    """On a fast link it loses nothing; on a slow one a step takes as long as its all-reduce and a third more."""
    assert forecast(mbit=1e6, params=1000, steps_s=(10.0,)).data_parallel.utilisation == 1
    slow = forecast(mbit=1)
    sent_s = 1.5 * 2 * 10 * M * HEADERS / (1e6 / 8) + 3 * 0.05
    assert slow.data_parallel.units_per_second == pytest.approx(4000 / (1 / 3 + sent_s))


@pytest.mark.parametrize(
    ("peers", "params", "measured"), [(2, 25 * M, 21.8), (4, 25 * M, 24.6), (8, 25 * M, 30.5), (2, 100 * M, 19.4)]
)
def test_memory_covers_what_was_measured_and_little_more(peers: int, params: int, measured: float) -> None:
    """docs/performance.md: bytes a parameter beyond the model, bf16; the node's fixed 0.2 GB aside."""
    node = (memory(RunConfig(), params, peers).node - 2e8) / params
    assert measured <= node <= measured + 1


def test_memory_grows_with_few_bits_and_overlap() -> None:
    """8 bytes a parameter for the kept error, 4 for the older θ, 2 for a pseudo-gradient in fp32."""
    plain = memory(RunConfig(), 100 * M, 2).node
    assert memory(RunConfig(codec="int4"), 100 * M, 2).node == plain + 10 * 100 * M
    assert memory(RunConfig(overlap_steps=1), 100 * M, 2).node == plain + 4 * 100 * M
    assert memory(RunConfig(), 100 * M, 2).trainer == 16 * 100 * M
