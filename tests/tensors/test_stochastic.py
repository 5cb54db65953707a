"""Stochastic rounding: one of the two neighbours, right on average, the same for the same seed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.tensors import codec
from p2p_diloco.tensors.codec import to_bf16
from p2p_diloco.tensors.mean import MAGNITUDE_MAX

DRAWS = 4000

numbers = st.floats(-MAGNITUDE_MAX, MAGNITUDE_MAX, width=32)


def neighbours(value: float) -> tuple[float, float]:
    """The bf16 values about an fp32 one."""
    bits = torch.tensor([value]).view(torch.int32)
    near = (bits & -65536).view(torch.float32).item()
    far = ((bits & -65536) + (65536 if near != value else 0)).view(torch.float32).item()
    return min(near, far), max(near, far)


@settings(deadline=None, max_examples=60)
@given(numbers, st.integers(0, 2**64 - 1))
def test_it_is_right_on_average(value: float, seed: int) -> None:
    """Every draw is one of the neighbours, and the mean of many lies within five standard deviations of the value;
    what needs no rounding stays.
    """
    below, above = neighbours(value)
    drawn = to_bf16(torch.full((DRAWS,), value), seed - 2**63).double()
    assert set(drawn.tolist()) <= {below, above}
    share = (value - below) / (above - below) if above > below else 0.0
    deviation = (above - below) * math.sqrt(share * (1 - share) / DRAWS)
    # at a share next to 0 or 1, a single draw is more than five deviations: it may happen
    assert abs(drawn.mean().item() - value) <= 5 * deviation + 3 * (above - below) / DRAWS


def test_draws_are_even_in_every_lane() -> None:
    """Of four neighbours that share a random word each is rounded up as often as it should."""
    drawn = to_bf16(torch.full((2**16,), 1.0 + 2.0**-9), 5).view(-1, 4)
    assert torch.all(((drawn > 1.0).float().mean(0) - 0.25).abs() < 0.02)
    assert not torch.equal(drawn[:, 0], drawn[:, 1])


def test_a_seed_decides() -> None:
    flat = torch.randn(100_001)
    once = bytes(codec.encode_stochastically(flat, 7))
    assert once == bytes(codec.encode_stochastically(flat, 7))
    assert once != bytes(codec.encode_stochastically(flat, 8))
    assert len(once) == codec.nbytes("bf16", 100_001)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """Also a NaN whose bits are next to a number's."""
    flat = torch.ones(1000)
    flat[7] = bad
    flat[8] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]
    assert not math.isfinite(codec.peak(codec.encode_stochastically(flat, 1), "bf16", 1000))
    assert to_bf16(flat, 1)[8].isnan()
