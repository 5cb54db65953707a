"""Delayed Nesterov: the numbers, windows, and what N submissions come to."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from p2p_diloco.tensors.delayed import DelayedNesterov
from p2p_diloco.tensors.flat import BLOCK
from p2p_diloco.tensors.outer import OuterOptimizer, State

PAPER = {2: [-0.5, -1.9, -2.4, -4.61, -5.11, -8.049], 3: [-1 / 3, -2 / 3, -1.9, -2.2333333, -2.5666667, -4.61]}
BUFFERED = {2: [-1.0, -2.9, -3.9, -6.61], 3: [-1.0, -2.0, -3.9, -4.9, -5.9, -8.61]}


def delayed(size: int, variant: str = "paper", lr: float = 1.0, momentum: float = 0.9) -> DelayedNesterov:
    return DelayedNesterov(OuterOptimizer("sgd", lr, momentum), size, variant)


def begun(dn: DelayedNesterov, numel: int = 1) -> State:
    """The state before the first submission."""
    return {name: torch.zeros(length) for name, length in dn.state_lengths(numel).items()}


def run(dn: DelayedNesterov, commits: list[tuple[Tensor, int]]) -> tuple[list[Tensor], State]:
    """θ after each commit of (mean, submissions), from zeros."""
    theta = torch.zeros_like(commits[0][0])
    state, buffered, after = begun(dn, theta.numel()), 0, []
    for grad, submissions in commits:
        theta, state = dn.step(theta, state, grad, submissions, buffered)
        buffered = (buffered + submissions) % dn.size
        after.append(theta)
    return after, state


def rounds(dn: DelayedNesterov, means: list[Tensor]) -> Tensor:
    """θ after as many synchronous rounds."""
    theta, state = torch.zeros_like(means[0]), dn.outer.init_state(means[0].numel())
    for mean in means:
        theta, state = dn.outer.step(theta, state, mean)
    return theta


@pytest.mark.parametrize(
    ("size", "variant", "expected"),
    [*((size, "paper", values) for size, values in PAPER.items())]
    + [(size, "buffered", values) for size, values in BUFFERED.items()],
)
def test_the_numbers(size: int, variant: str, expected: list[float]) -> None:
    """η = 1, μ = 0.9 and ḡ = 1 each time, from 0."""
    after, _ = run(delayed(size, variant), [(torch.ones(1), 1)] * len(expected))
    assert [theta.item() for theta in after] == pytest.approx(expected, rel=1e-6)


@given(st.sampled_from(["paper", "buffered"]), st.integers(2, 6), st.integers(1, 3), st.data())
def test_a_window_counts_as_many_as_are_in_it(variant: str, size: int, fills: int, data: st.DataObject) -> None:
    """However N submissions of the same ḡ are cut into windows: the full buffers come to the same, and are emptied."""
    dn, grad = delayed(size, variant, lr=0.7), torch.tensor([1.0, -3.0])
    commits: list[tuple[Tensor, int]] = []
    for _ in range(fills):
        room = size
        while room:
            submissions = data.draw(st.integers(1, room))
            commits.append((grad, submissions))
            room -= submissions
    after, state = run(dn, commits)
    one_by_one, plain = run(dn, [(grad, 1)] * (size * fills))
    torch.testing.assert_close(after[-1], one_by_one[-1])
    torch.testing.assert_close(state["m"], plain["m"])
    assert not state["b"].any()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_full_buffers_are_synchronous_rounds(order: tuple[int, ...]) -> None:
    """Three peers, four rounds, in any order within each: with N = 3 they end where four rounds do."""
    torch.manual_seed(1)
    sent = torch.randn(4, 3, 5)
    dn = delayed(3, lr=0.7)
    after, _ = run(dn, [(sent[r, peer], 1) for r in range(4) for peer in order])
    torch.testing.assert_close(after[-1], rounds(dn, [sent[r].mean(0) for r in range(4)]))


def test_the_order_of_operations_is_the_reference() -> None:
    """To the bit, and over block boundaries, what the lines of the module say, one rounding each."""
    torch.manual_seed(3)
    numel = BLOCK + 5
    theta, m, b, g = (torch.randn(numel) for _ in range(4))
    new_theta, state = delayed(3, lr=0.7).step(theta, {"m": m, "b": b}, g, 2, 1)
    full = b + g * 2
    mean = full / 3
    new_m = m * 0.9 + mean
    expected = (theta - g * (0.7 * 2 / 3)) - (new_m * 0.9) * 0.7
    assert torch.equal(new_theta, expected)
    assert torch.equal(state["m"], new_m)
    assert not state["b"].any()


@pytest.mark.parametrize(("submissions", "buffered"), [(0, 0), (2, 2), (1, 3), (4, 0), (1, -1)])
def test_more_than_fits_is_an_error(submissions: int, buffered: int) -> None:
    """The log closes a window with the submission that fills the buffer."""
    dn = delayed(3)
    with pytest.raises(ValueError, match="don't fit"):
        dn.step(torch.zeros(1), begun(dn), torch.zeros(1), submissions, buffered)


@pytest.mark.parametrize("variant", ["paper", "buffered"])
def test_other_rates_hold_from_the_next_submission_on(variant: str) -> None:
    """Also within a buffer, which keeps what is in it, as the momentum does; the last one of it is the outer step's."""
    dn, one = delayed(2, variant, lr=1.0, momentum=0.5), torch.ones(1)
    theta, state = dn.step(torch.zeros(1), begun(dn), one, 1, 0)
    before = theta.item()
    theta, state = dn.revised(0.25, 0.75).step(theta, state, one, 1, 1)
    at_once = 0.25 / 2 if variant == "paper" else 0.0
    update = 0.25 * (0.75 * 1.0 + (variant == "buffered"))  # m has become the buffer's mean, 1
    assert theta.item() == before - at_once - update
    assert state["m"].item() == 1.0
