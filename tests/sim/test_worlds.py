"""`make worlds`: what it tells of worlds that hold, and of one that does not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from p2p_diloco.core import leading
from tests.sim.check import kind_of
from tests.sim.world import World
from tests.sim.worlds import main

ROOT = Path(__file__).parents[2]


def test_worlds_that_hold(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The report counts the worlds of each kind, their faults, and the fates of all inner steps."""
    monkeypatch.setattr("tests.sim.worlds.CHUNK", 2)
    assert main(["--seeds", "4", "--first", "40", "--jobs", "2"]) == 0
    told = capsys.readouterr().out
    assert "4 worlds" in told
    assert "every invariant held in each" in told
    counts = {kind: count for count, kind in re.findall(r"^ +(\d+) (\w+): ", told, re.MULTILINE)}
    assert {kind: int(count) for kind, count in counts.items()} == Counter(map(kind_of, range(40, 44)))
    assert re.search(r"faults: \d+ crash, .* flip", told)
    fates = [float(share) for share in re.findall(r"([\d.]+)% (?:counted|pending|died|dropped)", told)]
    assert sum(fates) == pytest.approx(100.0, abs=0.03)


def test_a_world_that_breaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code says so, and the report how to look at it."""
    monkeypatch.setattr(leading, "advance", lambda log, now: [])
    broken = next(seed for seed in range(200) if main(["--seed", str(seed)]) == 1)
    told = capsys.readouterr().out
    kind = kind_of(broken)
    assert "1 BROKEN" in told
    assert re.search(rf"seed {broken} \({kind}\): \([a-m]\) ", told)
    assert f"python -m tests.sim.worlds --seed {broken} --kind {kind} --trace" in told


def test_an_error_in_a_world_is_reported_with_its_kind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the code is no broken invariant, and ends no report."""

    def fail(world: World) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("tests.sim.worlds.check", fail)
    assert main(["--seed", "3"]) == 1
    assert f"seed 3 ({kind_of(3)}): KeyError('lost')" in capsys.readouterr().out


def test_neither_torch_nor_hivemind_is_loaded() -> None:
    """The protocol is plain Python, and so it is quick to try."""
    told = "import sys; from tests.sim.worlds import main; main(['--seed', '3'])"
    ask = f"{told}; print(sorted({{'torch', 'hivemind', 'numpy'}} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
