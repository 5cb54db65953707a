"""What all experiments train: a small GPT on the standard library's text, with the built-in trainer's parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from setting import Setting
from torch import Tensor, nn

from p2p_diloco.trainer.blocks import load_text
from p2p_diloco.trainer.config import TrainerConfig
from p2p_diloco.trainer.gpt import GPT, GPTConfig
from p2p_diloco.trainer.train import (
    BETAS,
    Batches,
    held_out_batches,
    mean_loss,
    new_optimizer,
    share_of_rate,
    training_part,
    warm_start,
)

MUON_LR = 0.02
"""For the matrices of the blocks; all other parameters have AdamW's rate. Both follow one schedule."""


@dataclass(frozen=True, slots=True)
class Task:
    """Sizes of an experiment."""

    steps: int = 800
    """Inner steps of each peer."""
    warm: int = 300
    """Data-parallel steps before the run."""
    warm_batch: int = 16
    layers: int = 2
    width: int = 32
    context: int = 32
    windows: int = 2048
    """Windows of held-out text, after the run."""
    few: int = 256
    """The same, during the run."""

    @property
    def config(self) -> TrainerConfig:
        """The settings of the built-in trainer's parts; lr 0.004 down to 10 % along a cosine, clipped at 1."""
        return TrainerConfig(layers=self.layers, width=self.width, heads=2, context=self.context)

    def model(self, seed: int) -> GPT:
        """A model with random weights."""
        return GPT(GPTConfig(self.layers, self.width, 2, self.context, seed=seed))

    def batches(self, seed: int, key: str, size: int) -> Batches:
        """Random windows from the whole training text, which depend on seed and key alone."""
        return Batches(_training(), batch_size=size, context=self.context, seed=seed, key=key)

    def started(self, seed: int, steps: int) -> dict[str, Tensor]:
        """The weights from which all runs of a seed begin."""
        return _started(self, seed, steps)

    def loss(self, model: GPT, windows: int) -> float:
        """Held-out loss in nats a byte."""
        return mean_loss(model, _held_out(windows, self.context))


@cache
def _training() -> Tensor:
    return training_part(load_text())


@cache
def _held_out(windows: int, context: int) -> list[tuple[Tensor, Tensor]]:
    size = min(windows, 64)
    return list(held_out_batches(load_text(), count=windows // size, batch_size=size, context=context))


@cache
def _started(task: Task, seed: int, steps: int) -> dict[str, Tensor]:
    model = task.model(seed)
    warm_start(model, task.batches(seed, "warm start", task.warm_batch), steps, task.config)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Learner:
    """One peer's model with its inner optimizer and its text."""

    def __init__(self, task: Task, setting: Setting, seed: int, key: str) -> None:
        """`key` tells the peers of a run apart."""
        self.model, self._config = task.model(seed), task.config
        self._batches, self._batch = task.batches(seed, key, setting.batch), setting.batch
        self._horizon = round(setting.steps * task.steps)
        self.optimizers = optimizers(self.model, self._config, setting.inner)
        self._steps = self.samples = 0

    def step(self, run_step: float) -> None:
        """Make one inner step, with the learning rate of the run's step."""
        share = share_of_rate(self._config, int(run_step), self._steps, self._horizon)
        torch.autograd.backward(self.model(*next(self._batches)))
        nn.utils.clip_grad_norm_(self.model.parameters(), self._config.clip)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad()
        self._steps += 1
        self.samples += self._batch


def optimizers(model: GPT, config: TrainerConfig, inner: str) -> list[tuple[torch.optim.Optimizer, float]]:
    """The inner optimizers, each with its peak learning rate."""
    if inner == "adamw":
        return [(new_optimizer(model, config), config.lr)]
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=config.weight_decay)
    return [(muon, MUON_LR), (torch.optim.AdamW(others, lr=config.lr, betas=BETAS, weight_decay=0.1), config.lr)]
