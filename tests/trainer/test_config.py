"""The trainer's settings."""

from __future__ import annotations

import pytest

from p2p_diloco.errors import ConfigError
from p2p_diloco.trainer.config import TrainerConfig


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
