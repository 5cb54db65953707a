"""The simulator's own model: sets of inner steps instead of tensors, and the invariants on them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_diloco.core import leading
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.version import ModelVersion, Version
from tests.sim import invariants
from tests.sim.face import Piece, Store
from tests.sim.model import Fate, Tensors, Trainer, Violation
from tests.sim.settings import Settings
from tests.sim.witness import Witness
from tests.sim.world import World

RULES = Settings(mode="async").rules()


def merge(trainer: Trainer, fate: Fate, new: int) -> tuple[int, int]:
    """(pending, dropped) after a merge with the state that contains the steps ``new``."""
    trainer.merge(0, new, fate)
    return trainer.pending(0), trainer.dropped[0]


def trainer(base: int = 0, own: int = 0, delta: int = 0) -> Trainer:
    """One unit, merged with ``base`` when its own steps were made, of which it last sent ``delta``."""
    made = Trainer(1)
    made.base, made.local, made.delta, made.taken = [base], [base | own], [delta], own | (delta & base)
    return made


def test_an_outer_step_unites_what_must_be_disjoint() -> None:
    """A step that comes twice, from any peer, breaks (c)."""
    once = Tensors().step((("a", 0b01), ("b", 0b10)))
    assert once.steps == 0b11
    with pytest.raises(Violation, match=r"\(c\)"):
        once.step((("a", 0b10),))
    with pytest.raises(Violation, match=r"\(c\)"):
        Tensors().step((("a", 0b01), ("b", 0b01)))


def test_the_chain_tells_lineages_apart() -> None:
    """The same steps by other commits are another state; so is the same state with another plan."""
    one = Tensors().step((("a", 1), ("b", 2)))
    two = Tensors().step((("a", 1),)).step((("b", 2),))
    assert one.steps == two.steps
    assert one.digest(b"") != two.digest(b"")
    assert one.digest(b"") != one.digest(b"x")
    assert one.digest(b"") == Tensors().step((("a", 1), ("b", 2))).digest(b"")


def test_other_rates_lead_elsewhere() -> None:
    """The same mean with the rates of another revision leads to another state; revision 0 changes nothing."""
    mean = (("a", 1),)
    reached = {Tensors().rated(r).step(mean).chain for r in (FOUNDED, Revision(1, 0.5, 0.9), Revision(2, 0.7, 0.9))}
    assert len(reached) == 3
    assert Tensors().rated(FOUNDED) == Tensors()


@pytest.mark.parametrize(
    ("fate", "world", "new", "outcome"),
    [
        (Fate.KEEP, {"own": 0b110}, 0b1, (0b110, 0)),
        (Fate.COUNTED, {"own": 0b110, "delta": 0b010}, 0b011, (0b100, 0)),
        (Fate.DROPPED, {"base": 0b010, "own": 0b100, "delta": 0b010}, 0b001, (0, 0b110)),
        (Fate.DROPPED, {"own": 0b110}, 0b001, (0, 0b110)),
        (Fate.DROPPED, {"own": 0b110}, 0b011, (0, 0b100)),
        (Fate.KEEP, {"base": 0b010, "own": 0b100, "delta": 0b010}, 0b001, (0b100, 0b010)),
    ],
)
def test_merging_as_the_fate_says(fate: Fate, world: dict[str, int], new: int, outcome: tuple[int, int]) -> None:
    """The pending steps after a merge, and those dropped by rule; a lost lineage's steps are among the dropped."""
    assert merge(trainer(**world), fate, new) == outcome


@pytest.mark.parametrize(
    ("fate", "world", "new", "law"),
    [
        (Fate.KEEP, {"own": 0b1}, 0b1, "c"),
        (Fate.COUNTED, {"own": 0b10, "delta": 0b01}, 0b01, "f"),
    ],
)
def test_a_fate_that_does_not_fit_is_a_violation(fate: Fate, world: dict[str, int], new: int, law: str) -> None:
    """Keeping counted progress breaks (c); subtracting what is not there breaks (f)."""
    with pytest.raises(Violation, match=rf"\({law}\)"):
        merge(trainer(**world), fate, new)


@pytest.mark.parametrize("law", "abefxy")
def test_a_broken_law_shows(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is checked while a world runs, or at its end: (a) replicas compute the same, (b) none goes back, (e) no
    leader that has all waits, (f) the accounts balance, (x) one key makes one version, (y) the slices of a fragment
    have the same steps."""
    world = World(1, Settings(peers=2, drop=0.0, duplicate=0.0, slices_per_fragment=2))
    world.run(20.0)
    invariants.account(world)
    process, astray, looks = world.alive["p1"], Tensors(0, b"astray"), partial[Any](world.run, 60.0)
    present = process.replica.stores[0].present
    match law:
        case "a":
            present[:] = [Piece(astray, astray)] * 2
        case "b":
            process.best = ModelVersion(9)
        case "e":
            monkeypatch.setattr(leading, "advance", lambda log, now: [])
        case "f":
            process.trainer.taken |= 1 << 900
            looks = partial(invariants.account, world)
        case "x":
            commit, _ = process.replica.logs[0].last[-1]
            other = replace(commit, version=replace(commit.version, chain="other"))
            looks = partial(process.replica._agrees, other)
        case "y":
            present[1], looks = Piece(), partial(process.replica.holds, 0)
    with pytest.raises(Violation, match=rf"\({law}\)"):
        looks()


def process(name: str, frozen_until: float = 0.0) -> Any:
    return SimpleNamespace(name=name, frozen_until=frozen_until)


@pytest.mark.parametrize(
    ("holder", "successor", "dead", "broken"),
    [
        ("successor", "awake", True, False),
        ("successor", "awake", False, True),
        ("author", "awake", True, True),
        ("author", "none", True, False),
        ("author", "none", False, True),
        ("author", "frozen", True, False),
        ("author", "frozen", False, True),
        ("author", "dead", True, False),
    ],
)
def test_two_versions_of_one_epoch_are_a_violation(holder: str, successor: str, dead: bool, broken: bool) -> None:
    """(k), unless all peers that held the first one are dead, and its author never held it, or no successor was there.
    Then its steps died with it."""
    witness, first, second = Witness(RULES, one_line=True), Version(0, 1, 1, "first"), Version(0, 1, 1, "second")
    witness.authors[0, first], witness.counts[0, first] = "author", 0b101
    witness.successors[0, first] = set() if successor == "none" else {"next"}
    held, other = process(holder), process("other")
    others = [other] if successor == "dead" else [other, process("next", 9.0 if successor == "frozen" else 0.0)]
    witness.accepts(held, 0, first, [held, *others], now=5.0)
    with pytest.raises(Violation, match=r"\(k\)") if broken else nullcontext():
        witness.accepts(other, 0, second, others if dead else [held, *others], now=6.0)
    assert witness.gone[0] == (0 if broken else 0b101)


def test_a_node_notices_what_was_damaged_after_its_last_step() -> None:
    """Not what a step was taken from: that only others can tell."""
    store = Store([Piece(), Piece()])
    store.sum()
    assert store.wrong() == ()
    store.present[1] = Piece(Piece().here, Piece().true.step((("a", 1),)))
    assert store.wrong() == ()
    store.present[1] = Piece(Piece().here.step((("a", 1),)), Piece().true)
    assert store.wrong() == (1,)
