"""The series of examples/parity.py: what is there is not made again, what isn't whole doesn't count, and the table
compares seed with seed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "parity.py"


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parity", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def asked(tmp_path: Path) -> argparse.Namespace:
    sizes = {"seeds": 2, "steps": 40, "warm_start": 4, "batch_size": 2}
    return argparse.Namespace(folder=tmp_path, settings=["bf16", "e3m0"], against="bf16", json=False, **sizes)


def losses_by(parity: ModuleType, monkeypatch: pytest.MonkeyPatch, losses: dict[tuple[str, int], float]) -> list[Any]:
    """Have runs end with these losses, and fail where there is none; which were made."""
    made = []

    def measured(asked: argparse.Namespace, setting: str, seed: int) -> dict[str, Any]:
        made.append((setting, seed))
        if (setting, seed) not in losses:
            raise RuntimeError("a peer ended with status 1")
        return {**parity.identity(asked, setting, seed), "val_loss": losses[setting, seed]}

    monkeypatch.setattr(parity, "measured", measured)
    return made


def test_an_interrupted_series_goes_on_where_it_was(
    parity: ModuleType, asked: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that failed, and one whose line was torn, are made again; none else is."""
    losses = {("bf16", 0): 2.0, ("bf16", 1): 1.0, ("e3m0", 1): 1.1}
    made = losses_by(parity, monkeypatch, losses)
    assert parity.series(asked) == 1
    results = asked.folder / "results.jsonl"
    results.write_text(results.read_text(encoding="utf-8")[:-4], encoding="utf-8")
    made.clear()
    losses["e3m0", 0] = 2.1
    assert parity.series(asked) == 0
    assert made == [("e3m0", 0), ("e3m0", 1)]
    assert {seed: run["val_loss"] for seed, run in parity.found(asked, "e3m0").items()} == {0: 2.1, 1: 1.1}


def test_runs_of_another_length_are_other_runs(
    parity: ModuleType, asked: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses_by(parity, monkeypatch, {(name, seed): 1.0 for name in asked.settings for seed in (0, 1)})
    parity.series(asked)
    assert len(parity.found(asked, "bf16")) == 2
    assert not parity.found(argparse.Namespace(**{**vars(asked), "steps": 80}), "bf16")


def test_the_table_compares_runs_of_the_same_seed(
    parity: ModuleType, asked: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean of the seeds' quotients, which says that a bound is missed though means of losses would not."""
    losses_by(parity, monkeypatch, {("bf16", 0): 2.0, ("bf16", 1): 1.0, ("e3m0", 0): 2.0, ("e3m0", 1): 1.024})
    parity.series(asked)
    rows = list(parity.table(asked))
    assert rows[2] == "| bf16 | 2.0000 | 1.0000 | 1.500 ± 0.707 |  |  |"
    assert rows[3] == "| e3m0 | 2.0000 | 1.0240 | 1.512 ± 0.690 | +1.20 ± 1.70 % | +1.0 %, **missed** |"
    assert len({row.count("|") for row in rows}) == 1


def test_a_peer_that_ends_early_fails_its_run(parity: ModuleType) -> None:
    """The run fails at once, without waiting for that peer's result."""
    command = [sys.executable, "-c", f"print({json.dumps(json.dumps({'addresses': []}))}); raise SystemExit(3)"]
    with parity.subprocess.Popen(command, stdout=parity.subprocess.PIPE, text=True) as process:
        lines = parity.said(process)
        assert next(lines) == {"addresses": []}
        with pytest.raises(RuntimeError, match="status 3"):
            next(lines)


def test_every_setting_is_one_that_runs_have(parity: ModuleType) -> None:
    """No two settings are the same, and each wanted bound is of a setting against another one."""
    common = {"sync_every": parity.SYNC_EVERY, **parity.PATIENT}
    configs = [parity.RunConfig(**{**common, **own}).to_wire() for own in parity.SETTINGS.values()]
    assert len({json.dumps(config) for config in configs}) == len(parity.SETTINGS)
    for against, bounds in parity.WANTED.items():
        assert bounds.keys() < parity.SETTINGS.keys() - {against}
