"""Which buffers of a model are exchanged."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from p2p_diloco.tensors.buffers import exchanged, specs_of


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
