"""Whole runs under random faults: every seed a world, every world held against every invariant."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHUNK = 10

SHARE = """
import sys
from dataclasses import replace
from p2p_diloco.simulate.check import check, drawn

first, step, last = map(int, sys.argv[1:])
for seed in range(first, last, step):
    settings = drawn(seed)
    if seed % 4 == 3:
        settings = replace(settings, round_timeout=1000.0)
    try:
        check(seed, settings)
    except Exception as error:
        print(f"seed {seed}: {error!r}", flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        *(("healed", first) for first in range(0, 200, CHUNK)),
        *(("patient", first) for first in range(200, 240, CHUNK)),
        *(("bereaved", first) for first in range(0, 40, CHUNK)),
        *(("hesitant", first) for first in range(0, 40, CHUNK)),
    ],
)
def test_every_seed_holds(kinds: dict[str, Callable[[int], None]], kind: str, first: int) -> None:
    """(a) to (f) hold in each of these worlds; docs/testing.md says how to replay one."""
    broken = []
    for seed in range(first, first + CHUNK):
        try:
            kinds[kind](seed)
        except Exception as error:
            broken.append(f"{kind} seed {seed}: {error!r}")
    assert broken == []


@pytest.mark.parametrize("seed", [185, 1225, 1317])
def test_worlds_that_stood_still_once(kinds: dict[str, Callable[[int], None]], seed: int) -> None:
    """In each the protocol once had everybody wait for somebody else, and no shorter run of seeds showed it."""
    kinds["bereaved"](seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_thousand_seeds_hold() -> None:
    """The same for more worlds, a quarter of them patient, on all cores."""
    cores = min(os.cpu_count() or 1, 8)
    path = os.pathsep.join([str(ROOT), *sys.path])
    shares = [
        subprocess.Popen(
            [sys.executable, "-c", SHARE, str(1000 + core), str(cores), "3000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for core in range(cores)
    ]
    try:
        broken = [share.communicate(timeout=550)[0] for share in shares]
    finally:
        for share in shares:
            share.kill()
            share.wait()
    assert "".join(broken) == ""
    assert [share.returncode for share in shares] == [0] * cores
