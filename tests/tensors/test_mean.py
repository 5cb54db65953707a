"""The mean is a function of the peers' contributions, bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.tensors import codec
from p2p_diloco.tensors.flat import BLOCK
from p2p_diloco.tensors.mean import weighted_mean

pytestmark = pytest.mark.usefixtures("two_threads")


def contributions(seed: int, count: int, numel: int, name: str) -> list[tuple[str, float, bytes]]:
    source = torch.Generator().manual_seed(seed)
    return [
        (
            f"peer{index * 7 % count}",
            float(torch.rand((), generator=source)) * 900 + 0.1,
            bytes(codec.encode(torch.randn(numel, generator=source), name)),
        )
        for index in range(count)
    ]


def by_hand(given_: list[tuple[str, float, bytes]], name: str, numel: int) -> np.ndarray:
    """The documented order, in numpy, which fuses nothing: one product, one sum, one division."""
    ordered = sorted(given_)
    acc, total = np.zeros(numel, np.float32), np.float32(0)
    for _, weight, raw in ordered:
        ratio = np.float32(weight) / np.float32(ordered[0][1])
        acc = acc + codec.decode(raw, name, numel).numpy() * ratio
        total = np.float32(total + ratio)
    return acc / total


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("numel", [1, 1000, BLOCK - 1, 2 * BLOCK + 5])
def test_the_documented_order_of_operations_to_the_bit(name, numel):
    """Blocks and vector lanes change nothing."""
    given_ = contributions(3, 5, numel, name)
    by_hand_ = by_hand(given_, name, numel)
    assert np.array_equal(weighted_mean(given_, name, numel).numpy(), by_hand_)
    assert torch.equal(weighted_mean(given_, name, numel, torch.bfloat16), torch.from_numpy(by_hand_).bfloat16())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.randoms())
def test_arrival_order_changes_no_bit(seed, count, random):
    given_ = contributions(seed, count, 20, "bf16")
    shuffled = list(given_)
    random.shuffle(shuffled)
    assert torch.equal(weighted_mean(given_, "bf16", 20), weighted_mean(shuffled, "bf16", 20))


def test_contributions_are_left_as_they_were():
    raw = bytearray(codec.encode(torch.ones(3), "fp32"))
    weighted_mean([("a", 2.0, raw), ("b", 5.0, raw)], "fp32", 3)
    assert raw == bytes(codec.encode(torch.ones(3), "fp32"))


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, 1e39, 1e-60])
def test_a_weight_that_weighs_nothing_is_refused(weight):
    with pytest.raises(ValueError, match="weight"):
        weighted_mean([("a", weight, bytes(4))], "fp32", 1)


def test_weights_that_overflow_together_are_refused():
    with pytest.raises(ValueError, match="sum of the weights"):
        weighted_mean([("a", 1.0, bytes(4)), ("b", 3e38, bytes(4)), ("c", 3e38, bytes(4))], "fp32", 1)


@pytest.mark.parametrize("weight", [0.1, 7.0, 2.0**40])
def test_equal_weights_are_as_good_as_none(weight):
    """Whatever it is that all weigh, the mean has the same bits."""
    given_ = [(peer, 1.0, raw) for peer, _, raw in contributions(5, 3, 1000, "fp32")]
    alike = [(peer, weight, raw) for peer, _, raw in given_]
    assert torch.equal(weighted_mean(alike, "fp32", 1000), weighted_mean(given_, "fp32", 1000))


@pytest.mark.parametrize("given_", [[], [("a", 1.0, bytes(4)), ("a", 1.0, bytes(4))]])
def test_no_contribution_and_a_peer_twice_are_refused(given_):
    with pytest.raises(ValueError, match="no two from one peer"):
        weighted_mean(given_, "fp32", 1)


def test_a_contribution_of_another_length_is_refused():
    with pytest.raises(ValueError, match="2 elements in bf16 are 4 bytes, found 6"):
        weighted_mean([("a", 1.0, bytes(4)), ("b", 1.0, bytes(6))], "bf16", 2)
