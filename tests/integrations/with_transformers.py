"""Training with Transformers' Trainer and a peer that a test controls. This loads Transformers, which takes seconds."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from p2p_diloco.integrations.transformers import DilocoCallback
from tests.integrations.fake import FakePeer, Model, data


class Sharing(Trainer):
    """A Trainer whose data may be shared by all peers."""

    loader: Any = None

    def get_train_dataloader(self) -> Any:
        return self.loader or super().get_train_dataloader()


def trained(
    folder: Path,
    steps: int,
    *,
    resume: str | None = None,
    others: tuple[Any, ...] = (),
    collator: Any = None,
    shared: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Trainer, Model, FakePeer]:
    """A Trainer after `steps` of the run; settings that begin with `peer_` are the fake peer's. `shared`: how the data
    is loaded, in batches of 7, that all peers share. With a length it is a stream."""
    peer = {key.removeprefix("peer_"): settings.pop(key) for key in list(settings) if key.startswith("peer_")}
    plain = {"per_device_train_batch_size": 4, "learning_rate": 0.1, "logging_steps": 5, "report_to": "none"}
    plain |= {"save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "eval_on_start": False}
    args = TrainingArguments(str(folder), max_steps=steps, **{**plain, **settings})
    model, callback = Model(), DilocoCallback(**{"start": 0, **peer})
    batches = {"train_dataset": data(40), "eval_dataset": data(8), "data_collator": collator}
    trainer = Sharing(model, args, callbacks=[callback, *others], **batches)
    if shared is not None:
        dataset = data(40).__iter__ if shared.get("length") else data(40)
        trainer.loader = callback.loader(dataset, 7, collate_fn=default_data_collator, **shared)
    trainer.train(resume_from_checkpoint=resume)
    assert isinstance(callback.peer, FakePeer)
    return trainer, model, callback.peer


class Copying(TrainerCallback):  # type: ignore[misc]  # its types are not read
    """Copies and saves the whole model after each step, and trains the copy, as keepers of an average or of the best
    model do."""

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        copy.deepcopy(model)(torch.ones(5, 1), torch.ones(1))
        torch.save(model, io.BytesIO())
