"""What a lying aggregator does to a run of the built-in trainer: a short form of `examples/lying_aggregator.py`."""

from __future__ import annotations

import importlib.util
import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from p2p_diloco.config import RunConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "lying_aggregator.py"
SHORT = Namespace(honest_rounds=3, lies=4, sync_every=4, warm_start=30)
DEFAULT = RunConfig().step_limit


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE.parent))
        spec = importlib.util.spec_from_file_location("lying_aggregator", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "lying_aggregator", module)
        spec.loader.exec_module(module)
        module.HELD_OUT = module.HELD_OUT[:2]
        yield module


@pytest.mark.slow
def test_the_limit_saves_a_model_from_a_quarter_of_wrong_commits(example: ModuleType) -> None:
    """Means a thousand times as long ruin the model without a limit; with it the loss is that of an honest run."""
    honest, wrong = example.LIES["nothing wrong"], example.LIES["× 1000"]
    without, _ = example.run("sync", honest, 0.0, 0, SHORT)
    ruined, _ = example.run("sync", wrong, 0.0, 0, SHORT)
    saved, cut = example.run("sync", wrong, DEFAULT, 0, SHORT)
    assert not ruined < 2 * without
    assert saved < 1.05 * without
    assert cut >= SHORT.lies / 4 / (SHORT.honest_rounds + SHORT.lies)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sync", "overlap", "async, DN", "async, DN, DyLU"])
def test_honest_runs_of_every_mode_learn_as_well_with_the_limit(example: ModuleType, way: str) -> None:
    """Also while the inner learning rate still rises, and means become longer from round to round."""
    honest = example.LIES["nothing wrong"]
    (without, _), (limited, _) = (example.run(way, honest, limit, 0, SHORT) for limit in (0.0, DEFAULT))
    assert limited < 1.03 * without


def test_it_prints_a_row_for_each_lie(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {
        ("nothing wrong", 0.0): [(2.0, 0.0), (2.2, 0.0)],
        ("nothing wrong", 1.5): [(2.0, 0.01), (2.0, 0.0)],
        ("× 1000", 0.0): [(math.inf, 0.0), (2.0, 0.0)],
        ("× 1000", 1.5): [(120.0, 0.2), (140.0, 0.4)],
    }
    names = {lie: name for name, lie in example.LIES.items()}
    monkeypatch.setattr(example, "run", lambda way, lie, limit, seed, asked: made[names[lie], limit].pop(0))
    asked = ["--commits", "nothing wrong", "× 1000", "--limits", "0", "1.5", "--seeds", "3", "4"]
    monkeypatch.setattr("sys.argv", ["lying_aggregator.py", *asked])
    example.main()
    assert capsys.readouterr().out.splitlines() == [
        "| | `step_limit=0` | `step_limit=1.5` |",
        "|---|---|---|",
        "| nothing wrong | 2.100 ± 0.141 | 2.000 ± 0.000; 0.50% cut |",
        "| × 1000 | diverged | 1.3e+02; 30.00% cut |",
    ]
