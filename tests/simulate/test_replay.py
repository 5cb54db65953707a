"""A seed is a world: it happens the same way every time, so that a failure can be looked at as often as one likes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.core.catchup import CatchUp
from p2p_diloco.simulate.check import check, drawn
from p2p_diloco.simulate.model import Violation

ROOT = Path(__file__).parents[2]

PRINT_TRACE = """
import sys
from hashlib import blake2b
from p2p_diloco.simulate.check import check

for seed in map(int, sys.argv[1:]):
    print(seed, blake2b("\\n".join(check(seed, trace=True)[1].lines).encode()).hexdigest())
"""


@pytest.mark.parametrize("seed", [3, 8, 21])
def test_a_seed_replays(seed: int) -> None:
    """Two worlds of one seed agree in every event and effect, to the millisecond."""
    (outcome, world), (again, twin) = check(seed, trace=True), check(seed, trace=True)
    assert world.lines is not None
    assert len(world.lines) > 1000
    assert world.lines == twin.lines
    assert outcome == again


def test_tracing_changes_nothing() -> None:
    """Looking at a world doesn't make it another one."""
    assert check(5)[0] == check(5, trace=True)[0]


def test_a_seed_replays_in_another_process() -> None:
    """Python's hash seed, by which sets are ordered, plays no part."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    printed = {
        subprocess.run(
            [sys.executable, "-c", PRINT_TRACE, "4", "11", "17", "30"],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(printed) == 1
    assert len(printed.pop().splitlines()) == 4


def test_seeds_differ() -> None:
    """Different seeds are different worlds, of different settings."""
    assert len({check(seed)[0].events for seed in range(6)}) == 6
    assert len({drawn(seed) for seed in range(50)}) == 50


def test_a_failing_seed_leaves_its_trace(sabotage: Any) -> None:
    """The recipe of docs/testing.md: the world is found in the frame that raised, with all that was said until then."""
    sabotage(CatchUp, "seen", "if overdue", "if False")
    with pytest.raises(Violation) as caught:
        list(map(partial(check, trace=True), range(20)))
    assert caught.value.__traceback__ is not None
    world = next(entry.frame.f_locals["world"] for entry in caught.traceback if "world" in entry.frame.f_locals)
    assert str(caught.value).startswith("(")
    assert any("Received" in line for line in world.lines)
