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
def test_numbers_of_any_library_are_pythons_own() -> None:
    """Also a loss that still has its graph; torch warns of nothing. Samples are whole."""
    graph, narrow = torch.tensor(2.5, requires_grad=True), torch.tensor([2.5], dtype=torch.bfloat16)
    for loss in (2.5, np.float32(2.5), graph, narrow):
        assert (number("loss", loss), type(number("loss", loss))) == (2.5, float)
    for samples in (32, 32.0, np.int64(32), torch.tensor(32), torch.tensor(32.0)):
        assert (samples_of(samples), type(samples_of(samples))) == (32, int)
    assert number("loss", None) is samples_of(None) is None


@pytest.mark.parametrize("loss", [torch.ones(3), torch.tensor(1j), np.ones(2), 1j, "x", [1.0], 10**400])
def test_what_is_no_loss_is_refused_in_one_sentence(loss: Any) -> None:
    with pytest.raises(ConfigError, match=r"held_out_loss=.* is not one number; report e\.g\. loss\.item\(\)"):
        number("held_out_loss", loss)


@pytest.mark.parametrize("samples", [-1, 0.5, float("nan"), float("inf"), 2**70, [3]])
def test_what_can_be_no_samples_is_refused_in_one_sentence(samples: Any) -> None:
    """Without a run, too, so that a mistake is found before the script takes part in one."""
    said = r"samples=.* must be a whole number, 0 or more|samples=\[3\] is not one number; report how many samples"
    for refuse in (samples_of, lambda given: AbsentPeer(None, None).report(samples=given)):
        with pytest.raises(ConfigError, match=said):
            refuse(samples)
