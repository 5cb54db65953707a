"""`DilocoCallback` in Transformers' Trainer, with a peer that a test controls; and Transformers' models on disk."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from p2p_diloco.cli.plan.inputs import size_of
from p2p_diloco.errors import ConfigError
from tests.integrations.fake import GLOBAL, Model, data
from tests.integrations.fake import fake_peer as fake_peer
from tests.tensors.test_export import expected, same, written


@pytest.fixture(scope="module", autouse=True)
def transformers() -> None:
    """Only the process that runs these tests loads Transformers."""
    for library in ("transformers", "accelerate"):
        pytest.importorskip(library, reason=f"{library} isn't installed: pip install 'p2p-diloco[hf]'")
    global Copying, DilocoCallback, EarlyStoppingCallback, SampleCounter, Trainer, TrainingArguments
    global default_data_collator, trained
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, default_data_collator

    from p2p_diloco.integrations.transformers import DilocoCallback, SampleCounter
    from tests.integrations.with_transformers import Copying, trained


def test_evaluation_uses_the_global_parameters_within_a_pause(tmp_path: Path) -> None:
    """Each evaluation, one before the first step included, sees the global values; the step after it goes on with the
    peer's own, to the bit; the last one comes after this peer has left. The model then holds the global values."""
    _, model, peer = trained(tmp_path, 12, eval_strategy="steps", eval_steps=4, eval_on_start=True)
    _, plain, _ = trained(tmp_path, 12)
    assert {value for _, value in model.evaluated} == {GLOBAL}
    assert sorted({step for step, _ in model.evaluated}) == [0, 4, 8, 12]
    assert [value for value, _ in model.trained] == [value for value, _ in plain.trained]
    assert peer.happened("pause", "go on", "left") == [*["pause", "go on"] * 3, "left"]
    assert model.weight.item() == GLOBAL
    assert model.frozen.item() == 3.0
    assert model.mean.item() == model.weight.item()


def test_checkpoints_hold_the_global_parameters_and_the_counters(tmp_path: Path) -> None:
    """A checkpoint within the run, and the one at its end. A Trainer that resumes gives the counters to its peer, which
    is in the run already."""
    trained(tmp_path, 6, save_strategy="steps", save_steps=3)
    for step in (3, 6):
        folder = tmp_path / f"checkpoint-{step}"
        assert load_file(folder / "model.safetensors")["weight"].item() == GLOBAL
        kept = json.loads((folder / "trainer_state.json").read_text())["stateful_callbacks"]["p2p_diloco"]
        assert kept == {"local_step": step, "bytes_of_the_run": 5.0}
    trainer, model, peer = trained(tmp_path, 12, resume=str(tmp_path / "checkpoint-3"), peer_start=8)
    assert peer.counters == {"local_step": 3, "bytes_of_the_run": 5.0}
    assert peer.global_step == 12
    assert len(model.trained) == 4
    assert trainer.state.global_step == 7


def test_two_peers_draw_other_batches_with_one_script(tmp_path: Path) -> None:
    """The order of the data follows from the peer's seed, also with a `data_seed`, and in each epoch of the data. So do
    random numbers, which a collator or dropout draws: Trainer sets the same seed in every process."""
    orders, drawn = list[list[list[float]]](), list[list[float]]()

    def collate(rows: Any) -> Any:
        drawn[-1].append(torch.rand(1).item())
        return default_data_collator(rows)

    for seed in (1, 2, 1):
        drawn.append([])
        _, model, _ = trained(tmp_path, 15, peer_seed=seed, data_seed=3, collator=collate)
        orders.append([x for _, x in model.trained])
    for found in (orders, drawn):
        assert found[0] == found[2] != found[1]
    assert orders[0][:10] != orders[0][10:] + orders[0][:5]
    epoch = [value for batch in orders[0][:10] for value in batch]
    assert sorted(epoch) == [each["x"].item() for each in data(40)]


def test_a_late_joiner_follows_the_runs_steps(tmp_path: Path) -> None:
    """One that comes at step 23 of 40 has the learning rates of a peer from the beginning, evaluates at the run's
    steps, and ends with the run. Trainer counts its own steps: it divides losses and names checkpoints by them. So it
    is if a round goes on without a peer, and the run's step jumps."""
    settings = {"eval_strategy": "steps", "eval_steps": 10, "lr_scheduler_type": "cosine", "warmup_steps": 5}
    _, _, first = trained(tmp_path, 40, **settings)
    trainer, model, late = trained(tmp_path, 40, peer_start=23, **settings)
    assert late.rates == {step: first.rates[step] for step in range(23, 40)}
    assert len(set(late.rates.values())) == 17
    assert sorted({23 + step for step, _ in model.evaluated}) == [30, 40]
    assert trainer.state.global_step == 17
    logged = [(each["step"], each["run_step"], each["run_epoch"]) for each in trainer.state.log_history]
    assert logged[0] == (5, 28, 2)
    _, model, ahead = trained(tmp_path, 40, peer_jump=(5, 12), **settings)
    assert ahead.rates == {step: first.rates[step] for step in (0, 1, 2, 3, 4, *range(17, 40))}
    assert sorted({step for step, _ in model.evaluated}) == [5, 8, 18, 28]  # the run's steps 17, 20, 30 and 40


def test_training_ends_when_the_run_has_finished(tmp_path: Path) -> None:
    """No step is made after the run's end."""
    _, model, peer = trained(tmp_path, 40, peer_ends_at=7)
    assert len(model.trained) == 7
    assert peer.events[-1] == "left"


def test_the_best_checkpoint_is_loaded_after_leaving(tmp_path: Path) -> None:
    """`load_best_model_at_end` and an early stop change the model only when this peer is out of the run."""
    kept = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    stop = EarlyStoppingCallback(early_stopping_patience=1)
    _, model, peer = trained(tmp_path, 40, others=(stop,), load_best_model_at_end=True, **kept)
    assert len(model.trained) == 4  # the loss of the global parameters never changes
    assert peer.happened("pause", "go on", "left") == ["pause", "go on", "pause", "go on", "left"]
    assert peer.left_with["weight"] not in (1.0, GLOBAL)


def test_samples_and_losses_are_reported(tmp_path: Path) -> None:
    """A step's samples are those of all its passes, a short last batch included; evaluations don't count."""
    settings = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16, "logging_steps": 2}
    _, _, peer = trained(tmp_path, 4, eval_strategy="steps", eval_steps=1, **settings)
    reported = [event for event in peer.events if "samples" in event]
    assert reported == ["32 samples", "8 samples", "32 samples", "8 samples"]
    assert peer.happened("loss") == ["loss"]  # the second one comes after leaving
    assert peer.happened("held-out loss") == ["held-out loss"] * 3


def test_a_model_in_a_run_can_be_copied_and_saved_whole(tmp_path: Path) -> None:
    """What counts the samples holds nothing of the peer; a copy of the model doesn't count for it; and nothing stays on
    the model."""
    _, model, peer = trained(tmp_path, 3, others=(Copying(),))
    assert [event for event in peer.events if "samples" in event] == ["4 samples"] * 3
    assert not model._forward_pre_hooks
    copy.deepcopy(model)


def test_a_pass_without_tensors_has_unknown_samples() -> None:
    """Then none are reported, because 0 would be a number."""
    counter, model = SampleCounter(), torch.nn.Module().train()
    counter(model, (), {"graph": object(), "scale": torch.tensor(2.0)})
    counter(model, (torch.zeros(3, 2),), {})
    assert counter.taken() is None
    counter(model, (torch.zeros(3, 2),), {})
    assert counter.taken() == 3


def test_an_evaluation_without_training_works(tmp_path: Path) -> None:
    """Before training the callback does nothing."""
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    model = Model()
    assert "eval_loss" in Trainer(model, args, eval_dataset=data(8), callbacks=[DilocoCallback()]).evaluate()
    assert {value for _, value in model.evaluated} == {1.0}


@pytest.mark.parametrize("library", ["transformers", "accelerate", "lightning"])
def test_a_missing_library_is_named_with_its_extra(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence says what is missing and how to install it."""
    extra = "lightning" if library == "lightning" else "hf"
    module = f"p2p_diloco.integrations.{'lightning' if library == 'lightning' else 'transformers'}"
    monkeypatch.setitem(sys.modules, library, None)
    for loaded in (module, "accelerate.data_loader", "lightning.pytorch"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    install = rf"which isn't installed; install it with: pip install 'p2p-diloco\[{extra}\]'$"
    with pytest.raises(ImportError, match=f"^{module} needs {library}.*{install}"):
        importlib.import_module(module)


@pytest.mark.parametrize("length", [None, 40])
def test_shared_data_is_used_once_an_epoch_and_ends_training(tmp_path: Path, length: int | None) -> None:
    """Every sample is in a step of each epoch, and training ends with the data, also with that of a stream."""
    data_set = {"epochs": 2, "length": length}
    _, model, _ = trained(tmp_path, 1000, shared=data_set, save_strategy="steps", save_steps=4)
    seen = sorted(value for _, values in model.trained for value in values)
    assert seen == sorted([each["x"].item() for each in data(40)] * 2)
    _, resumed, _ = trained(tmp_path, 6, shared={}, resume=str(tmp_path / "checkpoint-4"))
    assert resumed.trained


def test_gradients_over_several_batches_need_endless_shared_data(tmp_path: Path) -> None:
    """Trainer makes no step with the last batches of data without a length, so they would be lost."""
    assert len(trained(tmp_path, 3, shared={}, gradient_accumulation_steps=2)[1].trained) == 6
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=2 must be 1"):
        trained(tmp_path, 3, shared={"epochs": 1}, gradient_accumulation_steps=2)


# -- models on disk


def gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def resnet() -> Any:
    import transformers

    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    return transformers.ResNetForImageClassification(config)


@pytest.mark.parametrize(
    ("build", "dtype", "part_bytes"), [(gpt2, "keep", 1000), (gpt2, "bfloat16", 10**9), (resnet, "keep", 10**9)]
)
def test_from_pretrained_restores_the_state_dict(build: Any, dtype: str, part_bytes: int, tmp_path: Path) -> None:
    """Every entry of it, in the dtype that was asked for: tied or not, with buffers, in one file or several."""
    model = build()
    written(tmp_path, "hf", dtype, model=model, part_bytes=part_bytes)
    loaded, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wanted = expected(model if dtype == "keep" else model.to(torch.bfloat16))
    assert same(loaded.state_dict(), wanted)


def test_a_config_of_transformers_tells_its_size(tmp_path: Path) -> None:
    """GPT-2's has 124 million parameters, its tied ones counted once."""
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100, "n_positions": 32}))
    embedding, block, last = 64 * (100 + 32), 12 * 64 * 64 + 13 * 64, 2 * 64
    assert size_of(tmp_path) == size_of(tmp_path / "config.json") == embedding + 2 * block + last
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    with pytest.raises(ConfigError, match="give the number of trained parameters with --params"):
        size_of(tmp_path)
