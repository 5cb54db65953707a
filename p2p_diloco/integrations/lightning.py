"""`DilocoCallback` for the Trainer of Lightning.

Law: the callback decides when to enter, to evaluate and to leave; `TakingPart` does it. Lightning's own counters
(`trainer.global_step`, epochs) count this peer's own steps; the learning rate and the end follow the run's steps.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from p2p_diloco.integrations.schedule import follow
from p2p_diloco.integrations.taking_part import OfARun, TakingPart
from p2p_diloco.peer.peer import Peer

try:
    from lightning.pytorch import Callback, seed_everything
    from lightning.pytorch.utilities.data import extract_batch_size
except ImportError as error:
    raise ImportError(
        f"p2p_diloco.integrations.lightning needs {error.name}, which isn't installed; "
        "install it with: pip install 'p2p-diloco[lightning]'"
    ) from error


log = logging.getLogger("p2p_diloco")


class DilocoCallback(OfARun, Callback):  # type: ignore[misc]  # its types are not read
    """Makes a Lightning Trainer one peer of a run.

    The arguments are those of `Peer` after the optimizer. Without arguments, `Peer.from_env` makes the peer, which
    trains alone unless `p2p-diloco join` started the program. Validation uses the global parameters, and checkpoints
    contain them. The module holds the run's result when `fit` returns.
    """

    def __init__(self, **settings: Any) -> None:
        self._part = TakingPart(settings, ahead=1)
        self._samples: int | None = 0
        self._restored: dict[str, Any] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Enter the run. Then seed this peer's data order, before Lightning makes the data loaders' iterators, so that
        no two peers train on the same batches."""
        peer = self._part.enter(trainer.strategy.model, trainer.optimizers)
        if isinstance(peer, Peer):
            seed_everything(peer.seed, workers=os.environ.get("PL_SEED_WORKERS", "0") == "1", verbose=False)
            for name in (type(each).__name__ for each in trainer.callbacks):
                if "WeightAveraging" in name:  # Lightning has more of them from version to version
                    log.warning("%s puts this peer's own average in place of the run's result; leave it out", name)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue at the run's step. After a restart, first restore this peer's counters."""
        counters = self._restored or {"local_step": trainer.global_step}
        if counters["local_step"]:
            self.peer.load_state_dict(counters)
        self._follow(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count the samples of the next step. They are unknown if the size of one of its batches is."""
        size = _size_of(batch)
        self._samples = None if size is None or self._samples is None else self._samples + size

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Report the samples of this step."""
        self.peer.report(samples=self._samples)
        self._samples = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Follow the run: its learning rate and its end. Report the loss when Lightning logs."""
        if isinstance(outputs, dict) and "loss" in outputs and trainer.global_step % trainer.log_every_n_steps == 0:
            self.peer.report(loss=float(outputs["loss"]))
        self._follow(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End training if all shared data is used."""
        if self._part.data_is_used:
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Evaluate the global parameters, while the others wait."""
        if not trainer.sanity_checking:
            self._part.show_global()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Go on with this peer's own parameters. Report the held-out loss, if the module logs it as `val_loss`."""
        if self._part.inside and not trainer.sanity_checking and "val_loss" in trainer.callback_metrics:
            self.peer.report(held_out_loss=float(trainer.callback_metrics["val_loss"]))
        self._part.show_own()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save the global parameters in place of this peer's own."""
        if self._part.inside:
            checkpoint["state_dict"].update(self.peer.global_state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The peer's counters, for Lightning's checkpoint."""
        return self.peer.state_dict() if self._part.inside else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting after a restart."""
        self._restored = dict(state_dict)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave; the module holds the run's result from now on."""
        self._part.leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave without a last exchange."""
        self._part.leave(exception)

    def _follow(self, trainer: Any) -> None:
        step = self.peer.global_step
        for each in trainer.lr_scheduler_configs:
            if each.interval == "step":
                follow(each.scheduler, step // each.frequency)
        if self.peer.finished or 0 <= trainer.max_steps <= step:
            trainer.should_stop = True


def _size_of(batch: Any) -> int | None:
    """The number of samples in a batch. None if Lightning can't infer it, for instance from a graph: training goes on
    without it."""
    try:
        return int(extract_batch_size(batch))
    except Exception:  # Lightning's own, or whatever an object of the user's raises when it is looked into
        return None
