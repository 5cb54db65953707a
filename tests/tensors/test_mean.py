"""The mean is a function of the peers' contributions, bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

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


def test_contributions_are_left_as_they_were():
    raw = bytearray(codec.encode(torch.ones(3), "fp32"))
    weighted_mean([("a", 2.0, raw), ("b", 5.0, raw)], "fp32", 3)
    assert raw == bytes(codec.encode(torch.ones(3), "fp32"))


ONE = ("a", 1.0, bytes(4))


@pytest.mark.parametrize(
    ("given_", "sentence"),
    [
        *(([("a", weight, bytes(4))], "weight") for weight in (0.0, -1.0, math.nan, math.inf, 1e39, 1e-60)),
        ([ONE, ("b", 3e38, bytes(4)), ("c", 3e38, bytes(4))], "sum of the weights"),
        ([], "no two from one peer"),
        ([ONE, ONE], "no two from one peer"),
        ([ONE, ("b", 1.0, bytes(6))], "1 elements in fp32 are 4 bytes, found 6"),
    ],
)
def test_contributions_that_have_no_mean_are_refused(given_, sentence):
    with pytest.raises(ValueError, match=sentence):
        weighted_mean(given_, "fp32", 1)
