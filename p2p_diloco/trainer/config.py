"""The settings of the built-in trainer (`TrainerConfig`).

Law: values, their units and their limits, as in `p2p_diloco.config`; nothing is read, built or trained here.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator
from typing_extensions import Self

from p2p_diloco.config import Settings


class TrainerConfig(Settings):
    """The model, the text and the inner optimizer of the built-in trainer.

    The peers of one run need the same `layers`, `width`, `heads` and `context`; each peer chooses all other settings.

    Raises:
        ConfigError: a value can't be used; the error names the key, the value and the mend.
    """

    data: Path | None = None
    """File or folder of text to train on; unset: the Python standard library's sources."""
    num_shards: int | None = Field(default=None, ge=1)
    """Number of equal parts to split the training text into; 1: each peer trains on the whole text; unset: each peer
    trains on a third of the text, chosen by its identity."""
    shard_index: int = Field(default=0, ge=0)
    """Which of num_shards parts this peer trains on, from 0."""
    layers: int = Field(default=4, ge=1)
    """Transformer blocks of the model."""
    width: int = Field(default=64, ge=1)
    """Width of the model, a multiple of heads."""
    heads: int = Field(default=4, ge=1)
    """Attention heads of a block."""
    context: int = Field(default=64, ge=1)
    """Bytes of text that the model sees at once."""
    steps: int | None = Field(default=None, ge=1)
    """Inner steps that this peer makes at most; unset: until the run ends."""
    warm_start: int = Field(default=0, ge=0)
    """Inner steps to train alone before joining; useful for the peer that founds a run."""
    batch_size: int = Field(default=8, ge=1)
    """Windows of text (samples) in an inner step."""
    lr: float = Field(default=4e-3, gt=0)
    """Highest learning rate of AdamW."""
    warmup_steps: int = Field(default=20, ge=0)
    """A peer's own first steps, in which its learning rate rises to the run's."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end, as a part of lr."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of AdamW."""
    clip: float = Field(default=1.0, gt=0)
    """Norm that the gradient is clipped to."""
    seed: int = Field(default=0, ge=0)
    """Seed of the model's first weights and of the order of the text."""
    eval_every_epochs: int = Field(default=1, ge=1)
    """Epochs between two evaluations of the global parameters on held-out text."""
    eval_batches: int = Field(default=16, ge=0)
    """Batches of an evaluation; 0: never evaluate."""
    threads: int | None = Field(default=None, ge=1)
    """Threads for torch; unset: its own choice."""
    device: str = "cpu"
    """Device to train on, such as cpu, cuda or mps."""
    pause_s: float = Field(default=0.0, ge=0)
    """Seconds to sleep in each step, to imitate a slow machine."""
    log_path: Path | None = None
    """File that gets a JSON object for each step and each evaluation: time, step, global_step, epoch, loss,
    val_loss."""
    summary_json: bool = False
    """Print the summary as one JSON object on stdout."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.width % self.heads:
            mend = f"choose e.g. width={self.heads * max(1, self.width // self.heads)}"
            self._refuse("width", f"is not a multiple of heads={self.heads}", mend)
        if self.num_shards is None and self.shard_index:
            self._refuse("shard_index", "names a part of a text that isn't split", "give num_shards too")
        if self.num_shards is not None and self.shard_index >= self.num_shards:
            mend = f"choose 0 to {self.num_shards - 1}"
            self._refuse("shard_index", f"must be less than num_shards={self.num_shards}", mend)
        return self
