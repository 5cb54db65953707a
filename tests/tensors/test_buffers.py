"""Which buffers of a model are exchanged."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from p2p_diloco.tensors.buffers import exchanged, fingerprint, specs_of, stepped, together
from p2p_diloco.tensors.layout import GREATEST, MEAN
from p2p_diloco.tensors.mean import Given


class Holder(nn.Module):
    """A module with one buffer of its own."""

    def __init__(self, values: Tensor | None, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("held", values, persistent)


class Quantised(nn.Module):
    """Weights as codes of few bits, and their scales, as libraries for quantised models keep them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("codes", torch.ones(4, 2, dtype=dtype))
        self.register_buffer("scales", torch.ones(4))
        self.register_buffer("seen", torch.tensor(3))


def test_statistics_and_counters_are_exchanged_in_the_models_order() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False))
    names = [f"{layer}.{name}" for layer in (1, 2) for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert list(exchanged(model)) == names
    assert [(spec.shape, spec.dtype) for spec in specs_of(model)] == [
        ((3,), "float32"),
        ((3,), "float32"),
        ((), "int64"),
    ] * 2
    assert specs_of(torch.compile(model, backend="eager")) == specs_of(model)
    assert [spec.dtype for spec in specs_of(model.half())] == ["float16", "float16", "int64"] * 2


@pytest.mark.parametrize(
    "values",
    [
        None,
        torch.ones(0),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.uint8),
        torch.ones(2, dtype=torch.int32),
        torch.tensor([0.0, -math.inf]),
        torch.tensor([0.0, math.nan]),
        torch.tensor([0.0, 2.0**31]),
        torch.tensor([2**24 + 1]),
        torch.tensor([-(2**24) - 1]),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.ones(1).expand(2),
        torch.inference_mode()(torch.ones)(2),
    ],
)
def test_what_no_mean_or_counter_is_stays_local(values: Tensor | None) -> None:
    """Masks, codes, seeds, and what fp32 does not hold."""
    assert exchanged(Holder(values)) == {}


@pytest.mark.parametrize(
    "values",
    [torch.ones(2), torch.tensor([2**24]), torch.tensor(-(2**24)), torch.ones(1, 2), torch.ones(2).expand(1, 2)],
)
def test_what_fp32_holds_is_exchanged_if_it_is_saved(values: Tensor) -> None:
    assert list(exchanged(Holder(values))) == ["held"]
    assert exchanged(Holder(values, persistent=False)) == {}


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_quantised_weights_stay_local_with_all_that_belongs_to_them(dtype: torch.dtype) -> None:
    model = nn.Sequential(Quantised(dtype), nn.BatchNorm1d(3))
    assert {name.split(".")[0] for name in exchanged(model)} == {"1"}


def test_a_shared_buffer_comes_once() -> None:
    model = nn.Sequential(Holder(torch.ones(2)), Holder(torch.zeros(3)))
    model[1].held = model[0].held
    assert list(exchanged(model)) == ["0.held"]


# -- what is not exchanged


class Adapted(nn.Module):
    """A frozen base with a buffer and a trainable adapter."""

    def __init__(self, seed: int = 0, adapter: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(40, 50).requires_grad_(False)
        self.norm = nn.BatchNorm1d(50)
        self.adapter = nn.Parameter(torch.full((3,), adapter))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))


def test_equal_bases_have_equal_fingerprints() -> None:
    """What a run exchanges, the base's dtype and compilation make no difference. A model that is trained whole has
    none: there is nothing to compare, whatever its buffers."""
    one, other = Adapted(), Adapted(adapter=1.0)
    other.norm.running_mean.fill_(3.0)
    assert fingerprint(one) == fingerprint(other) == fingerprint(Adapted().to(torch.bfloat16)) != ""
    other.base = torch.compile(other.base, backend="eager")
    assert fingerprint(other) == fingerprint(one)
    assert fingerprint(nn.BatchNorm1d(3)) == ""


@pytest.mark.filterwarnings("error")
def test_different_bases_have_different_fingerprints() -> None:
    """Another value, shape or buffer shows, and another imaginary part. Torch doesn't warn of any that are discarded,
    which would end a script that makes warnings errors."""
    wider, masked, turned, straight = (Adapted() for _ in range(4))
    wider.base = nn.Linear(40, 51).requires_grad_(False)
    masked.mask.zero_()
    for model, imaginary in ((turned, 1.0), (straight, 0.0)):
        model.register_buffer("turns", torch.full((3,), complex(1.0, imaginary)))
    assert len({fingerprint(each) for each in (Adapted(), Adapted(seed=1), wider, masked, turned, straight)}) == 6


# -- their outer step

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


def test_a_step_moves_a_mean_by_its_share_and_a_counter_never_back() -> None:
    old, new = torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])
    assert stepped(MEAN, old, new, 0.25).tolist() == [1.5, 4.0]
    assert stepped(GREATEST, old, new, 0.25).tolist() == [3.0, 5.0]
    assert stepped(GREATEST, old, new, 1.0).tolist() == [3.0, 1.0]
