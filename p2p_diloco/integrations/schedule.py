"""Lets a learning rate scheduler of torch follow the run's steps.

Law: changes only the scheduler and the learning rates of its optimizer.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, ReduceLROnPlateau


def follow(scheduler: Any, step: int) -> None:
    """Set a scheduler to `step`, which is `peer.global_step`, so that a late joiner has the same learning rate as the
    others. Call this after each step of the scheduler, and once after entering the run.

    `scheduler`: one of torch's, or Accelerate's wrapper of one. A `LambdaLR` (most schedules of Transformers are of
    this class) can be set to any step. Other schedulers can only go forward, so they make the missing steps. A
    scheduler that follows a metric has no steps, and is not changed.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        return
    with warnings.catch_warnings():  # a joiner's scheduler moves before its optimizer's first step
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
        if isinstance(scheduler, LambdaLR) and scheduler.last_epoch != step:
            scheduler.last_epoch = step - 1
        while _steps_of(scheduler) < step:
            scheduler.step()


def _steps_of(scheduler: LRScheduler) -> int:
    """The number of steps that a scheduler has made. A chain doesn't count its own, but all its schedulers step
    together."""
    while isinstance(scheduler, ChainedScheduler):
        scheduler = scheduler._schedulers[0]
    return scheduler.last_epoch
