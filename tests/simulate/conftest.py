"""Worlds that are harder on the protocol than the simulator's own check, and a way to break the protocol on purpose."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import pytest

from p2p_diloco.core.events import Contribute
from p2p_diloco.simulate.check import check, drawn
from p2p_diloco.simulate.model import require
from p2p_diloco.simulate.world import Process, Settings, World

FOR_EVER = 1000.0
"""A round_timeout that outlasts every world: nothing but the protocol itself ends a wait."""


def healed(seed: int) -> None:
    """Faults of all kinds, then everybody is there again; waits are ended by round_timeout."""
    check(seed)


def patient(seed: int) -> None:
    """The same without any help of round_timeout: what is lost must be sent again, who is dead must be found out."""
    check(seed, replace(drawn(seed), round_timeout=FOR_EVER))


class Hesitant(World):
    """Between a Load and the Contribute that answers it some time passes, in which the bases may change."""

    def _contribute(self, process: Process, event: Contribute) -> None:
        later = World._contribute
        self.at(self.rng.uniform(0.0, 1.0), lambda: later(self, process, event))


def hesitant(seed: int) -> None:
    """As bereaved, with pseudo-gradients that take a while to make."""
    bereaved(seed, Hesitant)


def bereaved(seed: int, made: type[World] = World) -> None:
    """As patient, but the dead stay dead: only links, frozen processes and stuck trainers recover.

    Its worlds are drawn here, so that the seeds that tests name stand for the same ones whatever `drawn` comes to draw.
    """
    rng = Random(f"settings {seed}")
    settings = Settings(
        peers=max(3, rng.randint(2, 5)),
        fragments=rng.randint(1, 3),
        shards_per_fragment=rng.randint(1, 2),
        interval=rng.randint(2, 5),
        drop=rng.choice([0.0, 0.02, 0.1]),
        duplicate=rng.choice([0.0, 0.1]),
        delay_mean=rng.choice([0.02, 0.1, 0.3]),
        carry_rounds=rng.randint(1, 3),
        faults=("crash", "cut", "freeze", "heal", "stall"),
        round_timeout=FOR_EVER,
    )
    world = made(seed, settings)
    world.chaos(40.0)
    world.run(40.0)
    world.cut, world.drop, world.duplicate = set(), 0.0, 0.0
    for process in world.alive.values():
        process.frozen_until = process.stalled_until = 0.0
    world.run(world.now + 30.0)
    for name in world.alive:
        newest = max((when for when, who, *_ in world.commits if who == name), default=0.0)
        require(newest > world.now - 15.0, "d", f"{name} has no commit in 15 s; alive are {sorted(world.alive)}")
    world.training = False
    world.run(world.now + 12.0)
    require(len(world.lineage()) == 1, "d", f"more than one lineage: {world.lineage()}")
    world.account()


KINDS: dict[str, Callable[[int], None]] = {
    "healed": healed,
    "patient": patient,
    "bereaved": bereaved,
    "hesitant": hesitant,
}


@pytest.fixture
def kinds() -> dict[str, Callable[[int], None]]:
    return KINDS


@pytest.fixture
def sabotage() -> Iterator[Callable[[type, str, str, str], None]]:
    """``sabotage(owner, method, old, new)``: the method as if its source said ``new`` for ``old``, until the test ends.

    The old text must be there exactly once, so that a sabotage can't silently miss after a change of the code.
    """
    undo: list[Callable[[], None]] = []

    def rewrite(owner: type, name: str, old: str, new: str) -> None:
        before = inspect.getattr_static(owner, name)
        function = before.fget if isinstance(before, property) else before
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(old) == 1, f"{owner.__name__}.{name} says {old!r} {source.count(old)} times"
        made: dict[str, object] = {}
        code = compile("from __future__ import annotations\n" + source.replace(old, new), f"<{name}>", "exec")
        exec(code, function.__globals__, made)
        setattr(owner, name, made[name])
        undo.append(lambda: setattr(owner, name, before))

    yield rewrite
    for restore in undo:
        restore()
