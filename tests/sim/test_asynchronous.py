"""Named stories of the asynchronous mode: answered submissions survive any death, and leading moves without loss."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from p2p_diloco.core import holding
from p2p_diloco.core.plan import elected
from p2p_diloco.core.round import Phase
from tests.sim import invariants
from tests.sim.model import Violation
from tests.sim.settings import Settings
from tests.sim.test_scenarios import settle
from tests.sim.world import World

PEERS = 4


def calm(seed: int = 0, **settings: Any) -> World:
    """A world without random faults that has run for 25 s: each fragment is led where it is elected to be."""
    plain = {"peers": PEERS, "drop": 0.0, "duplicate": 0.0, "delay_mean": 0.02, "step_times": (0.3, 0.8), "interval": 2}
    world = World(seed, Settings(**{**plain, "mode": "async", "faults": (), **settings}))
    world.run(25.0)
    assert len(world.holders()) == world.settings.peers
    return world


def leader(world: World, unit: int = 0) -> str:
    return invariants.newest(world, unit).replica.of(unit).plan.succession[0]


def named(world: World) -> tuple[str, ...]:
    """The leader of fragment 0 and its successors, by the newest state."""
    plan = invariants.newest(world, 0).replica.of(0).plan
    return plan.succession[: plan.named]


def run_until(world: World, holds: Callable[[], bool]) -> None:
    """Let time pass until the condition holds, for 20 s at most. The steps are shorter than any outer step takes."""
    until = world.now + 20.0
    while not holds():
        assert world.now < until
        world.run(world.now + 0.0005)


def epochs(world: World, since: float) -> dict[int, float]:
    """When each epoch of fragment 0 was first held by any peer."""
    first: dict[int, float] = {}
    for when, _, unit, epoch in world.commits:
        if unit == 0 and when >= since:
            first.setdefault(epoch, when)
    return first


@pytest.mark.parametrize("seed", [0, 4, 8])
def test_the_leader_killed_at_any_moment(seed: int) -> None:
    """Its successor goes on within 3 s, from the last commit that any submitter was answered with."""
    world = calm(seed)
    moment = 25.0 + seed * 0.083
    world.run(moment)
    world.crash(leader(world))
    world.run(moment + 3.0 + 2 * 0.8)
    assert epochs(world, moment + 0.5)
    world.run(moment + 12.0)
    settle(world)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_leader_dies_while_its_first_successor_is_frozen(seed: int) -> None:
    """The leader sends the first successor a proposal, and dies before it finds it dead. The second one holds all that
    the first will find among its messages when it goes on."""
    world = calm(seed, successors=2, deaths_at_once=2)
    first, second, third = named(world)
    world.alive[second].frozen_until = world.now + 8.0
    world.run(world.now + 1.5)
    assert world.alive[third].replica.roster.live(second)
    world.crash(first)
    world.run(world.now + 20.0)
    settle(world)
    assert world.happened["note fork"] == 0


def test_successors_that_are_asked_one_after_the_other_make_a_fork(sabotage: Any) -> None:
    """The story above can fail: the first successor comes back with a proposal that no other peer got."""
    sabotage(holding.must_hold, "return could", "return could[:1]")
    with pytest.raises(Violation, match=r"\(k\)"):
        test_the_leader_dies_while_its_first_successor_is_frozen(1)


def test_not_guaranteed_a_proposal_that_only_a_frozen_successor_got() -> None:
    """A proposal is lost on its way to the first successor. Then the leader dies, and the second one freezes: two
    failures and a lost message make a fork, as the others can't know of the proposal. If this test fails, mend decision
    0078, which says so."""
    world = calm(1, successors=2, deaths_at_once=2)
    first, second, third = named(world)
    world.mute.add((first, second))
    until = world.now + 2.0
    while world.now < until and world.alive[third].replica.versions[0] == world.alive[second].replica.versions[0]:
        world.run(world.now + 0.01)
    world.crash(first)
    world.mute.clear()
    world.alive[third].frozen_until = world.now + 8.0
    with pytest.raises(Violation, match=r"\(k\)"):
        world.run(world.now + 20.0)


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_the_leader_dies_while_it_names_a_newcomer(seed: int) -> None:
    """Its commit was lost on its way to the successor that it had before, which does not know yet that the newcomer
    holds a state. The newcomer does not hold what the old successor lacks. In other worlds the two don't hear of each
    other until the newcomer alone is named: a cut and a death are more than one failure."""
    world = calm(seed, deaths_at_once=1)
    world.crash("p3")
    world.run(world.now + 15.0)
    first, second = named(world)
    newcomer, lead = world.start("p3"), world.alive[first].replica
    world.mute.add((newcomer.name, second))
    run_until(world, lambda: bool((summary := lead.roster.summary(newcomer.name)) and summary.heads))
    world.mute.add((first, second))

    def names_it() -> bool:
        commit, phase = lead.logs[0].round.commit, lead.logs[0].phase
        return phase is Phase.HOLDING and commit is not None and newcomer.name in commit.choice.successors

    run_until(world, names_it)
    world.run(world.now + 0.5)
    world.crash(first)
    world.run(world.now + 3.0)
    world.mute.clear()
    world.run(world.now + 20.0)
    settle(world)
    assert world.happened["note takeover"] > 0


def test_more_deaths_at_once_lose_what_only_the_dead_held() -> None:
    """The check above can fail: if all peers that the plan names are killed, an answered submission is lost."""

    def play() -> None:
        for seed in range(6):
            world = calm(seed)
            for name in named(world):
                world.crash(name)
            world.run(world.now + 15.0)
            settle(world)

    with pytest.raises(Violation):
        play()


def test_each_fragment_moves_to_its_elected_peer() -> None:
    """The founder leads all fragments at first; later each one is led where it is elected to be, so that every peer has
    a share."""
    world = calm(3, fragments=4)
    world.run(40.0)
    plan = elected("sim", tuple(range(4)), world.names, [])
    assert [leader(world, unit) for unit in range(4)] == [plan[unit][0] for unit in range(4)]
    assert len({leader(world, unit) for unit in range(4)}) == PEERS
    settle(world)


STATE_LAG_S = 6.0
PAUSE_S = 1.3 * STATE_LAG_S + 2 * 0.8 + 1.0
"""The longest transfer of a state plus the usual time between two submissions: no hand-over takes longer."""


def longest_pause(world: World, since: float) -> float:
    return max(b - a for a, b in pairwise(sorted(epochs(world, since).values())))


@pytest.mark.parametrize(("seed", "successors"), [(0, 0), (1, 1), (2, 2)])
def test_a_hand_over_does_not_delay_commits(seed: int, successors: int) -> None:
    """Leading is handed over while a state takes 6 s: commits pause no longer than one transfer and a submission, and
    no submission is lost or counted twice."""
    world = calm(seed, state_lag=STATE_LAG_S, successors=successors)
    world.run(50.0)
    assert leader(world) == "p3"
    assert longest_pause(world, 8.0) < PAUSE_S
    settle(world)


@pytest.mark.parametrize("seed", range(3))
def test_a_fragment_returns_to_its_elected_peer_after_a_restart(seed: int) -> None:
    """It was killed, and starts again without a state, which takes 6 s to come. It isn't named before it holds a state
    that the commits since lead on from: until then no commit waits for it."""
    world = calm(seed, state_lag=STATE_LAG_S)
    world.run(50.0)
    world.crash("p3")
    world.run(70.0)
    assert leader(world) != "p3"
    world.start("p3")
    world.run(110.0)
    assert leader(world) == "p3"
    assert longest_pause(world, 70.0) < STATE_LAG_S / 2
    settle(world)
