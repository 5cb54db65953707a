"""What the trainer asks of whoever it trains with (`Participant`), and the answer when that is nobody
(`Alone`).

Law: the trainer's loop knows a run by this protocol only, so that it can be tested with a fake and train
with none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_diloco.config import RunConfig
from p2p_diloco.peer.absent import AbsentPeer


class Traffic(Protocol):
    """The part of a peer's metrics that the trainer shows."""

    @property
    def peers(self) -> int:
        """Live peers of the run."""
        ...

    @property
    def sync_count(self) -> int:
        """Exchanges that this peer contributed to."""
        ...

    @property
    def waiting_time_s(self) -> float:
        """How long training stood still for them."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Bytes of messages to other peers."""
        ...

    @property
    def bytes_received(self) -> int:
        """Bytes of messages from other peers."""
        ...


class Participant(Protocol):
    """The part of `p2p_diloco.Peer` that the trainer uses; entering joins the run, leaving leaves it."""

    @property
    def peer_id(self) -> str:
        """What tells this peer from all others; it decides which text it draws."""
        ...

    @property
    def config(self) -> RunConfig:
        """The run's settings, as they are now."""
        ...

    @property
    def epoch(self) -> int:
        """Outer steps so far."""
        ...

    @property
    def global_step(self) -> int:
        """Inner steps of the run, by one peer's share of them: learning-rate schedules follow it."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the run has ended for all."""
        ...

    @property
    def digest(self) -> str:
        """Equal where the whole outer state is."""
        ...

    @property
    def metrics(self) -> Traffic:
        """Counters."""
        ...

    def report(self, *, loss: float, samples: int) -> None:
        """Tell the run about the inner step that is about to be made."""
        ...

    def pause(self) -> AbstractContextManager[Any]:
        """While this lasts, the peer makes no inner steps and nobody wonders why."""
        ...

    def global_state_dict(self) -> Mapping[str, Tensor]:
        """The global parameters, in the shape of the model's own state_dict."""
        ...

    def __enter__(self) -> Participant: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class Alone(AbsentPeer):
    """A participant in no run whose epochs are counted all the same: `sync_every` steps each, and
    `stop_after_epochs` ends training. So a model trained alone can be compared with a run of the same
    settings.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: RunConfig) -> None:
        super().__init__(model, optimizer)
        self.config = config

    def _count(self, *_: object) -> None:
        super()._count()
        self.epoch = self.global_step // self.config.sync_every
        stop = self.config.stop_after_epochs
        self.finished = stop is not None and self.epoch >= stop
