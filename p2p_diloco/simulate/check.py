"""Run one seed through chaos, healing and settling, and hold it against every invariant."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .model import require
from .world import Settings, World

CHAOS_S, HEAL_S, SETTLE_S = 40.0, 30.0, 12.0
RESUMED_S = 15.0
"""In the last part of the healing time, this long, every peer must see commits: a bound on recovery, too."""


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    epochs: int  # the lowest epoch at the end
    events: int
    dropped: int  # inner steps dropped by a stated rule, summed over shards


def drawn(seed: int) -> Settings:
    """The kind of world that a seed stands for."""
    rng = Random(f"settings {seed}")
    peers = rng.randint(2, 5)
    faults = ("crash", "restart", "cut", "heal", "freeze", "stall", "leave", "flip")
    return Settings(
        peers=peers,
        fragments=rng.randint(1, 3),
        shards_per_fragment=rng.randint(1, 2),
        interval=rng.randint(2, 5),
        min_peers=rng.choice([1, 1, 2]) if peers > 2 else 1,
        start_peers=rng.choice([1, 1, 2]),
        drop=rng.choice([0.0, 0.02, 0.1]),
        duplicate=rng.choice([0.0, 0.1]),
        delay_mean=rng.choice([0.02, 0.1, 0.3]),
        faults=tuple(sorted(rng.sample(faults, rng.randint(2, len(faults))))),
        carry_rounds=rng.randint(1, 3),
        stop_after_epochs=rng.choice([None, None, None, 6]),
    )


def check(seed: int, settings: Settings | None = None, trace: bool = False) -> tuple[Outcome, World]:
    """One world from birth to peace. Raises Violation."""
    world = World(seed, settings or drawn(seed), trace)
    world.chaos(CHAOS_S)
    world.run(CHAOS_S)
    world.heal()
    world.run(world.now + HEAL_S)
    if world.ended_damaged():
        return Outcome(seed, min(p.replica.epoch for p in world.alive.values()), world.count, 0), world
    for name, process in world.alive.items():
        newest = max((when for when, who, *_ in world.commits if who == name), default=0.0)
        moving = process.replica.finished or newest > world.now - RESUMED_S
        require(moving, "d", f"{name} has no commit in the last {RESUMED_S:g} of {HEAL_S:g} s after healing")
    world.training = False
    world.run(world.now + SETTLE_S, stop=None)
    require(len(world.lineage()) == 1, "d", f"more than one lineage after healing: {world.lineage()}")
    world.intact()
    world.account()
    after = min(p.replica.epoch for p in world.alive.values())
    dropped = sum(mask.bit_count() for _, t in world.trainers for mask in t.dropped)
    return Outcome(seed, after, world.count, dropped), world
