"""What is said of a model and its optimizers before their peer enters a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from p2p_diloco import ConfigError, Peer
from p2p_diloco.peer.fitness import check


def test_a_tensor_without_values_is_refused_by_name() -> None:
    """A parameter or a buffer on the meta device would found the run with garbage; nothing is started."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"), nn.BatchNorm1d(2, device="meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ConfigError, match=r"model=1.weight, 1.bias, 2.weight and \d more is on the meta device.*to_empty"
    ):
        Peer(model, optimizer).__enter__()


def test_a_sparse_parameter_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(ConfigError, match="model=weight is a sparse tensor, which slices can't hold; make it dense"):
        check(model, [torch.optim.SGD([model.bias], lr=0.1)])


def test_a_nested_tensor_is_refused_by_name() -> None:
    """Torch reads neither its shape nor its strides."""
    model = nn.Linear(2, 2)
    model.register_buffer("rows", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))
    with pytest.raises(ConfigError, match=r"model=rows is a nested tensor, .*keep a list of plain tensors"):
        check(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def test_a_parameter_that_no_step_can_change_is_refused() -> None:
    with torch.inference_mode():
        made = nn.Linear(2, 1, bias=False)
    expanded = nn.Linear(2, 1, bias=False)
    expanded.weight = nn.Parameter(torch.zeros(1).expand(1, 2))
    for model in (made, expanded):
        with pytest.raises(
            ConfigError, match=r"model=weight can't be changed in place .*outside of torch.inference_mod"
        ):
            check(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


@pytest.mark.parametrize("lazy", [nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False)])
def test_a_module_without_shapes_is_refused_with_the_mend(lazy: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(2, 2), lazy)
    with pytest.raises(ConfigError, match=r"model=1\.\w+.* has no shape yet, .*; send one batch through the model"):
        check(model, [torch.optim.SGD(model[0].parameters(), lr=0.1)])


@pytest.mark.parametrize(("dtype", "mend"), [(torch.complex64, "view_as_real"), (torch.float64, r"model\.float\(\)")])
def test_a_trained_parameter_that_fp32_does_not_hold_is_refused(dtype: torch.dtype, mend: str) -> None:
    """Its values would be narrowed, without a word. Nothing is started, and a frozen one may have any dtype."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[1].weight.detach().clone()
    with pytest.raises(ConfigError, match=f"model=1.weight, 1.bias is {dtype}.*{mend}"):
        Peer(model, optimizer).__enter__()
    assert torch.equal(model[1].weight, before)
    model[1].requires_grad_(False)
    check(model, [optimizer])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_a_narrow_model_is_taken(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2).to(dtype)
    check(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


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


class Short(nn.Linear):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return dict(super().state_dict())


class Listed(nn.Linear):
    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"all": [parameter.detach() for parameter in self.parameters()], "bias": self.bias}


def test_a_state_dict_that_cant_be_called_is_refused() -> None:
    model = Short(2, 2)
    with pytest.raises(ConfigError, match=r"model=Short has a state_dict\(\) that can't be called: .*keep_vars"):
        check(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def test_parameters_that_no_state_dict_has_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Their global values would have no place in what `global_state_dict` returns."""
    model = Listed(2, 2)
    check(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    (message,) = caplog.messages
    assert "state_dict() of Listed has not 1 of the parameters" in message
    assert "not global ones: weight; begin with" in message
