"""No mean counts for more than a multiple of the median length of the slice's last means, on all replicas alike."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_diloco.config import RunConfig
from p2p_diloco.tensors import codec, limits
from p2p_diloco.tensors.delayed import DelayedNesterov
from p2p_diloco.tensors.flat import BLOCK
from p2p_diloco.tensors.layout import Layout, ParamSpec
from p2p_diloco.tensors.limits import GROWTH, LENGTHS, LENGTHS_MAX, LENGTHS_MIN, Room, square
from p2p_diloco.tensors.outer import OuterOptimizer
from p2p_diloco.tensors.outer_state import OuterState

NUMEL = 40
TIMES = 2.0
PLAIN = OuterOptimizer(lr=1.0, momentum=0.0)
lengths_of_honest_means = st.lists(st.floats(1.0, 2.0), min_size=LENGTHS_MIN, max_size=15)


def layout(numel: int = NUMEL) -> Layout:
    return Layout.build((ParamSpec("p", (numel,), "float32"),), 1, slice_elements=numel)


def store(outer: OuterOptimizer | DelayedNesterov = PLAIN, limit: float = TIMES, numel: int = NUMEL) -> OuterState:
    return OuterState(layout(numel), outer, torch.zeros(numel), limit)


def of_length(length: float, seed: int = 0, numel: int = NUMEL) -> Tensor:
    """A mean of this length, in a direction of its own."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return (values / values.norm() * length).to(torch.float32)


def step(held: OuterState, mean: Tensor, name: str = "fp32", buffered: int = 0) -> float:
    """Take the outer step on a mean; returns the factor by which it was cut."""
    return held.step(0, held.slices[0], codec.encode(mean, name), name, 1, buffered)


def moved(held: OuterState, mean: Tensor) -> float:
    """How far θ moves with one step on a mean."""
    before = held.slices[0].theta.clone()
    step(held, mean)
    return (held.slices[0].theta - before).norm().item()


# -- how far one mean can move a slice


@settings(max_examples=25, deadline=None)
@given(lengths_of_honest_means, st.floats(1e-3, 1e15), st.sampled_from([1.0, 1.5, 4.0]))
def test_no_mean_moves_a_slice_further_than_the_limit(lengths, wrong, times):
    held = store(limit=times)
    for length in lengths:
        step(held, of_length(length))
    median = statistics.median(value for value in held.slices[0].state[LENGTHS].tolist() if value > 0)
    assert moved(held, -of_length(wrong, 1)) <= times * median * (1 + 1e-5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=LENGTHS_MAX + 20, max_size=LENGTHS_MAX + 20))
def test_while_fewer_than_half_of_the_last_means_are_wrong_the_limit_stays_that_of_the_honest_ones(wrong):
    """Of any nine, four at most: no step is longer than the limit times the longest honest mean."""
    held = store()
    for _ in range(LENGTHS_MAX):
        step(held, of_length(1.0))
    recent = [False] * LENGTHS_MAX
    for lies in wrong:
        lies = lies and sum(recent[1:]) < LENGTHS_MAX // 2
        recent = [*recent[1:], lies]
        assert moved(held, of_length(1e6 if lies else 1.0)) <= TIMES * (1 + 1e-5)


def test_a_mean_that_stays_long_is_taken_in_full_in_the_end():
    """Cutting does not stop a run whose means are long: each five rounds the limit is GROWTH times as high, however
    low it is."""
    for times in (1.0, TIMES):
        held = store(limit=times)
        for _ in range(LENGTHS_MAX):
            step(held, of_length(1.0))
        factors = [step(held, of_length(50.0)) for _ in range(25)]
        assert factors[:6] == pytest.approx([times / 50] * 5 + [times * GROWTH / 50])
        assert factors[-1] == 1


# -- what counts as a length


def test_a_mean_whose_squares_exceed_fp32_counts_for_nothing():
    """Finite values all the same; it is remembered like any other that is too long, before the limit applies not at
    all."""
    held, long = store(), torch.full((NUMEL,), 1e30)
    step(held, long)
    assert not held.slices[0].state[LENGTHS].any()
    held.slices[0].theta.zero_()
    for _ in range(LENGTHS_MIN):
        step(held, of_length(1.0))
    assert moved(held, long) == 0
    assert held.slices[0].state[LENGTHS][-4:].tolist() == pytest.approx([1, 1, 1, GROWTH])


# -- the same bits on all replicas


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8", "int4", "e3m0"])
@pytest.mark.parametrize("numel", [NUMEL, BLOCK + 5000])
def test_the_cut_is_the_documented_formula_to_the_bit(name, numel):
    """f = times · median / ‖ḡ‖ in fp64, rounded to fp32; each element times f, rounded to fp32; after decoding."""
    held = store(numel=numel)
    for length in (1.0, 1.5, 2.0, 2.5):
        step(held, of_length(length, numel=numel))
    known = [value for value in held.slices[0].state[LENGTHS].tolist() if value > 0]
    raw, before = codec.encode(of_length(70.0, 3, numel), name), held.slices[0].theta.clone()
    decoded = codec.decode(raw, name, numel)
    norm = math.sqrt(square(iter(decoded.split(BLOCK)), Room()))
    factor = np.float32(TIMES * statistics.median(known) / norm)
    assert held.step(0, held.slices[0], raw, name) == factor
    assert torch.equal(held.slices[0].theta, before - torch.from_numpy(decoded.numpy() * factor))
    assert held.slices[0].state[LENGTHS][-1].item() == np.float32(GROWTH * statistics.median(known))


def test_a_mean_that_is_cut_by_half_or_more_is_a_warning(caplog):
    """A smaller cut is no warning, because honest runs have some."""
    held = store()
    for _ in range(4):
        step(held, of_length(1.0))
    step(held, of_length(3.0))
    assert not caplog.text
    step(held, of_length(50.0))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "slice 0: a mean was cut to 0.04 of its length (step_limit)"
    ]


def test_the_numbers_of_the_documents():
    """The table in docs/math.md: single elements, and what becomes of each."""
    held, taken = store(limit=RunConfig().step_limit, numel=1), []
    for value in (1.0, 2.0, 4.0, 9.0, 0.0, -60.0):
        before = held.slices[0].theta.item()
        step(held, torch.tensor([value]))
        taken.append(before - held.slices[0].theta.item())
    assert taken == pytest.approx([1, 2, 4, 2.5, 0, -3.75])
    assert held.slices[0].state[LENGTHS].tolist() == pytest.approx([0, 0, 0, 0, 1, 2, 4, 6, 9])


def test_a_checkpoints_lengths_are_kept_forgotten_or_left_out_as_its_run_asks():
    """Kept in the same run; none are known in another one, nor from a version without them; none without a limit."""
    new, old = {"m": torch.ones(2), LENGTHS: torch.ones(LENGTHS_MAX)}, {"m": torch.ones(2)}
    assert limits.restored(new, TIMES, forget=False) is new
    assert limits.restored(old, 0.0, forget=False) is old
    assert set(limits.restored(new, 0.0, forget=False)) == {"m"}
    for state, forget in ((new, True), (old, False)):
        assert not limits.restored(state, TIMES, forget=forget)[LENGTHS].any()
