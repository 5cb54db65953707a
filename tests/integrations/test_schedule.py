"""`follow` sets a scheduler to the run's step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from p2p_diloco.integrations.schedule import follow

KINDS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 100),
    "ChainedScheduler": lambda optimizer: ChainedScheduler([chain(optimizer), StepLR(optimizer, 7, 0.5)]),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, 1.0, 45), CosineAnnealingLR(optimizer, 20)], [45]
    ),
    "StepLR": lambda optimizer: StepLR(optimizer, 10, 0.5),
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def chain(optimizer: torch.optim.Optimizer) -> ChainedScheduler:
    return ChainedScheduler([ConstantLR(optimizer, 0.1, 45), ExponentialLR(optimizer, 0.9)])


def rates(scheduler: Any, steps: int) -> list[float]:
    """The learning rates of a peer that has taken part from the beginning."""
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_joiners_rates_are_the_others(kind: str) -> None:
    """Set to step 40, and after each own step of the scheduler again, it has the rates of the steps from 40 on. A step
    forward at the beginning is no reason for torch's warning."""
    others = rates(KINDS[kind](optimizer()), 60)
    late = KINDS[kind](optimizer())
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follow(late, 40)
        for step in range(40, 60):
            found.append(late.optimizer.param_groups[0]["lr"])
            late.optimizer.step()
            late.step()
            follow(late, step + 1)
    assert found == pytest.approx(others[40:])
    assert late.get_last_lr() == [group["lr"] for group in late.optimizer.param_groups]


def test_a_schedule_of_transformers_can_go_back() -> None:
    """The run's step falls if the run is set back; a `LambdaLR` then has the rate of that step."""
    scheduler = KINDS["LambdaLR"](optimizer())
    rates(scheduler, 50)
    follow(scheduler, 10)
    assert scheduler.get_last_lr() == [1 / 11]


def test_a_wrapper_is_looked_into() -> None:
    """Accelerate's wrapper holds the scheduler as `.scheduler`."""
    scheduler = KINDS["StepLR"](optimizer())
    follow(type("Wrapper", (), {"scheduler": scheduler})(), 20)
    assert scheduler.get_last_lr() == [0.25]


def test_a_scheduler_that_follows_a_metric_is_left_alone() -> None:
    """Its steps need the metric."""
    scheduler = ReduceLROnPlateau(optimizer())
    follow(scheduler, 20)
    assert scheduler.last_epoch == 0
