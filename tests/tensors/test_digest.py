"""Equal digests mean equal bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.tensors.digest import digest
from p2p_diloco.tensors.flat import Finite


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    raw = tensor.clone().view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8
    return raw.view(torch.float32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.data())
def test_one_flipped_bit_anywhere_changes_it(numel, data):
    """In θ, in m."""
    theta, m = torch.randn(numel), torch.randn(numel)
    whole = digest(theta, {"m": m})
    bit = data.draw(st.integers(0, 32 * numel - 1))
    assert digest(flipped(theta, bit), {"m": m}) != whole
    assert digest(theta, {"m": flipped(m, bit)}) != whole
    assert digest(theta.clone(), {"m": m.clone()}) == whole


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 32, 33, 999])
def test_one_value_that_is_not_finite_is_seen(bad, place):
    """In whichever block it is."""
    values = torch.randn(1000)
    for expected in (True, False):
        seen = Finite()
        for block in values.split(33):
            seen(block.numpy())
        assert seen.finite is expected
        values[place] = bad


def test_finite_values_whose_sum_is_not_are_finite():
    seen = Finite()
    for values in (torch.full((100,), torch.finfo(torch.float32).max), torch.empty(0)):
        seen(values.numpy())
    assert seen.finite


def test_what_lies_where_counts():
    """The same bytes under other names, or divided otherwise, are another state."""
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert digest(a, {"x": a, "y": b}) != digest(a, {"x": b, "y": a})
    assert digest(a, {"x": b}) != digest(a, {"z": b})
    assert digest(torch.cat([a, b]), {}) != digest(a, {"x": b})
    assert digest(a, {}) != digest(a, {"x": torch.empty(0)})
    assert digest(torch.tensor([0.0]), {}) != digest(torch.tensor([-0.0]), {})


def test_it_is_the_same_everywhere():
    """A fixed value: digests are compared between machines and stored in checkpoints."""
    assert digest(torch.tensor([1.0, 2.0]), {"m": torch.tensor([0.5])}) == "1ec77077a2e04306612ae3497663e0f5"
