"""The outer step of buffers: means and maxima, never outside of what the peers sent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.tensors.layout import GREATEST, MEAN
from p2p_diloco.tensors.mean import Given
from p2p_diloco.tensors.running import stepped, together

values32 = st.floats(-(2.0**30), 2.0**30, width=32)


def given_(peer: str, weight: float, *values: float) -> Given:
    return peer, weight, torch.tensor(values, dtype=torch.float32).numpy().tobytes()


def test_a_mean_is_weighed_and_not_clipped() -> None:
    """The third is a thousand times as long as the others. Its weight is bounded as in the mean of parameters."""
    sent = [given_("a", 1.0, 1.0), given_("b", 3.0, 2.0)]
    assert together(MEAN, sent, 1, "clip").tolist() == [1.75]
    third = given_("c", 1.0, 1000.0)
    assert together(MEAN, [*sent, third], 1, "mean").tolist() == pytest.approx([(1 + 6 + 1000) / 5])
    assert together(MEAN, [*sent, third], 1, "clip").tolist() == pytest.approx([(1 + 3 + 1000) / 3.5])


def test_counters_take_the_greatest() -> None:
    sent = [given_("a", 1.0, 7.0, -4.0), given_("b", 9.0, 5.0, -3.0)]
    assert together(GREATEST, sent, 2, "clip").tolist() == [7.0, -3.0]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(values32, st.floats(1e-3, 1e6)), min_size=1, max_size=7), st.randoms())
def test_a_mean_is_no_smaller_or_greater_than_all_and_knows_no_order(sent: list[tuple[float, float]], drawn) -> None:
    """A variance never becomes negative, and what is equal on all peers stays as it is, to the bit."""
    parts = [given_(f"p{n}", weight, value) for n, (value, weight) in enumerate(sent)]
    mean = together(MEAN, parts, 1, "mean").item()
    assert min(value for value, _ in sent) <= mean <= max(value for value, _ in sent)
    drawn.shuffle(parts)
    assert together(MEAN, parts, 1, "mean").item() == mean


@settings(max_examples=80, deadline=None)
@given(values32, values32, st.floats(0.0, 1.0, exclude_min=True))
def test_a_step_ends_between_the_old_and_the_new_value(theta: float, value: float, share: float) -> None:
    old, new = torch.tensor([theta]), torch.tensor([value])
    assert min(theta, value) <= stepped(MEAN, old, new, share).item() <= max(theta, value)
    assert stepped(MEAN, old, new, 1.0).item() == value
    assert old.item() == theta
    assert new.item() == value


def test_a_step_moves_a_mean_by_its_share_and_a_counter_never_back() -> None:
    old, new = torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])
    assert stepped(MEAN, old, new, 0.25).tolist() == [1.5, 4.0]
    assert stepped(GREATEST, old, new, 0.25).tolist() == [3.0, 5.0]
    assert stepped(GREATEST, old, new, 1.0).tolist() == [3.0, 1.0]
