"""Learning rates, by numbers; and settings that don't fit."""

from __future__ import annotations

import pytest

from p2p_diloco.config import RunConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.trainer.config import TrainerConfig
from p2p_diloco.trainer.train import run_horizon, share_of_rate


def _rate(step: int, horizon: int | None = 110, warmup_steps: int = 10, min_ratio: float = 0.1) -> float:
    return 2.0 * share_of_rate(TrainerConfig(warmup_steps=warmup_steps, min_lr_ratio=min_ratio), step, step, horizon)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.2), (4, 1.0), (9, 2.0), (10, 2.0), (35, 1.7363961), (60, 1.1), (110, 0.2), (5000, 0.2)]
)
def test_a_line_up_and_half_a_cosine_down(step: int, rate: float) -> None:
    assert _rate(step) == pytest.approx(rate)


def test_a_horizon_within_the_warm_up_divides_nothing_by_zero() -> None:
    assert _rate(10, horizon=10) == 2.0
    assert _rate(11, horizon=5) == pytest.approx(0.2)


def test_the_schedule_ends_with_the_run_where_its_end_is_known() -> None:
    run = RunConfig(stop_after_epochs=30, sync_every=20)
    assert run_horizon(run, 50) == 600
    assert run_horizon(run, 50, 3) == 200
    assert run_horizon(RunConfig(), 50) == 50
    assert run_horizon(RunConfig(), None) is None


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"width": 30, "heads": 4}, "width=30 is not a multiple of heads=4; choose e.g. width=28"),
        ({"width": 3, "heads": 4}, "width=3 is not a multiple of heads=4; choose e.g. width=4"),
        ({"shard_index": 2, "num_shards": 2}, "shard_index=2 must be less than num_shards=2; choose 0 to 1"),
        ({"shard_index": 1}, "shard_index=1 names a part of a text that isn't split; give num_shards too"),
        ({"batchsize": 4}, "batchsize=4 is not a setting; did you mean batch_size?"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainerConfig.model_validate(values)
    assert str(refused.value) == sentence
