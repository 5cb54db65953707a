"""What a script reports: numbers of any library, or one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from p2p_diloco.errors import ConfigError
from p2p_diloco.peer.absent import AbsentPeer
from p2p_diloco.peer.reported import number, samples_of


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "loss", [2.5, np.float32(2.5), torch.tensor(2.5, requires_grad=True), torch.tensor([2.5], dtype=torch.bfloat16)]
)
def test_a_loss_of_any_library_is_a_number(loss: Any) -> None:
    """Also one that still has its graph; torch warns of nothing."""
    assert number("loss", loss) == 2.5
    assert type(number("loss", loss)) is float
    assert number("loss", None) is None


@pytest.mark.parametrize("loss", [torch.ones(3), torch.tensor(1j), np.ones(2), 1j, "x", [1.0], 10**400])
def test_what_is_no_loss_is_refused_in_one_sentence(loss: Any) -> None:
    with pytest.raises(ConfigError, match=r"held_out_loss=.* is not one number; report e\.g\. loss\.item\(\)"):
        number("held_out_loss", loss)


@pytest.mark.parametrize("samples", [32, 32.0, np.int64(32), torch.tensor(32), torch.tensor(32.0)])
def test_samples_of_any_library_are_a_whole_number(samples: Any) -> None:
    assert samples_of(samples) == 32
    assert type(samples_of(samples)) is int
    assert samples_of(None) is None


@pytest.mark.parametrize("samples", [-1, 0.5, float("nan"), float("inf"), 2**70])
def test_what_can_be_no_samples_is_refused_in_one_sentence(samples: Any) -> None:
    with pytest.raises(ConfigError, match=r"samples=.* must be a whole number, 0 or more"):
        samples_of(samples)
    with pytest.raises(ConfigError, match=r"samples=\[3\] is not one number; report how many samples"):
        samples_of([3])


def test_without_a_run_the_same_is_refused() -> None:
    """So a mistake is found before the script takes part in a run."""
    peer = AbsentPeer(None, None)
    with pytest.raises(ConfigError, match=r"samples=0\.5"):
        peer.report(samples=0.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not one number"):
        peer.report(loss=torch.ones(2))  # type: ignore[arg-type]
