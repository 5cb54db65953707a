"""Simulated runs (worlds) drawn from a seed, played through faults, healing and settling, and checked against every
invariant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

from .data import Data
from .invariants import (
    account,
    aggregate,
    ended_damaged,
    intact,
    lineage,
    never_passed,
    never_still,
    relied_upon,
    revised,
    undisturbed,
)
from .model import require
from .settings import Settings
from .world import World

CHAOS_S, HEAL_S, SETTLE_S = 40.0, 30.0, 12.0
IDLE_S = 8.0
"""At the end all trainers stop. The world then runs for `SETTLE_S`, and at least this long after the last trainer has
become idle, because a round waits for a trainer until it is idle."""
HOSTILE_S = 150.0
"""`CHAOS_S` for worlds with a hostile member: several times the longest wait that such a member may cause."""
RESUMED_S = 15.0
"""In the last RESUMED_S seconds of the healing time every peer must see a commit: a bound on recovery."""
SHORT_CHAOS_S = 10.0
"""`CHAOS_S` for worlds in which a round takes less than `SHORT_S`: commits follow each other faster there, so a shorter
time has enough of them."""
SHORT_HEAL_S = 6.0
"""`HEAL_S` for these worlds."""
ROUNDS, SHORT_S, LONG_S = 4.0, 0.5, 5.0
"""The times above grow by `ROUNDS` rounds in worlds in which a round takes longer than `LONG_S`."""
USED_S = 1800.0
"""Seconds after healing in which a data set must be used up. Of a data set without end, the positions that were given
out must be used."""
LAGS = 2.0
"""The times above, except `CHAOS_S`, grow by `LAGS` transfers of a state, because two may be needed, one after the
other."""
FOR_EVER = 1000.0
"""A round_timeout that never passes, so that only the protocol itself can end a wait."""
_MIX = ("healed", "patient", "async", "bereaved", "joining", "torn", "overlapped", "hesitant", "healed", "joining")
_CROWDED = 40
"""One of this many worlds is crowded. There are few, because such a world takes as long as several others."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one simulated run that broke no invariant.

    epochs: the lowest epoch of any peer at the end. events: number of scheduled actions. steps: numbers of inner steps,
    summed over all units: "taken" (all), and of these "counted" by a commit, "pending" with a live peer, "dropped" by
    a rule, and "died" (uncounted when their trainer was gone). happened: how often each kind of fault and note, and
    each fate of a message, occurred.
    """

    seed: int
    epochs: int
    events: int
    steps: Counter[str]
    happened: Counter[str]


def kind_of(seed: int) -> str:
    """Return the kind that a simulated run with this seed has by default."""
    return "crowded" if seed % _CROWDED == _CROWDED - 1 else _MIX[seed % len(_MIX)]


def drawn(seed: int, kind: str = "healed") -> Settings:
    """Return the settings of a simulated run of this kind, drawn from the seed. Raises KeyError for an unknown kind."""
    settings = KINDS[kind](Random(f"settings {seed}"))
    if kind not in ("joining", "hostile", "data"):
        settings = _harder(settings, Random(f"harder {seed}"))
    unequal = Random(f"links {seed}").random() > 0.5
    settings = replace(settings, bandwidths=(1.0, 100.0)) if unequal else settings
    return settings if settings.data_epochs else _revised(settings, Random(f"revised {seed}"))


def _revised(settings: Settings, rng: Random) -> Settings:
    """In a third of the simulated runs, let the founder change settings, once or several times. It raises the number of
    peers that the run needs only if enough peers live at the end."""
    if rng.random() < 2 / 3:
        return settings
    drawn = replace(settings, revisions=rng.randint(1, 4), record_kept=rng.random() < 0.5)
    most = settings.peers - 1 if settings.dead_return and settings.deaths_at_once is None else settings.min_peers
    return replace(drawn, revised_min_peers=max(settings.min_peers, min(2, most)))


def _harder(settings: Settings, rng: Random) -> Settings:
    """Make half of the simulated runs harder: peers remember little, states arrive late, and single links are cut."""
    if rng.random() < 0.5:
        return settings
    torn = ("part", "mute") if settings.deaths_at_once is None else ()  # a peer that is cut off counts as dead
    return replace(
        settings,
        history=rng.choice([8, 256]),
        forgotten=rng.choice([15, 60]),
        state_lag=rng.choice([0.0, 1.0, 4.0, 15.0]),
        faults=(*settings.faults, *(kind for kind in torn if rng.random() < 0.5)),
    )


def _healed(rng: Random) -> Settings:
    """Faults of all kinds; then all peers return."""
    peers = rng.randint(2, 5)
    faults = ("crash", "restart", "cut", "heal", "freeze", "stall", "leave", "flip", "pause")
    return Settings(
        peers=peers,
        fragments=rng.randint(1, 3),
        slices_per_fragment=rng.randint(1, 2),
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
    """As healed, with a round_timeout that never passes."""
    return replace(_healed(rng), round_timeout=FOR_EVER)


def _bereaved(rng: Random) -> Settings:
    """As patient, but dead peers stay dead."""
    return Settings(
        peers=max(3, rng.randint(2, 5)),
        fragments=rng.randint(1, 3),
        slices_per_fragment=rng.randint(1, 2),
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
    """As bereaved, and bases change while pseudo-gradients are computed."""
    settings = _bereaved(rng)
    return replace(settings, hesitation=1.0, faults=(*settings.faults, "flip"))


def _overlapped(rng: Random) -> Settings:
    """As healed, and training goes on while exchanges are under way."""
    settings = _healed(rng)
    return replace(settings, overlap=rng.randint(1, settings.interval))


def _joining(rng: Random) -> Settings:
    """No faults but pauses; peers join one after another; rounds far shorter or longer than a heartbeat."""
    usual = rng.choice([0.02, 0.1, 0.1, 0.5, 1.0, 1.0, 10.0, 50.0])  # seconds of a round; a heartbeat is 1 s
    interval = rng.choice([1, 2, 5])
    slow = rng.choice([1.0, 1.0, 3.0, 5.0])
    return Settings(
        peers=rng.randint(3, 5 if usual >= 0.5 else 4),
        fragments=rng.choice([1, 1, 2]) if usual >= 1.0 else 1,
        slices_per_fragment=rng.randint(1, 4 if usual >= 0.5 else 2),
        interval=interval,
        step_times=(usual / interval, slow * usual / interval),
        delay_mean=min(0.1, usual / 10),
        work_time=min(0.05, usual / 20),
        drop=0.0,
        duplicate=0.0,
        late=(2.0, 8.0) if usual < 0.5 else (10.0, 40.0),
        faults=("pause",) if rng.random() < 0.5 else (),
        fault_every=(1.0, 6.0),
        state_lag=rng.choice([0.0, 0.5, 2.0] if usual < 0.5 else [0.0, 1.0, 4.0, 15.0]),
        round_timeout=FOR_EVER,
        bandwidths=None,
    )


def _crowded(rng: Random) -> Settings:
    """8 to 12 peers; faults of all kinds, and pauses; then all peers return."""
    settings = _healed(rng)
    return replace(
        settings,
        peers=rng.randint(8, 12),
        slices_per_fragment=rng.choice([1, 2, 4]),
        fragments=rng.choice([1, 1, 2]),
        faults=(*settings.faults, "pause"),
    )


def _async(rng: Random) -> Settings:
    """Asynchronous mode; no more peers at a time die or have damaged memory than there are successors."""
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
    """Asynchronous mode; faults of all kinds, also cuts of the network."""
    settings = _async(rng)
    faults = ("crash", "restart", "cut", "heal", "freeze", "stall", "leave", "flip")
    return replace(
        settings,
        successors=rng.choice([0, 1, 1, 2]),
        faults=tuple(sorted(rng.sample(faults, rng.randint(2, len(faults))))),
        drop=rng.choice([0.0, 0.02, 0.1]),
        deaths_at_once=None,
    )


def _private(rng: Random) -> Settings:
    """Both modes; private peers, relays, single links cut; peers turn private and back."""
    settings = _torn(rng) if rng.random() < 1 / 3 else _healed(rng)
    peers, bootstrap, masked = rng.randint(2, 6), rng.random() < 0.7, rng.random() < 1 / 3
    faults = ["pair", "mute", "turn", "heal", "pause"]
    if not masked:
        faults += ["crash", "restart", "cut", "part", "freeze", "stall", "leave", "relay"]
    return replace(
        settings,
        peers=peers,
        min_peers=min(settings.min_peers, peers - 1),
        relays=True,
        bootstrap=bootstrap,
        private=rng.randint(0, peers if bootstrap else peers - 1),
        faults=tuple(sorted(rng.sample(faults, rng.randint(2, len(faults))))),
        drop=0.0 if masked else rng.choice([0.0, 0.02, 0.1]),
        round_timeout=FOR_EVER if masked or rng.random() < 0.5 else settings.round_timeout,
    )


def _data(rng: Random) -> Settings:
    """Both modes; faults of all kinds, and a data set of which each sample is used once an epoch."""
    draw = rng.choice([_healed, _patient, _bereaved, _hesitant, _overlapped, _async, _async, _torn])
    settings = draw(rng)
    samples, epochs = rng.randint(30, 400), rng.choice([0, 0, 1, 2])
    settings = _harder(settings, rng)
    # a peer whose submissions are nearly all too stale uses its data only by chance
    most = None if settings.max_staleness is None else 8
    settings = replace(settings, samples=samples, data_epochs=epochs, stop_after_epochs=None, max_staleness=most)
    # these worlds last long, and a state that takes longer than `confirms_within` lets rounds go on without a live peer
    lag = settings.state_lag if settings.deaths_at_once is None else min(settings.state_lag, 4.0)
    return replace(settings, state_lag=lag)


def _hostile(rng: Random) -> Settings:
    """Both modes; a member sends anything well-formed, then falls silent."""
    settings = _torn(rng) if rng.random() < 0.4 else _healed(rng)
    return replace(
        settings,
        peers=max(2, settings.peers),
        hostile=True,
        min_peers=1,
        start_peers=1,
        faults=("pause",) if rng.random() < 0.3 else (),
        drop=rng.choice([0.0, 0.0, 0.02]),
        round_timeout=rng.choice([4.0, 8.0]),
        pause_timeout=3.0,
        forgotten=rng.choice([15, 60]),
    )


_DRAWN = (
    _healed, _patient, _bereaved, _hesitant, _overlapped, _joining, _crowded, _async, _torn, _data, _hostile, _private,
)  # fmt: skip
KINDS = {draw.__name__.removeprefix("_"): draw for draw in _DRAWN}
"""Each kind of simulated runs, and what draws the settings of one. Its docstring says what such a run is."""


def _used_up(world: World, data: Data) -> None:
    """Check that every position that was given out so far is used in bounded time. If the data has a limit of epochs,
    all positions must be used, and each trainer must know it (invariant v)."""
    reach = data.reach()
    world.run(world.now + USED_S, stop=lambda: data.used_up_to(reach))
    require(data.used_up_to(reach), "v", f"positions below {reach} are not used {USED_S:g} s after healing")


def play(kind: str, seed: int) -> Outcome:
    """Play the simulated run of this kind and seed. Raises Violation."""
    return check(World(seed, drawn(seed, kind)))


def check(world: World) -> Outcome:
    """Play one simulated run to its end, check every invariant, and return the outcome. Raises Violation."""
    round_s = world.settings.interval * world.settings.step_times[1]
    rounds = ROUNDS * round_s if round_s > LONG_S else 0.0
    long = round_s >= SHORT_S
    chaos, heal = (CHAOS_S, HEAL_S) if long else (SHORT_CHAOS_S, SHORT_HEAL_S)
    chaos = HOSTILE_S if world.hostile is not None else chaos
    world.faults.chaos(chaos)
    world.founder.ask(chaos)
    world.run(chaos + rounds)
    world.faults.heal()
    if world.hostile is not None:
        world.hostile.fall_silent()
    asked = world.founder.highest()
    slow = LAGS * world.settings.state_lag + rounds
    if round_s >= SHORT_S:
        heal = max(heal, world.membership.patience + ROUNDS * round_s)
    world.run(world.now + heal + 2 * slow)  # twice the slow part: once to recover, once to show commits afterwards
    steps: Counter[str] = Counter()
    if not ended_damaged(world):
        for name, process in world.alive.items():
            newest = max((when for when, who, *_ in world.commits if who == name), default=0.0)
            done = world.data is not None and world.data.ended(process)  # no more commits are made
            moving = process.replica.finished or done or newest > world.now - RESUMED_S - slow
            require(moving, "d", f"{name} saw no commit in the last {RESUMED_S + slow:g} s of healing")
        world.membership.at_peace()
        aggregate(world)
        never_still(world)
        if world.data is not None:
            _used_up(world, world.data)
        world.trainers.training = False
        idle = world.rules.idle_after(world.settings.step_times[1])
        world.run(world.now + max(SETTLE_S + slow, idle + IDLE_S + LAGS * world.settings.state_lag))
        require(len(lineage(world)) == 1, "d", f"more than one lineage after healing: {lineage(world)}")
        if world.data is None or not any(world.data.ended(p) for p in world.alive.values()):  # no commit looks
            intact(world)
        revised(world, asked)
        if world.settings.deaths_at_once is not None or world.settings.hostile:
            relied_upon(world)
        steps = account(world)
        world.witness.ended(steps, world.happened)
        if world.settings.deaths_at_once is not None:
            never_passed(world)
        undisturbed(world, steps)
    return Outcome(world.seed, min(p.replica.epoch for p in world.alive.values()), world.count, steps, world.happened)
