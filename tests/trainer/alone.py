"""A peer that needs no network."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from p2p_diloco.config import RunConfig
from p2p_diloco.peer.absent import AbsentPeer


class Alone(AbsentPeer):
    """Takes the place of a peer: an epoch is `sync_every` steps, and training ends after `stop_after_epochs` epochs."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: RunConfig) -> None:
        super().__init__(model, optimizer)
        self.config = config

    def _count(self, *_: object) -> None:
        super()._count()
        self.epoch = self.global_step // self.config.sync_every
        stop = self.config.stop_after_epochs
        self.finished = stop is not None and self.epoch >= stop
