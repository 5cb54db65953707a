"""The example that users copy runs as it stands."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer

import p2p_diloco
from p2p_diloco.config import RunConfig
from tests.trainer.alone import Alone

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal.py"


def test_the_example_trains_alone_when_no_run_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It learns, judges the global parameters, and prints the result on stdout."""

    class Nobody:
        @staticmethod
        def from_env(model: torch.nn.Module, optimizer: Optimizer) -> Alone:
            return Alone(model, optimizer, RunConfig())

    monkeypatch.setitem(vars(p2p_diloco), "Peer", Nobody)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    output = capsys.readouterr()
    assert output.out.startswith("loss of the global parameters: ")
    assert float(output.out.split()[-1]) < 0.02  # the landscape's own variance is about 0.3
    assert "step 501  epoch 1" in output.err
