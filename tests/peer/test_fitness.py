"""What is said of a model and its optimizers before their peer enters a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from p2p_diloco import ConfigError, Peer
from p2p_diloco.peer.fitness import check


def with_a_tensor(value: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(value, requires_grad=True)
    return model


def nested() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("rows", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))
    return model


@torch.inference_mode()
def inferring() -> nn.Module:
    return nn.Linear(2, 1, bias=False)


class Short(nn.Linear):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return dict(super().state_dict())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: nn.Sequential(nn.Linear(2, 2, device="meta"), nn.BatchNorm1d(2, device="meta")),
            r"model=0.weight, 0.bias, 1.weight and \d more is on the meta device.*to_empty",
        ),
        (
            lambda: with_a_tensor(torch.eye(2).to_sparse()),
            "weight is a sparse tensor, which slices can't hold; make it",
        ),
        (nested, r"model=rows is a nested tensor, .*keep a list of plain tensors"),
        (inferring, r"model=weight can't be changed in place .*outside of torch.inference_mod"),
        (lambda: with_a_tensor(torch.zeros(1).expand(1, 2)), "model=weight can't be changed in place"),
        (lambda: nn.LazyLinear(3), r"model=\w+.* has no shape yet, .*; send one batch through the model"),
        (lambda: nn.LazyBatchNorm1d(affine=False), "has no shape yet"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "model=weight, bias is torch.complex64.*view_as_real"),
        (lambda: nn.Linear(2, 2, dtype=torch.float64), r"model=weight, bias is torch.float64.*model\.float\(\)"),
        (lambda: Short(2, 2), r"model=Short has a state_dict\(\) that can't be called: .*keep_vars"),
    ],
)
def test_a_model_that_cant_be_trained_is_refused_by_name(make: Callable[[], nn.Module], sentence: str) -> None:
    """It would found the run with garbage, or its values would be narrowed without a word. Nothing is started."""
    with pytest.raises(ConfigError, match=sentence):
        Peer(make(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)).__enter__()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_a_narrow_model_is_taken(dtype: torch.dtype) -> None:
    """A frozen part may have any dtype."""
    model = nn.Sequential(nn.Linear(2, 2).to(dtype), nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False))
    check(model, [torch.optim.SGD(model[0].parameters(), lr=0.1)])


def test_parameters_that_no_optimizer_trains_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """With their number and the mend. Frozen ones need no optimizer, and all optimizers count."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    check(model, [first, second])
    assert caplog.messages == []
    check(model, [first])
    (message,) = caplog.messages
    assert "2 of 4 trainable parameters are in no given optimizer" in message
    assert "1.weight, 1.bias" in message
    model[1].requires_grad_(False)
    caplog.clear()
    check(model, [first])
    assert caplog.messages == []


def test_what_an_optimizer_trains_beside_the_model_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A loss with parameters of its own, for instance; frozen ones of any model are no matter."""
    model, loss = nn.Linear(2, 2), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    check(model, [optimizer])
    (message,) = caplog.messages
    assert "SGD also trains 2 parameters that are not in the model" in message
    assert "shape [1, 3], [1]; give Peer one module" in message
    caplog.clear()
    loss.requires_grad_(False)
    check(model, [optimizer])
    assert caplog.messages == []


class Listed(nn.Linear):
    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"all": [parameter.detach() for parameter in self.parameters()], "bias": self.bias}


def test_parameters_that_no_state_dict_has_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Their global values would have no place in what `global_state_dict` returns."""
    model = Listed(2, 2)
    check(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    (message,) = caplog.messages
    assert "state_dict() of Listed has not 1 of the parameters" in message
    assert "not global ones: weight; begin with" in message
