"""Train an image classifier with BatchNorm in Lightning. It is the same script in a run or alone; in
a run the first peer waits for a second one:

python examples/image_classifier.py
p2p-diloco join --initial-peers ADDRESS --sync-every 20 --start-peers 2 -- python examples/image_classifier.py
"""

import math
import sys

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from p2p_diloco.integrations.lightning import DilocoCallback

STEPS, CLASSES, SIDE = 240, 8, 16


def images(count: int, generator: torch.Generator) -> TensorDataset:
    """Stripes in one of eight directions, under noise: [count, 1, SIDE, SIDE], and the directions."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle, phase = (labels * math.pi / CLASSES).view(-1, 1, 1), 6 * torch.rand(count, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    stripes = (x * angle.cos() + y * angle.sin() + phase).sin()
    return TensorDataset((stripes + 1.5 * torch.randn(stripes.shape, generator=generator)).unsqueeze(1), labels)


class Classifier(LightningModule):
    """Two convolutions. BatchNorm's parameters are exchanged, and its statistics are averaged."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [[nn.Conv2d(i, o, 5, 2, 2), nn.BatchNorm2d(o), nn.ReLU()] for i, o in ((1, 16), (16, 32))]
        self.layers = nn.Sequential(*blocks[0], *blocks[1], nn.Flatten(), nn.Linear(32 * 16, CLASSES))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_loss", F.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


own = torch.Generator()
own.seed()  # every peer draws its own data
training = DataLoader(images(512, own), batch_size=32, shuffle=True)
held_out = DataLoader(images(1024, torch.Generator().manual_seed(1)), batch_size=256)
callback = DilocoCallback()  # takes its settings from `p2p-diloco join`; without it, does nothing
trainer = Trainer(max_steps=STEPS, check_val_every_n_epoch=5, callbacks=[callback], logger=False, accelerator="auto")
model = Classifier()
trainer.fit(model, training, held_out)  # validates the global parameters; then the module holds the run's result
loss = trainer.validate(model, held_out, verbose=False)[0]["val_loss"]
sys.stderr.write(f"step {callback.peer.global_step}  epoch {callback.peer.epoch}  held-out loss {loss:.4f}\n")
