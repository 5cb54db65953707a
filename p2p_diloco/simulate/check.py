"""Worlds drawn from a seed, played through chaos, healing and settling, and held against every invariant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

from .invariants import account, ended_damaged, intact, lineage, relied_upon, revised
from .model import require
from .world import Settings, World

CHAOS_S, HEAL_S, SETTLE_S = 40.0, 30.0, 12.0
RESUMED_S = 15.0
"""In the last part of the healing time, this long, every peer must see commits: a bound on recovery, too."""
LAGS = 2.0
"""These times are longer by so many times what a State takes (the first is not): after one a second may be needed."""
FOR_EVER = 1000.0
"""A round_timeout that outlasts every world: nothing but the protocol itself ends a wait."""
KINDS = {
    "healed": "faults of all kinds; then everybody is there again",
    "patient": "the same, with a round_timeout that never passes",
    "bereaved": "as patient, and the dead stay dead",
    "hesitant": "as bereaved, and bases change while pseudo-gradients are made",
    "overlapped": "as healed, and training goes on while exchanges are under way",
    "async": "asynchronous mode; no more deaths and damaged memories at a time than there are successors",
    "torn": "asynchronous mode; faults of all kinds, cuts of the network too",
}
_MIX = ("healed", "patient", "async", "bereaved", "healed", "torn", "overlapped", "hesitant")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a world that held came to."""

    seed: int
    epochs: int  # the lowest epoch at the end
    events: int
    steps: Counter[str]  # inner steps, shard by shard: taken, counted, pending, died, dropped
    happened: Counter[str]


def kind_of(seed: int) -> str:
    """The kind of world that a seed stands for, unless another is asked for."""
    return _MIX[seed % len(_MIX)]


def drawn(seed: int, kind: str = "healed") -> Settings:
    """What a world of a kind is made of. Raises KeyError for a kind that there is not."""
    kinds = {
        "healed": _healed, "patient": _patient, "bereaved": _bereaved, "hesitant": _hesitant, "overlapped": _overlapped,
        "async": _async, "torn": _torn,
    }  # fmt: skip
    settings = _harder(kinds[kind](Random(f"settings {seed}")), Random(f"harder {seed}"))
    unequal = Random(f"links {seed}").random() > 0.5
    settings = replace(settings, bandwidths=(1.0, 100.0)) if unequal else settings
    return _revised(settings, Random(f"revised {seed}"))


def _revised(settings: Settings, rng: Random) -> Settings:
    """In a third of the worlds the founder changes the outer rates, once or several times."""
    if rng.random() < 2 / 3:
        return settings
    return replace(settings, revisions=rng.randint(1, 4), record_kept=rng.random() < 0.5)


def _harder(settings: Settings, rng: Random) -> Settings:
    """Half of the worlds: short memories, slow states, links cut one by one."""
    if rng.random() < 0.5:
        return settings
    torn = ("part", "mute") if settings.deaths_at_once is None else ()  # who is cut off is as good as dead
    return replace(
        settings,
        history=rng.choice([8, 256]),
        forgotten=rng.choice([2, 60]),
        state_lag=rng.choice([0.0, 1.0, 4.0, 15.0]),
        faults=(*settings.faults, *(kind for kind in torn if rng.random() < 0.5)),
    )


def _healed(rng: Random) -> Settings:
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


def _patient(rng: Random) -> Settings:
    return replace(_healed(rng), round_timeout=FOR_EVER)


def _bereaved(rng: Random) -> Settings:
    return Settings(
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
        dead_return=False,
    )


def _hesitant(rng: Random) -> Settings:
    settings = _bereaved(rng)
    return replace(settings, hesitation=1.0, faults=(*settings.faults, "flip"))


def _overlapped(rng: Random) -> Settings:
    settings = _healed(rng)
    return replace(settings, overlap=rng.randint(1, settings.interval))


def _async(rng: Random) -> Settings:
    settings, successors = _healed(rng), rng.choice([1, 1, 2])
    faults = ("crash", "flip", "freeze", "leave", "restart", "stall")
    return replace(
        settings,
        mode="async",
        peers=max(settings.peers, 2 + successors),
        successors=successors,
        dn_buffer_size=rng.choice([0, 2, 3]),
        async_grace=rng.choice([0.0, 0.0, 0.5, 2.0]),
        max_staleness=rng.choice([None, None, 3, 8]),
        overlap=rng.choice([0, 0, settings.interval]),
        faults=("crash", "restart", *rng.sample(faults, rng.randint(1, len(faults)))),
        drop=rng.choice([0.0, 0.02]),
        deaths_at_once=successors,
    )


def _torn(rng: Random) -> Settings:
    settings = _async(rng)
    faults = ("crash", "restart", "cut", "heal", "freeze", "stall", "leave", "flip")
    return replace(
        settings,
        successors=rng.choice([0, 1, 1, 2]),
        faults=tuple(sorted(rng.sample(faults, rng.randint(2, len(faults))))),
        drop=rng.choice([0.0, 0.02, 0.1]),
        deaths_at_once=None,
    )


def check(world: World) -> Outcome:
    """One world from birth to peace. Raises Violation."""
    world.faults.chaos(CHAOS_S)
    world.ask(CHAOS_S)
    world.run(CHAOS_S)
    world.faults.heal()
    asked = world.highest()
    slow = LAGS * world.settings.state_lag
    world.run(world.now + HEAL_S + 2 * slow)  # as long for what recovers as for what it must show then
    steps: Counter[str] = Counter()
    if not ended_damaged(world):
        for name, process in world.alive.items():
            newest = max((when for when, who, *_ in world.commits if who == name), default=0.0)
            moving = process.replica.finished or newest > world.now - RESUMED_S - slow
            require(moving, "d", f"{name} has no commit in the last {RESUMED_S + slow:g} s of healing")
        world.training = False
        world.run(world.now + SETTLE_S + slow)
        require(len(lineage(world)) == 1, "d", f"more than one lineage after healing: {lineage(world)}")
        intact(world)
        revised(world, asked)
        if world.settings.deaths_at_once is not None:
            relied_upon(world)
        steps = account(world)
        world.witness.ended(steps, world.happened)
    return Outcome(world.seed, min(p.replica.epoch for p in world.alive.values()), world.count, steps, world.happened)
