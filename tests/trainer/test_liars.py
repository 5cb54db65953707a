"""What a lying peer does to a run of the built-in trainer: a short form of `examples/liars.py`."""

from __future__ import annotations

import importlib.util
import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "liars.py"
SHORT = Namespace(rounds=3, sync_every=8, warm_start=30)


@pytest.fixture(scope="module")
def liars() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE.parent))
        spec = importlib.util.spec_from_file_location("liars", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "liars", module)
        spec.loader.exec_module(module)
        module.HELD_OUT = module.HELD_OUT[:2]
        yield module


@pytest.fixture(scope="module")
def without(liars: ModuleType) -> float:
    """The loss of the honest peers without a fourth one."""
    return float(liars.held_out_loss(liars.GROUPS[liars.NONE], "mean", 0, SHORT))


@pytest.mark.slow
def test_a_liar_does_harm_that_limits_prevent(liars: ModuleType, without: float) -> None:
    """Its own pseudo-gradient with the wrong sign, ten times as long, ruins a plain mean; with limits the model learns
    nearly as without the liar."""
    lie = liars.GROUPS["its own, sign flipped, × 10"]
    losses = {method: liars.held_out_loss(lie, method, 0, SHORT) for method in liars.METHODS}
    assert not losses["mean"] < 2 * without
    assert losses["clip"] < 1.12 * without
    assert losses["centered_clip"] < 1.05 * without


@pytest.mark.slow
def test_limits_cost_honest_peers_nothing(liars: ModuleType) -> None:
    honest = liars.GROUPS["an honest contribution"]
    losses = [liars.held_out_loss(honest, method, 0, SHORT) for method in liars.METHODS]
    assert max(losses) < 1.01 * min(losses)


def test_it_prints_a_table_of_the_runs_that_it_made(
    liars: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run is made once; losses stand beside those without a fourth peer, with the same method or the mean."""
    losses = {
        (liars.NONE, "mean"): [2.0, 2.2],
        (liars.NONE, "clip"): [2.0, 2.0],
        ("zeros", "mean"): [4.2, 4.2],
        ("zeros", "clip"): [math.inf, 2.0],
    }
    names = {id(group): name for name, group in liars.GROUPS.items()}
    left = {key: list(values) for key, values in losses.items()}
    monkeypatch.setattr(
        liars, "held_out_loss", lambda group, method, seed, asked: left[names[id(group)], method].pop(0)
    )
    asked = ["--sent", liars.NONE, "zeros", "--methods", "mean", "clip", "--results", str(tmp_path / "runs.jsonl")]
    monkeypatch.setattr("sys.argv", ["liars.py", *asked, "--seeds", "3", "4"])
    for _ in range(2):  # the second time from the file
        liars.main()
        assert capsys.readouterr().out.splitlines() == [
            "| the fourth peer sends | `mean` | `clip` |",
            "|---|---|---|",
            f"| {liars.NONE} | 2.100 ± 0.141 | 2.000 ± 0.000, -4.8% |",
            "| zeros | 4.200 ± 0.000, +100.0% | diverged |",
        ]
