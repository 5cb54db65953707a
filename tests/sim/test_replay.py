"""A seed is a world: it runs the same way every time, so that any failure can be replayed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.sim.check import Outcome, check, drawn
from tests.sim.settings import Settings
from tests.sim.world import World

ROOT = Path(__file__).parents[2]

PRINT_TRACE = """
import sys
from hashlib import blake2b
from tests.sim.check import check, drawn
from tests.sim.settings import Settings
from tests.sim.world import World

for seed in map(int, sys.argv[1:]):
    world = World(seed, drawn(seed), trace=True)
    check(world)
    print(seed, blake2b("\\n".join(world.lines).encode()).hexdigest())
"""


def played(seed: int, trace: bool = False) -> tuple[Outcome, World]:
    world = World(seed, drawn(seed), trace)
    return check(world), world


def test_tracing_changes_nothing() -> None:
    """A traced world has the same events as an untraced one."""
    assert played(5)[0] == played(5, trace=True)[0]


def test_a_seed_replays_in_another_process() -> None:
    """Its worlds agree in every event and effect, to the millisecond: Python's hash seed, which orders sets, has no
    effect."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    printed = {
        subprocess.run(
            [sys.executable, "-c", PRINT_TRACE, "4", "11", "17"],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert len(printed.pop().splitlines()) == 3


def test_half_of_the_worlds_are_harder() -> None:
    """Each hardship is in some of them, together with faults of every kind; a state may take longer than a fetch."""
    worlds = [drawn(seed) for seed in range(60)]
    plain = Settings()
    for what in ("history", "forgotten", "state_lag"):
        assert 5 < sum(getattr(world, what) != getattr(plain, what) for world in worlds) < 40
    for fault in ("part", "mute"):
        assert 5 < sum(fault in world.faults for world in worlds) < 40
    assert max(world.state_lag for world in worlds) > World(0).rules.fetch_again
