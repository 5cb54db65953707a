"""The example that measures what a newcomer costs: who contributes what, and what is called a rise."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "join_shock.py"


@pytest.fixture(scope="module")
def shock() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE.parent))
        spec = importlib.util.spec_from_file_location("join_shock", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "join_shock", module)  # where its dataclasses look for their annotations
        spec.loader.exec_module(module)
        module.HELD_OUT, module.WARM_START = module.HELD_OUT[:1], 1
        yield module


def _losses(shock: ModuleType, options: Iterable[str], **changes: Any) -> dict[str, list[float]]:
    """Two peers, H = 2; a third comes after a round."""
    shock.SETUPS["tiny"] = shock.Setup(
        **{"sync_every": 2, "epochs": 9, "peers": 2, "until": 3, "joins": {1: 1}, **changes}
    )
    return {row["option"]: row["losses"] for row in shock.runs(("tiny", option, 0) for option in options)}


def test_each_option_changes_what_it_says(shock: ModuleType) -> None:
    """Who weighs nothing at first leaves the first round as it was, and has a say in the second; all others have one at
    once, each another.
    """
    found = _losses(shock, ["nobody joins", "plain", "no weight at first", "lr over 20 steps", "donor's AdamW"])
    nobody, spared = found["nobody joins"], found["no weight at first"]
    assert all(losses[:2] == nobody[:2] for losses in found.values())
    assert spared[2] == nobody[2]
    assert spared[3] != nobody[3]
    assert len({losses[2] for losses in found.values()}) == 4


def test_a_peer_that_left_no_longer_contributes(shock: ModuleType) -> None:
    """The oldest leave: at a join where there are too many, or in a round that says so; and one may work alone."""
    ways = ({}, {"at_most": 2}, {"leaves": {2: 1}}, {"alone": {1: 0}}, {"alone": {1: -1}}, {"first_steps": 1})
    assert len({tuple(_losses(shock, ["plain"], **way)["plain"]) for way in ways}) == len(ways)


def test_a_rise_is_the_highest_loss_after_a_join_beside_the_last_before_it(shock: ModuleType) -> None:
    """Of several joins the worst, each until the next."""
    setup = shock.Setup(20, 60, 3, 6, joins={1: 1, 3: 1})
    cost = shock.cost(setup, [3.0, 2.0, 2.1, 1.0, 1.05, 1.2, 0.9])
    assert cost.rise == pytest.approx(0.2)  # of 1.0 to 1.2; from 2.0 to 2.1 it is less
    assert cost.back == 3
    assert cost.end == 0.9
    assert shock.cost(setup, [3.0, 2.0, 2.1, 1.0, 1.05, 1.2, 1.1]).back == float("inf")


def test_what_is_there_is_not_made_again(
    shock: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[str, str, int]] = []

    def runs(wanted: Iterable[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
        for name, option, seed in wanted:
            made.append((name, option, seed))
            yield {
                "setup": name,
                "option": option,
                "seed": seed,
                "losses": [2.0] * 19 + [2.1 + seed / 10] + [1.5 + seed] * 7,
            }

    monkeypatch.setattr(shock, "runs", runs)
    for seeds in (["0"], ["0", "1"]):
        arguments = ["--folder", str(tmp_path), "--setups", "demo", "--options", "plain", "--seeds", *seeds]
        monkeypatch.setattr("sys.argv", ["join_shock.py", *arguments])
        shock.main()
    assert made == [("demo", "plain", 0), ("demo", "plain", 1)]
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "results.jsonl").read_text().splitlines()[1])["seed"] == 1
    assert capsys.readouterr().out.endswith("| demo | plain | +5.0 %, +25.0 % | 2, never | 2.000 ± 0.707 |\n")
