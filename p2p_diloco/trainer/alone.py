"""Training in no run, but with counted epochs, for comparison with a run.

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
    """A peer in no run that counts epochs: each has `sync_every` steps, and `stop_after_epochs` ends training. So a
    model trained alone can be compared with a run of the same settings."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: RunConfig) -> None:
        super().__init__(model, optimizer)
        self.config = config

    def _count(self, *_: object) -> None:
        super()._count()
        self.epoch = self.global_step // self.config.sync_every
        stop = self.config.stop_after_epochs
        self.finished = stop is not None and self.epoch >= stop


Participant: TypeAlias = Peer | AbsentPeer
