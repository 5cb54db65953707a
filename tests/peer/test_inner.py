"""The inner optimizers on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from p2p_diloco.core.version import ModelVersion
from p2p_diloco.peer.inner import InnerState, restore


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save(
    inner: InnerState, epoch: int, counters: dict[str, Any] | None = None, version: ModelVersion | None = None
) -> None:
    """After a step, at which the outer state's newest checkpoint is of this epoch."""
    if inner.is_due(epoch):
        version = version or ModelVersion()
        inner.save(epoch, version.generation, version.samples, counters or {})


def saved_in(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "inner").iterdir())


def test_training_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Moments, step counts and random numbers come back: the next steps are the same to the bit. Counters too."""
    model, optimizer = trained(3)
    save(InnerState([optimizer], tmp_path, 2), 1, {"local_step": 3})
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
        return model.weight.detach().clone()

    expected = go_on(model, optimizer)
    again, fresh = trained(0)
    torch.manual_seed(77)
    again.load_state_dict(weights)
    assert restore([fresh], tmp_path / "checkpoint-1") == {"local_step": 3}
    assert torch.equal(go_on(again, fresh), expected)


def test_it_is_saved_at_the_epochs_of_the_outer_state(tmp_path: Path) -> None:
    """Once beside each of its checkpoints, whichever that is, and not before there is one; the newest are kept. Commits
    may cause a checkpoint during a step in which this peer dies: then the last one before is taken."""
    _, optimizer = trained(1)
    inner = InnerState([optimizer], tmp_path, 2)
    save(inner, 0)
    assert not (tmp_path / "inner").exists()
    for epoch in (6, 6, 9, 9, 12, 12, 15):
        save(inner, epoch, {"epoch": epoch, "first": not (tmp_path / "inner" / f"checkpoint-{epoch}").exists()})
    assert saved_in(tmp_path) == ["checkpoint-12", "checkpoint-15"]
    for asked in (12, 14):
        assert restore([optimizer], tmp_path / f"checkpoint-{asked}") == {"epoch": 12, "first": True}
    assert restore([optimizer], tmp_path / "checkpoint-11") == {}


def test_what_is_not_there_or_does_not_fit_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a file, or for another model's optimizer, the inner optimizer starts fresh, and the log says so. The
    counters are the peer's own, so they come back."""
    _, optimizer = trained(1)
    with caplog.at_level(logging.WARNING):
        assert restore([optimizer], tmp_path / "checkpoint-1") == {}
        save(InnerState([optimizer], tmp_path, 1), 1, {"local_step": 1})
        other = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
        assert restore([other], tmp_path / "checkpoint-1") == {"local_step": 1}
    assert caplog.text.count("starts without a saved state") == 2


def test_an_optimizer_whose_state_cant_be_read_trains_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """ZeroRedundancyOptimizer has its state on all ranks, and raises."""

    class Elsewhere(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("the state is on other ranks")

    save(InnerState([Elsewhere(nn.Linear(1, 1).parameters(), lr=0.1)], tmp_path, keep=2), 1)
    assert "can't be saved, because its state_dict() fails: the state is on other ranks" in caplog.text


def test_the_programs_hyperparameters_stay(tmp_path: Path) -> None:
    """A restart with another learning rate trains with it. Moments and step counts come back. A rate that a scheduler
    had changed isn't taken for the script's."""
    _, optimizer = trained(2)
    optimizer.param_groups[0].update(lr=0.05, initial_lr=0.1)  # as a scheduler does
    save(InnerState([optimizer], tmp_path, 1), 1)
    model = nn.Linear(3, 2)
    again = torch.optim.AdamW(model.parameters(), lr=0.001, betas=(0.5, 0.9))
    restore([again], tmp_path / "checkpoint-1")
    group = again.param_groups[0]
    assert (group["lr"], group["betas"]) == (0.001, (0.5, 0.9))
    assert "initial_lr" not in group
    assert again.state[model.weight]["step"] == 2


class Fails(torch.optim.AdamW):
    def load_state_dict(self, state: Any) -> None:
        raise TypeError("no state")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (torch.optim.Adagrad, "is of another class"),
        (torch.optim.SGD, "is of another class"),
        (lambda parameters: torch.optim.AdamW(parameters[::-1]), "another order"),
        (partial(torch.optim.AdamW, amsgrad=True), "was saved without amsgrad"),
        (
            lambda parameters: torch.optim.AdamW([{"params": [p]} for p in parameters]),
            "another number of parameter groups",
        ),
        (Fails, "another class"),
    ],
)
def test_a_state_of_another_optimizer_is_not_loaded(
    make: Callable[[Any], torch.optim.Optimizer], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch would load it, and fail at the next step. The counters come back all the same."""
    _, optimizer = trained(2)
    save(InnerState([optimizer], tmp_path, 1), 1, {"local_step": 2})
    model = nn.Linear(3, 2)
    again = make([*model.parameters()])
    assert restore([again], tmp_path / "checkpoint-1") == {"local_step": 2}
    assert all(kept["step"] == 0 for kept in again.state.values())  # Adagrad has one from the first
    (message,) = caplog.messages
    assert f"optimizer {type(again).__name__} starts without a saved state" in message
    assert why in message
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    again.step()


def test_hyperparameters_of_any_type_stay(tmp_path: Path) -> None:
    """Tensors of several elements, functions, and numbers of NumPy, which no checkpoint holds: moments come back."""

    def made(mask: list[float]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], numpy.float32(0.5), momentum=0.5)
        optimizer.param_groups[0].update(weight_decay=torch.tensor(mask), maximize=lambda: False)
        return optimizer

    first = made([1.0, 2.0])
    first.state[first.param_groups[0]["params"][0]]["momentum_buffer"] = torch.ones(2)
    save(InnerState([first], tmp_path, 1), 1)
    for mask in ([1.0, 2.0], [1.0, 3.0]):
        again = made(mask)
        restore([again], tmp_path / "checkpoint-1")
        (group,) = again.param_groups
        assert again.state[group["params"][0]]["momentum_buffer"].tolist() == [1.0, 1.0]
        assert (group["lr"], group["weight_decay"].tolist(), group["maximize"]()) == (0.5, mask, False)


def test_state_that_an_optimizer_keeps_in_its_groups_comes_back(tmp_path: Path) -> None:
    """Such as the step count of schedule-free ones, which is no argument of the class. What a scheduler keeps there is
    the program's."""

    class CountsInGroups(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr, "k": 0})

    def made(lr: float) -> torch.optim.Optimizer:
        optimizer = CountsInGroups([nn.Parameter(torch.zeros(1))], lr)
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 2 * lr, 10, cycle_momentum=False)
        return optimizer

    first, again = made(1.0), made(0.25)
    first.param_groups[0].update(k=7, step=3)
    save(InnerState([first], tmp_path, 1), 1)
    restore([again], tmp_path / "checkpoint-1")
    group = again.param_groups[0]
    assert (group["k"], group["step"], group["max_lr"], group["initial_lr"]) == (7, 3, 0.5, 0.02)
