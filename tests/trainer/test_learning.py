"""The example that makes the figures of docs/results.md."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from p2p_diloco.trainer.gpt import GPT, GPTConfig
from p2p_diloco.trainer.train import mean_loss

FILE = Path(__file__).parents[2] / "examples" / "learning.py"


@pytest.fixture(scope="module")
def learning() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learning", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.HELD_OUT = module.HELD_OUT[:1]  # an eighth is enough to tell models apart
    return module


def _asked(**changes: object) -> Namespace:
    return Namespace(
        **{
            "peers": 2,
            "steps": 4,
            "sync_every": 2,
            "warm_start": 1,
            "outer_lr": 0.7,
            "outer_momentum": 0.9,
            "fragments": 1,
            "overlap_steps": 0,
            "merge": "mix",
            "merge_alpha": 0.0,
            "codec": "fp32",
            "reply_codec": "fp32",
            "residual": True,
            **changes,
        }
    )


def test_replicas_reach_the_global_parameters_by_the_outer_step_alone(learning: ModuleType) -> None:
    """With an outer lr of 0 what is judged is the start, however much the replicas have trained."""
    start = GPT(GPTConfig(seed=0))
    learning.load(start, learning.warmed(0, 1))
    assert learning.held_out_loss(_asked(outer_lr=0.0), 0) == mean_loss(start, learning.HELD_OUT)
    assert learning.held_out_loss(_asked(), 0) < mean_loss(start, learning.HELD_OUT)


def test_plain_averaging_of_one_step_is_the_mean_of_the_replicas(learning: ModuleType) -> None:
    """Outer lr 1 and no momentum: the outcome of a round is the mean of the models that entered it."""
    asked = _asked(steps=2, outer_lr=1.0, outer_momentum=0.0)
    models = []
    for index in range(2):
        model = GPT(GPTConfig(seed=0))
        learning.load(model, learning.warmed(0, 1))
        for _ in learning.inner_steps(model, learning.draw(0, f"peer{index}"), 2, 2):
            pass
        models.append(learning.flat(model))
    assert not torch.equal(*models)
    mean = GPT(GPTConfig(seed=0))
    learning.load(mean, torch.stack(models).mean(0))
    assert learning.held_out_loss(asked, 0) == pytest.approx(mean_loss(mean, learning.HELD_OUT), abs=1e-6)


def test_what_a_codec_loses_is_lost_in_the_example_too(learning: ModuleType) -> None:
    """Codecs change the outcome, and the residual does: neither is left out of the figures."""
    losses = [
        learning.held_out_loss(_asked(**changes), 0)
        for changes in ({}, {"codec": "topk"}, {"codec": "topk", "residual": False}, {"reply_codec": "e3m0"})
    ]
    assert len({*losses}) == 4


def test_it_prints_a_row(
    learning: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {3: 2.0, 4: 2.5}
    monkeypatch.setattr(learning, "held_out_loss", lambda asked, seed: losses[seed])
    for arguments, row in (
        ("--peers 3 --steps 10 --seeds 3 4", "| 3 peers, H=20, 0.7/0.9 | 100 | 10 | 2.250 ± 0.354 |"),
        ("--peers 1 --warm-start 0 --seeds 3", "| one peer, alone | 0 | 400 | 2.000 |"),
    ):
        monkeypatch.setattr("sys.argv", ["learning.py", *arguments.split()])
        learning.main()
        assert capsys.readouterr().out == row + "\n"
