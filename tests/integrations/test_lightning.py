"""`DilocoCallback` in Lightning's Trainer, with a peer that a test controls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integrations.fake import GLOBAL, data
from tests.integrations.fake import fake_peer as fake_peer


@pytest.fixture(scope="module", autouse=True)
def lightning() -> None:
    """Only the process that runs these tests loads Lightning."""
    pytest.importorskip("lightning", reason="lightning isn't installed: pip install 'p2p-diloco[lightning]'")
    global Averaging, Module, ModelCheckpoint, fitted
    from tests.integrations.with_lightning import Averaging, ModelCheckpoint, Module, fitted


def test_validation_uses_the_global_parameters_within_a_pause(tmp_path: Path) -> None:
    """Each validation within the run sees the global values; the step after it goes on with the peer's own, to the bit.
    The model then holds the global values. Lightning's trial before training is no pause."""
    every = {"val_check_interval": 4, "check_val_every_n_epoch": None}
    _, model, peer = fitted(tmp_path, 10, **every)
    _, plain, _ = fitted(tmp_path, 10, limit_val_batches=0)
    assert [(step, value) for step, value in model.evaluated if step] == [(4, GLOBAL), (8, GLOBAL), (10, GLOBAL)]
    assert [value for value, _ in model.trained] == [value for value, _ in plain.trained]
    assert peer.happened("pause", "go on", "left") == [*["pause", "go on"] * 3, "left"]
    assert peer.happened("held-out loss") == ["held-out loss"] * 3
    assert model.weight.item() == model.mean.item() == GLOBAL
    assert model.frozen.item() == 3.0


def test_checkpoints_hold_the_global_parameters_and_the_counters(tmp_path: Path) -> None:
    """A checkpoint within the run, and the one at its end. A Trainer that resumes gives the counters to its peer, which
    is in the run already, and has the run's learning rate."""
    kept = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=True)
    fitted(tmp_path, 8, others=(kept,))
    for name in ("step=3", "step=6", "last"):
        state = torch.load(tmp_path / f"{name}.ckpt", weights_only=False)
        assert state["state_dict"]["inner.weight"].item() == GLOBAL
        assert state["state_dict"]["inner.frozen"].item() == 3.0
    _, _, first = fitted(tmp_path, 30)
    _, model, peer = fitted(tmp_path, 30, resume=str(tmp_path / "step=3.ckpt"), peer_start=18)
    assert peer.counters == {"local_step": 3, "bytes_of_the_run": 5.0}
    assert len(model.trained) == 12
    assert peer.rates == pytest.approx({step: first.rates[step] for step in range(18, 30)})


def test_an_average_of_this_peers_own_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would take the place of the run's result."""
    fitted(tmp_path, 2, others=(Averaging(0.1, swa_epoch_start=5),))
    assert "StochasticWeightAveraging puts this peer's own average in place of the run's result" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_two_peers_draw_other_batches_with_one_script(tmp_path: Path, workers: int) -> None:
    """The order of the data follows from the peer's seed, also if workers load the first batches ahead."""
    orders = []
    for seed in (1, 2, 1):
        torch.manual_seed(42)
        orders.append([x for _, x in fitted(tmp_path, 5, peer_seed=seed, workers=workers)[1].trained])
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]


def test_a_late_joiner_follows_the_runs_steps(tmp_path: Path) -> None:
    """One that comes at step 23 of 40 has the learning rates of a peer from the beginning, and ends with the run."""
    _, _, first = fitted(tmp_path, 40)
    trainer, _, late = fitted(tmp_path, 40, peer_start=23)
    assert late.rates == pytest.approx({step: first.rates[step] for step in range(23, 40)})
    assert len(set(late.rates.values())) == 17
    assert trainer.global_step == 17


def test_training_ends_when_the_run_has_finished(tmp_path: Path) -> None:
    """No step is made after the run's end."""
    _, model, peer = fitted(tmp_path, 40, peer_ends_at=7)
    assert len(model.trained) == 7
    assert peer.events[-1] == "left"


def test_samples_and_losses_are_reported(tmp_path: Path) -> None:
    """A step's samples are those of all its batches, a short last batch included."""
    settings = {"accumulate_grad_batches": 2, "batch_size": 16, "log_every_n_steps": 2}
    _, _, peer = fitted(tmp_path, 4, **settings)
    reported = [event for event in peer.events if "samples" in event]
    assert reported == ["32 samples", "8 samples", "32 samples", "8 samples"]
    assert "loss" in peer.events


class Batch:
    """An object of the user's, as graph libraries have."""

    def __init__(self, samples: list[dict[str, Tensor]]) -> None:
        self.x = torch.stack([sample["x"] for sample in samples])

    def __getitem__(self, name: str) -> Tensor:
        assert name == "x"
        return self.x


def test_a_batch_of_unknown_size_is_trained_on(tmp_path: Path) -> None:
    """Its samples are not reported; nor are those of a step that has such a batch among others."""
    _, model, peer = fitted(tmp_path, 4, collate=Batch, accumulate_grad_batches=2)
    assert len(model.trained) == 8
    assert not [event for event in peer.events if "samples" in event]


def test_an_exception_makes_no_last_exchange(tmp_path: Path) -> None:
    """The peer leaves with the exception, and the model keeps this peer's own parameters."""
    module = Module(fails_at=3)
    with pytest.raises(ZeroDivisionError):
        fitted(tmp_path, 10, module=module)
    assert module.peer.events[-1] == "left after ZeroDivisionError"
    assert module.inner.weight.item() not in (GLOBAL, 1.0)


@pytest.mark.parametrize(("workers", "accumulate", "length"), [(0, 1, None), (2, 3, None), (2, 3, 40)])
def test_shared_data_is_used_once_an_epoch_and_ends_training(
    tmp_path: Path, workers: int, accumulate: int, length: int | None
) -> None:
    """Lightning fetches one batch ahead, and makes a step with the last batches. Every sample is in a step, also of a
    stream, which needs a length."""
    dataset = data(40) if length is None else data(40).__iter__
    shared = {"dataset": dataset, "batch_size": 7, "epochs": 2, "length": length}
    _, model, peer = fitted(tmp_path, 1000, shared=shared, workers=workers, accumulate_grad_batches=accumulate)
    seen = sorted(value for _, values in model.trained for value in values)
    assert seen == sorted([each["x"].item() for each in data(40)] * 2)
    assert peer.shards["train"].complete


def test_what_is_fetched_ahead_is_not_used(tmp_path: Path) -> None:
    """If `max_steps` ends training, the batch that was fetched for the next step stays unused."""
    _, _, peer = fitted(tmp_path, 3, shared={"dataset": data(40), "batch_size": 4})
    assert peer.shards["train"].say(1)[0] == ((0, 12),)
