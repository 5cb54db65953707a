"""A seed is a world: it runs the same way every time, so that any failure can be replayed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.check import Outcome, check, drawn
from tests.sim.settings import Settings
from tests.sim.world import World

ROOT = Path(__file__).parents[2]


def played(seed: int, trace: bool = False) -> tuple[Outcome, World]:
    world = World(seed, drawn(seed), trace)
    return check(world), world


def test_tracing_changes_nothing() -> None:
    """A traced world has the same events as an untraced one."""
    assert played(5)[0] == played(5, trace=True)[0]


@pytest.mark.parametrize("seed", ["4", "17"])
def test_a_seed_replays_in_another_process(seed: str) -> None:
    """Its worlds agree in every event and effect, to the millisecond: Python's hash seed, which orders sets, has no
    effect."""
    command = [sys.executable, "-m", "tests.sim.worlds", "--seed", seed, "--kind", "healed", "--trace"]
    traces = set()
    for order in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": order}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
        trace, _, report = done.stdout.partition(f"seed {seed} (healed)")
        assert "every invariant held" in report, done.stderr
        traces.add(trace)
    assert len(traces) == 1


def test_half_of_the_worlds_are_harder() -> None:
    """Each hardship is in some of them, together with faults of every kind; a state may take longer than a fetch."""
    worlds = [drawn(seed) for seed in range(60)]
    plain = Settings()
    for what in ("history", "forgotten", "state_lag"):
        assert 5 < sum(getattr(world, what) != getattr(plain, what) for world in worlds) < 40
    for fault in ("part", "mute"):
        assert 5 < sum(fault in world.faults for world in worlds) < 40
    assert max(world.state_lag for world in worlds) > World(0).rules.fetch_again
