"""What is said of a model and its optimizers before their peer enters a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from p2p_diloco import ConfigError, Peer, UsageError
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.peer.extents import ALONE
from p2p_diloco.peer.fitness import ASKED, Watch, check, not_finite
from p2p_diloco.peer.session import Trainee, _hook_up
from tests.peer.scripted import hooked


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


def told(caplog: pytest.LogCaptureFixture, model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[str]:
    caplog.clear()
    check(model, optimizers)
    return caplog.messages[:]


def test_what_either_of_model_and_optimizers_lacks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Parameters that no optimizer trains, with their number and the mend; and those that one trains beside the model,
    such as a loss's. Frozen ones are no matter, and all optimizers count."""
    model, loss = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(3, 1)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    assert told(caplog, model, first, second) == []
    (message,) = told(caplog, model, first)
    assert "2 of 4 trainable parameters are in no given optimizer" in message
    assert "1.weight, 1.bias" in message
    model[1].requires_grad_(False)
    assert told(caplog, model, first) == []
    first.add_param_group({"params": loss.parameters()})
    (message,) = told(caplog, model, first)
    assert "SGD also trains 2 parameters that are not in the model" in message
    assert "shape [1, 3], [1]; give Peer one module" in message
    loss.requires_grad_(False)
    assert told(caplog, model, first) == []


class Listed(nn.Linear):
    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"all": [parameter.detach() for parameter in self.parameters()], "bias": self.bias}


def test_parameters_that_no_state_dict_has_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Their global values would have no place in what `global_state_dict` returns."""
    model = Listed(2, 2)
    (message,) = told(caplog, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "state_dict() of Listed has not 1 of the parameters" in message
    assert "not global ones: weight; begin with" in message


# -- watch


def parts() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
    model[1].requires_grad_(True)
    return model, torch.optim.SGD(model[1].parameters(), lr=0.1)


def unfreeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(True)


def add(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2, bias=False))


def resize(model: nn.Sequential) -> None:
    model[1] = nn.Linear(2, 2)


def merge(model: nn.Sequential) -> None:
    del model[1]


def widen(model: nn.Sequential) -> None:
    model.double()


def cut(model: nn.Sequential) -> None:
    model[1].weight.data = torch.zeros(2, 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (widen, r"parameter=1\.weight, 1\.bias has become torch\.float64, but a run .* fp32; keep the model in fp32"),
        (cut, r"parameter=1\.weight has another shape than when the run was entered"),
        (unfreeze, r"parameter=0\.weight was frozen or missing.*unfreeze or add it before the peer is made"),
        (add, r"parameter=2\.weight was frozen or missing"),
        (resize, r"parameter=1\.weight, 1\.bias is another tensor.*change the model before the peer is made"),
        (merge, r"parameter=1\.weight, 1\.bias is another tensor than when the run was entered, or gone"),
    ],
)
def test_a_model_that_is_changed_ends_the_next_step(change: Callable[[nn.Sequential], None], sentence: str) -> None:
    """Before anything is exchanged, because peers would hold different models without a word."""
    model, optimizer = parts()
    calls: list[int] = []
    trainee = Trainee(RunConfig(), PeerConfig(), model, [optimizer], ALONE)
    with ExitStack() as stack:
        _hook_up(trainee, lambda: calls.append(1), Watch(model, optimizer), stack)
        optimizer.step()
        assert calls == [1]
        change(model)
        with pytest.raises(UsageError, match=sentence):
            optimizer.step()
        assert calls == [1]


def test_a_model_may_be_compiled_moved_and_frozen_for_a_while() -> None:
    """Loops of several optimizers freeze what one of them doesn't train; its values are exchanged as before."""
    model, optimizer = parts()
    watch = Watch(model, optimizer)
    model.requires_grad_(False)
    watch.step()
    model[1].requires_grad_(True)
    model[1] = torch.compile(model[1], backend="eager")
    model.to(torch.bfloat16)
    watch.step()


def test_parameters_that_are_given_to_the_optimizer_later_are_looked_for(caplog: pytest.LogCaptureFixture) -> None:
    """Those of the model are exchanged; others reach no other peer, which is told once."""
    model, optimizer = parts()
    watch = Watch(model, optimizer)
    watch.step()
    optimizer.add_param_group({"params": model[0].parameters()})
    watch.step()
    assert caplog.messages == []
    optimizer.add_param_group({"params": nn.Linear(3, 1).parameters()})
    for _ in range(3):
        watch.step()
    (message,) = caplog.messages
    assert "SGD also trains 2 parameters that are not in the model" in message


@pytest.mark.parametrize(
    ("every", "lr", "keeps_masters"),
    [
        *((every, -1.0, True) for every in (10, 40)),
        *((every, lr, False) for every, lr in [(1, -1.0), (2, 0.5), (10, -1.0), (10, 0.9), (10, 1.0), (10, 1.3)]),
    ],
)
def test_an_optimizer_that_undoes_merges_is_told_once(
    every: int, lr: float, keeps_masters: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps a copy of the weights, which goes into the model at the next step. A merge moves them to the other side,
    as if the others pulled there; the next step moves them back. An ordinary step may end where the weights were before
    the merge, if others pull the other way or the outer learning rate is low; it is as long as the steps before it."""
    hook, node, model = hooked(sync_every=every)
    node.lr = lr
    watch = Watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hook._local.merging = watch.merging  # type: ignore[attr-defined]
    for number in range(5 * every + 1):
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(number + 1.0) if keeps_masters else weight.add_(1.0)
        watch.step()
        hook.step()
    assert caplog.text.count("SGD undoes each merge") == keeps_masters
    assert keeps_masters or caplog.text == ""


class Keeps(torch.optim.SGD):
    """Keeps a copy of the first weights, moments, and weights of its own; the names of those that are told."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            own = {"p0": parameter.detach().clone(), "exp_avg": torch.zeros_like(parameter), "step": torch.zeros(())}
            self.state[parameter] = own

    def move(self, by: float) -> None:
        with torch.no_grad():
            for parameter, own in self.state.items():
                parameter.add_(by)
                own["exp_avg"] += by
                if "slow" in own:
                    own["slow"] += (parameter - own["slow"]) / 2


class Wrapper:
    def __init__(self, optimizer: Keeps) -> None:
        self.optimizer = optimizer
        self.state = {parameter: {"slow": parameter.detach().clone()} for parameter in optimizer.state}


@pytest.mark.parametrize("where", ["nowhere", "in the optimizer", "in a wrapper"])
def test_weights_that_an_optimizer_keeps_are_told_once(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Lookahead's slow weights, or those of schedule-free ones. Moments, and a copy of the first weights, are none."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        model.weight[0, 0] = 1e-6  # near to nothing: several values count
    optimizer = Keeps(model)
    wrapper = Wrapper(optimizer)
    if where == "in the optimizer":
        for parameter, own in optimizer.state.items():
            own["slow"] = parameter.detach().clone()
    watch = Watch(model, optimizer, [wrapper] if where == "in a wrapper" else [])
    for _ in range(6):
        for _ in range(3):
            optimizer.move(0.001)
            for own in wrapper.state.values():
                own["slow"] += 0.001
            watch.step()
        for _ in range(2):  # fragments may come one after another
            with watch.merging(), torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(-0.0002)
    name = "Wrapper" if where == "in a wrapper" else "Keeps"
    assert caplog.text.count(f"the optimizer {name} keeps weights of its own ('slow' in its state)") == (
        where != "nowhere"
    )
    assert len(caplog.messages) == (where != "nowhere")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_parameters_that_are_not_finite_are_named(dtype: torch.dtype) -> None:
    """Not those of the greatest values, nor empty ones."""
    model = nn.Module()
    values = {"zero": [], "great": [torch.finfo(dtype).max, -torch.finfo(dtype).max], "nan": [0.0, math.nan]}
    values |= {"inf": [-math.inf]} if dtype != torch.float8_e4m3fn else {}  # which has no infinity
    for name, each in values.items():
        model.register_parameter(name, nn.Parameter(torch.tensor(each).to(dtype)))
    assert not_finite(model) == ", ".join(name for name in values if name in ("nan", "inf"))


def entered(session: SimpleNamespace, watch: Watch, parts: tuple[Any, Any]) -> Peer:
    """A peer that has entered without a node."""
    session.watch = watch
    return Peer(*parts).__enter__()


@pytest.mark.parametrize("asked", [0, ASKED])
def test_training_without_steps_is_told(asked: int, no_node: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """While the loop asks for the run's end, or else on leaving, with the optimizer that was given."""
    model, optimizer = parts()
    peer = entered(no_node, Watch(model, optimizer), (model, optimizer))
    with torch.no_grad():
        model[1].weight.add_(1.0)
    for _ in range(3 * asked):
        assert not peer.finished
    assert caplog.text.count("step() of the optimizer SGD is never called") == (asked > 0)
    peer.close()
    assert caplog.text.count("step() of the optimizer SGD is never called") == 1


def test_a_replaced_optimizer_is_told(no_node: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """A loop that never asks for the run's end reports; leaving looks once more."""
    model, optimizer = parts()
    watch = Watch(model, optimizer)
    no_node.hook = SimpleNamespace(report=lambda *_: None)
    peer = entered(no_node, watch, (model, optimizer))
    watch.step()
    for _ in range(2 * ASKED):
        with torch.no_grad():
            model[1].weight.add_(1.0)
        peer.report(loss=1.0)
    assert caplog.text == ""
    with torch.no_grad():
        model[1].weight.add_(1.0)
    no_node.hook = None
    peer.close()
    assert caplog.text.count("step() of the optimizer SGD is no longer called") == 1


def test_no_training_and_steps_are_not_told_of(no_node: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Values that a merge has loaded are no training, and steps that come now and then are counted. After the last one
    a wrapper moves the weights once more, or the program loads others, and then leaves. Between two steps it may
    evaluate other weights, and ask and report as often as it likes."""
    model, optimizer = parts()
    watch = Watch(model, optimizer)
    peer = entered(no_node, watch, (model, optimizer))
    for _ in range(3):
        with watch.merging(), torch.no_grad():
            model[1].weight.add_(1.0)
        for _ in range(2 * ASKED):
            assert not peer.finished
        with torch.no_grad():
            model[1].weight.add_(1.0)
        watch.step()
        for moved in (1.0, -1.0, 0.0):
            with torch.no_grad():
                model[1].weight.add_(moved)
            for _ in range(2 * ASKED):
                watch.asked()
    watch.step()
    for loading in (watch.merging(), nullcontext()):
        with loading, torch.no_grad():
            model[1].weight.add_(1.0)
    peer.close()
    assert caplog.text == ""
