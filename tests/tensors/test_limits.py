"""What one contribution can do to a mean is limited, and honest contributions of equal length are not changed. The mean
is a function of the peers' contributions, bit by bit."""

from __future__ import annotations

import math
import statistics
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_diloco.tensors import codec, limits
from p2p_diloco.tensors.flat import BLOCK
from p2p_diloco.tensors.limits import CENTERED_ROUNDS, LANES, NORM_TIMES, WEIGHT_TIMES, Aggregation
from p2p_diloco.tensors.mean import MAGNITUDE_MAX, WEIGHT_MAX, WEIGHT_MIN, weighted_mean

pytestmark = pytest.mark.usefixtures("two_threads")

NUMEL = 60
LIMITED: tuple[Aggregation, ...] = ("clip", "centered_clip")
LIARS = st.sampled_from(["longer", "opposite", "zeros", "noise", "largest", "tiny"])
seeds = st.integers(0, 10_000)


def vectors(seed: int, count: int, numel: int = NUMEL) -> list[Tensor]:
    """Pseudo-gradients of peers that agree in part: lengths about 1."""
    source = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=source)
    own = [common + torch.randn(numel, generator=source) for _ in range(count)]
    return [value / value.norm() * (0.5 + torch.rand((), generator=source)) for value in own]


def liar(kind: str, honest: list[Tensor], seed: int) -> Tensor:
    noise = torch.randn(len(honest[0]), generator=torch.Generator().manual_seed(seed + 1))
    return {
        "longer": honest[0] * 1000,
        "opposite": -10 * sum(honest, torch.zeros(len(honest[0]))),
        "zeros": torch.zeros(len(honest[0])),
        "noise": noise * 100,
        "largest": noise.sign() * MAGNITUDE_MAX,
        "tiny": noise * 1e-30,
    }[kind]


def mean_of(values: list[Tensor], aggregation: Aggregation, weights: list[float] | None = None) -> Tensor:
    given_ = [
        (f"peer{index}", weight, bytes(codec.encode(value, "fp32")))
        for index, (value, weight) in enumerate(zip(values, weights or [1.0] * len(values), strict=True))
    ]
    return weighted_mean(given_, "fp32", len(values[0]), aggregation=aggregation)


# -- what honest peers get


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_contributions_are_averaged_without_limits(aggregation, count):
    values, weights = [vectors(1, 1)[0], vectors(2, 1)[0] * 1000][:count], [1.0, 1e6][:count]
    assert torch.equal(mean_of(values, aggregation, weights), mean_of(values, "mean", weights))


@pytest.mark.parametrize("aggregation", LIMITED)
def test_peers_that_trained_nothing_have_no_say(aggregation):
    """Two of four have trained nothing: neither their weights nor their lengths limit the others."""
    trained, idle = vectors(3, 2), [torch.zeros(NUMEL)] * 2
    weights = [100.0, 50.0, WEIGHT_MIN, WEIGHT_MIN]
    assert torch.equal(mean_of([*trained, *idle], aggregation, weights), mean_of(trained, "mean", weights[:2]))


@pytest.mark.parametrize("aggregation", LIMITED)
def test_a_contribution_without_weight_does_nothing(aggregation):
    """Whatever it holds: the largest value times the least weight would still move an element by 2⁻¹⁰."""
    honest, largest = vectors(4, 3), torch.full((NUMEL,), MAGNITUDE_MAX)
    alone = mean_of(honest, aggregation)
    assert torch.equal(mean_of([*honest, largest], aggregation, [1.0, 1.0, 1.0, WEIGHT_MIN]), alone)


@pytest.mark.parametrize("aggregation", LIMITED)
def test_peers_that_all_trained_nothing_are_averaged(aggregation):
    values = vectors(5, 1) * 3
    assert torch.allclose(mean_of(values, aggregation, [WEIGHT_MIN] * 3), values[0])


# -- what a liar gets


@settings(max_examples=80, deadline=None)
@given(seeds, st.integers(2, 7), LIARS, st.sampled_from(LIMITED), st.floats(WEIGHT_MIN, WEIGHT_MAX))
def test_a_mean_is_never_longer_than_the_longest_honest_contribution(seed, honest, kind, aggregation, weight):
    """With one liar, whatever it sends with whatever weight."""
    values = vectors(seed, honest)
    lied = mean_of([*values, liar(kind, values, seed)], aggregation, [1.0] * honest + [weight])
    assert lied.norm() <= NORM_TIMES * max(value.norm() for value in values) * (1 + 1e-5)


@settings(max_examples=80, deadline=None)
@given(seeds, st.integers(2, 7), LIARS, st.floats(0.5, WEIGHT_MAX))
def test_a_liar_moves_the_mean_by_at_most_its_share_of_twice_a_length(seed, honest, kind, weight):
    """clip, honest contributions of equal length R and weight: by 2·R·p, p = k / (n − 1 + k) with k = WEIGHT_TIMES."""
    values = [value / value.norm() for value in vectors(seed, honest)]
    lied = mean_of([*values, liar(kind, values, seed)], "clip", [1.0] * honest + [weight])
    moved = (lied - mean_of(values, "mean")).norm()
    assert moved <= 2 * WEIGHT_TIMES / (honest + WEIGHT_TIMES) * (1 + 1e-5)


# -- to the bit


def square_by_hand(values: np.ndarray) -> float:
    """‖x‖² in the documented order, one operation after another."""
    lanes = np.zeros(LANES)
    for start in range(0, len(values), BLOCK):
        block, sums = values[start : start + BLOCK], np.zeros(LANES, np.float32)
        for row in range(0, len(block), LANES):
            part = block[row : row + LANES]
            sums[: len(part)] = sums[: len(part)] + part * part
        lanes = lanes + sums.astype(np.float64)
    return math.fsum(lanes)


@pytest.mark.parametrize("numel", [1, LANES - 1, LANES, 5000, BLOCK - 1, 2 * BLOCK + 3 * LANES + 5])
def test_squared_norms_have_the_documented_order_of_operations_to_the_bit(numel):
    values = vectors(8, 3, numel)
    products = limits.products([iter(value.split(BLOCK)) for value in values])
    expected = [square_by_hand(value.numpy()) for value in values]
    assert [products[i][i] for i in range(3)] == expected
    assert [limits.square(iter(value.split(BLOCK)), limits.Room()) for value in values] == expected
    assert products[0][2] == products[2][0] == pytest.approx((values[0].double() @ values[2].double()).item(), abs=1e-4)


@pytest.mark.parametrize("numel", [NUMEL, 3000])
def test_clipping_is_the_documented_formula_to_the_bit(numel):
    """mean = Σ rᵢ·fᵢ·xᵢ / Σ rᵢ: one factor each, rounded to fp32, then products and sums in the order of peers."""
    values, weights = vectors(9, 4, numel), [3.0, 1.0, 2.0, 9.0]
    norms = [math.sqrt(square_by_hand(value.numpy())) for value in values]
    median, counted = statistics.median(norms), [3.0, 1.0, 2.0, WEIGHT_TIMES * 2.5]
    ratios = [np.float32(weight) / np.float32(3) for weight in counted]
    acc, total = np.zeros(numel, np.float32), np.float32(0)
    for value, norm, ratio in zip(values, norms, ratios, strict=True):
        acc = acc + value.numpy() * (ratio * np.float32(min(1.0, NORM_TIMES * median / norm)))
        total = total + ratio
    assert np.array_equal(mean_of(values, "clip", weights).numpy(), acc / total)


def test_centred_clipping_is_the_formula_of_the_paper():
    """Computed on vectors in fp64, without inner products."""
    values, weights = vectors(10, 5), [1.0, 1.25, 1.0, 1.25, 1.0]
    median = statistics.median(value.norm().item() for value in values)
    near = [value.double() * min(1.0, median / value.norm().item()) for value in values]
    shares = [weight / sum(weights) for weight in weights]
    v = sum(share * y for share, y in zip(shares, near, strict=True))
    for _ in range(CENTERED_ROUNDS):
        distances = [(y - v).norm().item() for y in near]
        radius = limits.DISTANCE_TIMES * statistics.median(distances)
        taken = [min(1.0, radius / distance) for distance in distances]
        v = v + sum(s * t * (y - v) for s, t, y in zip(shares, taken, near, strict=True))
    assert torch.allclose(mean_of(values, "centered_clip", weights).double(), v, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "plain", "clipped"),
    [([1.0, 1.0, 1000.0], 334.0, 1.0), ([1.0, 2.0, -3.0], 0.0, 1 / 3), ([0.0, 1.0, 2.0, 4.0], 1.75, 1.0)],
)
def test_the_numbers_of_the_documents(values, plain, clipped):
    """The table in docs/math.md."""
    tensors = [torch.tensor([value]) for value in values]
    assert mean_of(tensors, "mean").item() == pytest.approx(plain)
    assert mean_of(tensors, "clip").item() == pytest.approx(clipped)


# -- the mean


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
