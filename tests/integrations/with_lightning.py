"""Training with Lightning's Trainer and a peer that a test controls. This loads Lightning, which takes seconds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from p2p_diloco.integrations.lightning import DilocoCallback
from tests.integrations.fake import FakePeer, Model, data

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.callbacks import ModelCheckpoint as ModelCheckpoint
    from lightning.pytorch.callbacks import StochasticWeightAveraging as Averaging  # noqa: F401


class Module(LightningModule):
    """The small model, with a schedule of the run's steps."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.inner, self.fails_at = Model(), fails_at

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.inner(batch["x"])["loss"]
        if len(self.inner.trained) == self.fails_at:
            raise ZeroDivisionError
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        self.log("val_loss", self.inner(batch["x"])["loss"])

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD([self.inner.weight], lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fitted(
    folder: Path,
    steps: int,
    *,
    module: Module | None = None,
    others: tuple[Callback, ...] = (),
    resume: str | None = None,
    workers: int = 0,
    batch_size: int = 4,
    collate: Any = None,
    shared: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Trainer, Model, FakePeer]:
    """A Trainer after `steps` of the run; settings that begin with `peer_` are the fake peer's. `shared`: what the data
    set that the peers share is loaded with, without a validation."""
    peer = {key.removeprefix("peer_"): settings.pop(key) for key in list(settings) if key.startswith("peer_")}
    module, callback = module or Module(), DilocoCallback(**{"start": 0, **peer})
    training: Any = DataLoader(data(40), batch_size=batch_size, shuffle=True, num_workers=workers, collate_fn=collate)
    if shared is not None:
        training, settings["limit_val_batches"] = callback.loader(num_workers=workers, **shared), 0
    plain = {"logger": False, "enable_checkpointing": bool(others), "enable_progress_bar": False, "accelerator": "cpu"}
    plain |= {"enable_model_summary": False, "default_root_dir": folder, "log_every_n_steps": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(max_steps=steps, callbacks=[callback, *others], **{**plain, **settings})
        try:
            trainer.fit(module, training, DataLoader(data(8), batch_size=8), ckpt_path=resume)
        finally:
            assert isinstance(callback.peer, FakePeer)
            module.peer = callback.peer
    return trainer, module.inner, callback.peer
