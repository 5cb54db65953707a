"""The experiments of docs/results.md: their runs in virtual time, their tables, and that every file still runs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "experiments"
PARTS = ("setting", "task", "member", "virtual", "processes", "lab")
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in (*PARTS, "all"))


@pytest.fixture(scope="module")
def lab() -> Iterator[SimpleNamespace]:
    """The parts that all experiments share, and a task of milliseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        parts = {name: import_module(name) for name in PARTS}
        tiny = parts["task"].Task(steps=8, warm=2, layers=1, width=8, context=8, windows=64, few=64)
        yield SimpleNamespace(tiny=tiny, **parts)
        for name in (*PARTS, *NAMES):
            sys.modules.pop(name, None)


def run(lab: SimpleNamespace, length: int = 8, seed: int = 0, **setting: Any) -> Any:
    """A run of `length` inner steps of each peer, H = 4."""
    setting["run"] = {"sync_every": 4, **setting.get("run", {})}
    return lab.virtual.simulated(lab.setting.Setting(**setting), seed, replace(lab.tiny, steps=length))


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_of_an_experiment_is_valid(lab: SimpleNamespace, name: str) -> None:
    experiment = import_module(name).EXPERIMENT
    assert experiment.name == name
    assert name in import_module("all").NAMES
    bases = {experiment.base_of(each) for each in experiment.settings}
    assert {*bases, *experiment.bounds, *experiment.least} <= experiment.settings.keys()
    assert all(setting.config for setting in experiment.settings.values())


QUICK = ("joining", "parity", "streaming")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.chaos]) for name in NAMES]
)
def test_an_experiment_runs(
    lab: SimpleNamespace, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first and the last of its settings make a run, and it leaves JSON and a plot."""
    experiment = replace(import_module(name).EXPERIMENT, task=lab.tiny, make=lab.virtual.simulated)
    last = list(experiment.settings)[-1]
    chosen = [experiment.base_of(last), last]
    lab.lab.main(experiment, ["--folder", str(tmp_path), "--seeds", "1", "--settings", *chosen])
    losses = json.loads((tmp_path / f"{name}.json").read_text())["losses"]
    assert [*losses] == chosen
    assert all(found["0"] > 0 for found in losses.values())
    assert all(f"| {setting} |" in capsys.readouterr().out for setting in chosen[:1])
    pytest.importorskip("matplotlib")
    assert (tmp_path / f"{name}.png").stat().st_size


def test_a_run_depends_on_its_arguments_alone(lab: SimpleNamespace) -> None:
    drawn = {"peers": 3, "drop": 0.3, "kill_every_s": 10.0}
    assert run(lab, length=8, **drawn) == run(lab, length=8, **drawn) != run(lab, length=8, seed=1, **drawn)


@pytest.mark.parametrize("name", ["real", "unlike_real"])
def test_every_setting_of_real_peers_is_valid(lab: SimpleNamespace, name: str) -> None:
    """Real peers wait longer than peers in virtual time; the asynchronous mode refuses one of these waits."""
    for setting in import_module(name).EXPERIMENT.settings.values():
        config = lab.processes.configured(setting, 100)
        assert config.stop_after_samples == 100
        assert config.heartbeat_timeout > setting.config.heartbeat_timeout


@pytest.mark.real
@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_run_in_virtual_time_is_that_of_real_peers(lab: SimpleNamespace) -> None:
    """To the last bit: nothing of the method is imitated in virtual time."""
    setting, task = lab.setting.Setting({"sync_every": 4}, step_s=(0.0,)), replace(lab.tiny, steps=16)
    assert lab.processes.real(setting, 0, task).loss == lab.virtual.simulated(setting, 0, task).loss


def test_a_series_makes_missing_runs_alone(lab: SimpleNamespace, tmp_path: Path) -> None:
    """Runs are known by their settings: a renamed row is not made again, a changed one is."""
    made: list[float] = []

    def make(setting: Any, seed: int, task: Any) -> Any:
        made.append(setting.run["outer_lr"])
        return lab.setting.Result(2.0 if setting.run["outer_lr"] else math.inf, 1.0, 0, ())

    rows = {"one": lab.setting.Setting({"outer_lr": 1.0}), "none": lab.setting.Setting({"outer_lr": 0.0})}
    experiment = lab.lab.Experiment("x", "X", rows, against="one", bounds={"none": 1.5}, make=make, task=lab.tiny)
    asked = ["--folder", str(tmp_path), "--seeds", "2"]
    lab.lab.main(experiment, asked)
    again = {"renamed": rows["one"], "none": rows["none"], "two": lab.setting.Setting({"outer_lr": 2.0})}
    lab.lab.main(replace(experiment, settings=again, against="renamed"), asked)
    assert made == [1.0, 0.0, 1.0, 0.0, 2.0, 2.0]
    assert json.loads((tmp_path / "x.json").read_text())["table"] == [
        "| setting | seed 0 | seed 1 | median | against renamed | bound |",
        "|---|---|---|---|---|---|",
        "| renamed | 2.0000 | 2.0000 | 2.0000 |  |  |",
        "| none | diverged | diverged | diverged | diverged | ≤ +50 %, **missed** |",
        "| two | 2.0000 | 2.0000 | 2.0000 | +0.00 % (+0.00 to +0.00) |  |",
    ]
