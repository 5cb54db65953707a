"""Worlds of `p2p_diloco.fragments`, of each kind that can be played with it: every law holds."""

from __future__ import annotations

import pytest

from tests.sim.check import KINDS, check, drawn
from tests.sim.fragments_face import FragmentsFace, Piece, Store
from tests.sim.model import Violation
from tests.sim.world import World
from tests.sim.worlds import main

SEEDS = {"joining": range(7002, 7005), "crowded": range(7000, 7001), "data": (7002, 7004), "hostile": range(7002, 7005)}
WORLDS = {kind: SEEDS.get(kind, range(7002, 7006)) for kind in KINDS}
FOUND = [("hesitant", 5004), ("async", 7001), ("torn", 7013), ("private", 7006), ("private", 5019), ("crowded", 93000)]
FOUND += [("async", 93021)]
FOUND += [("hostile", seed) for seed in (7005, 95008, 95016, 95026, 95056, 95088, 95143, 95147, 98068)]
"""Worlds that broke a law once."""
BROKEN = [("data", 7003), ("hostile", 98017), ("hostile", 98072)]
"""Worlds in which this core breaks a law. It carries no run before none does."""


@pytest.mark.parametrize("kind", WORLDS)
def test_every_law_holds(kind: str) -> None:
    for seed in WORLDS[kind]:
        outcome = check(World(seed, drawn(seed, kind), face=FragmentsFace))
        steps = outcome.steps
        assert steps["taken"] == steps["counted"] + steps["pending"] + steps["died"] + steps["dropped"]


@pytest.mark.parametrize(("kind", "seed"), FOUND)
def test_what_broke_once_holds(kind: str, seed: int) -> None:
    check(World(seed, drawn(seed, kind), face=FragmentsFace))


@pytest.mark.xfail(raises=Violation, strict=True)
@pytest.mark.parametrize(("kind", "seed"), BROKEN)
def test_what_is_still_broken(kind: str, seed: int) -> None:
    check(World(seed, drawn(seed, kind), face=FragmentsFace))


def test_one_world_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--core", "fragments", "--seed", "3", "--trace"]) == 0
    assert "every invariant held in each" in capsys.readouterr().out


def test_a_node_notices_what_was_damaged_after_its_last_step() -> None:
    """Not what a step was taken from: that only others can tell."""
    store = Store([Piece(), Piece()])
    store.sum()
    assert store.wrong() == ()
    store.present[1] = Piece(Piece().here, Piece().true.step((("a", 1),)))
    assert store.wrong() == ()
    store.present[1] = Piece(Piece().here.step((("a", 1),)), Piece().true)
    assert store.wrong() == (1,)
