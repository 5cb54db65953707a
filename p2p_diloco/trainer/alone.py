"""Training without a run, but with counted epochs, so that the result can be compared with a run.

Law: the trainer takes a `Peer` or an `Alone`; both have the same methods.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import nn
from torch.optim import Optimizer

from p2p_diloco.config import RunConfig
from p2p_diloco.peer import Peer
from p2p_diloco.peer.absent import AbsentPeer


class Alone(AbsentPeer):
    """Takes the place of a peer when there is no run. An epoch is `sync_every` steps, and training ends after
    `stop_after_epochs` epochs. So a model that was trained alone can be compared with a run of the same settings."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: RunConfig) -> None:
        super().__init__(model, optimizer)
        self.config = config

    def _count(self, *_: object) -> None:
        super()._count()
        self.epoch = self.global_step // self.config.sync_every
        stop = self.config.stop_after_epochs
        self.finished = stop is not None and self.epoch >= stop


Participant: TypeAlias = Peer | AbsentPeer
