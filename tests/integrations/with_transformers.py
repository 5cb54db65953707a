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


def trained(
    folder: Path,
    steps: int,
    *,
    resume: str | None = None,
    others: tuple[Any, ...] = (),
    collator: Any = None,
    **settings: Any,
) -> tuple[Trainer, Model, FakePeer]:
    """A Trainer after `steps` of the run; settings that begin with `peer_` are the fake peer's."""
    peer = {key.removeprefix("peer_"): settings.pop(key) for key in list(settings) if key.startswith("peer_")}
    plain = {"per_device_train_batch_size": 4, "learning_rate": 0.1, "logging_steps": 5, "report_to": "none"}
    plain |= {"save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "eval_on_start": False}
    args = TrainingArguments(str(folder), max_steps=steps, **{**plain, **settings})
    model, callback = Model(), DilocoCallback(**{"start": 0, **peer})
    batches = {"train_dataset": data(40), "eval_dataset": data(8), "data_collator": collator}
    trainer = Trainer(model, args, callbacks=[callback, *others], **batches)
    trainer.train(resume_from_checkpoint=resume)
    assert isinstance(callback.peer, FakePeer)
    return trainer, model, callback.peer


class Copying(TrainerCallback):  # type: ignore[misc]  # its types are not read
    """Copies and saves the whole model after each step, and trains the copy, as keepers of an average or of the best
    model do."""

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        copy.deepcopy(model)(torch.ones(5, 1), torch.ones(1))
        torch.save(model, io.BytesIO())


class Sharing(Trainer):
    """A Trainer whose data is shared by all peers."""

    loader: Any

    def get_train_dataloader(self) -> Any:
        return self.loader


def shared(
    folder: Path,
    steps: int,
    *,
    resume: str | None = None,
    epochs: int | None = None,
    length: int | None = None,
    **settings: Any,
) -> Model:
    """What a Trainer has trained with a shared data set, in batches of 7. With a length the data is a stream."""
    plain = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(folder), max_steps=steps, **{**plain, **settings})
    model, callback = Model(), DilocoCallback(start=0)
    trainer = Sharing(model, args, callbacks=[callback])
    dataset = data(40) if length is None else data(40).__iter__
    trainer.loader = callback.loader(dataset, 7, epochs=epochs, length=length, collate_fn=default_data_collator)
    trainer.train(resume_from_checkpoint=resume)
    return model
