"""Named stories of private peers and relays: runs without a reachable peer, links that are cut, peers that turn."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.test_scenarios import calm, settle, times
from tests.sim.world import World

CLOSE_S = 12.0
"""In these worlds a round takes about two seconds; so many seconds bound every wait of the stories."""


def relayed(seed: int = 0, *private: str, **settings: Any) -> World:
    """A calm world with relays and a bootstrap node, in which these peers are private and all hold the state."""
    world = calm(seed, **{"peers": 4, "relays": True, **settings})
    for name in private:
        world.ways.turn(name)
    world.run(world.now + CLOSE_S)
    return world


def firsts(world: World) -> set[str]:
    """The peers that lead or own, by the newest states."""
    newest = max(world.alive.values(), key=lambda process: process.replica.epoch)
    plans = [newest.replica.of(unit).plan for unit in world.units]
    return {peer for plan in plans for peer in (plan.succession[0], *plan.owners)}


def goes_on(world: World) -> None:
    """Every live peer sees a commit soon, each time for a while."""
    for _ in range(3):
        since = world.now
        world.run(since + CLOSE_S)
        assert all(times(world, name, since) for name in world.alive)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("how", ["pair", "one way"])
def test_a_link_cut_for_a_minute_changes_nothing(how: str, mode: str) -> None:
    """With relays there is no fork, no takeover, no peer is called dead, and each contribution is counted."""
    world = relayed(mode=mode)
    if how == "pair":
        world.cut = {frozenset(("p1", "p2"))}
    else:
        world.mute = {("p1", "p2")}
    world.ways.look()
    before = world.happened["judged"]
    world.run(world.now + 60.0)
    world.cut, world.mute = set(), set()
    world.ways.look()
    goes_on(world)
    assert world.happened["relayed"] > 20
    assert mode == "async" or world.happened["judged"] > before + 20
    assert not [what for what in ("died", "takeover", "fork") if world.happened[f"note {what}"]]
    settle(world)
    assert not any(any(process.trainer.dropped) for process in world.alive.values())


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("peers", [2, 4])
def test_a_run_of_private_peers_trains(peers: int, mode: str) -> None:
    """Through the bootstrap node, also after the founder has died and come back."""
    names = [f"p{i}" for i in range(peers)]
    world = relayed(0, *names, peers=peers, mode=mode)
    goes_on(world)
    world.crash("p0")
    goes_on(world)
    world.start("p0")
    world.run(world.now + CLOSE_S)
    goes_on(world)
    assert world.happened["note fork"] == 0
    settle(world)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_private_peers_aggregate_only_while_no_reachable_one_lives(mode: str) -> None:
    """The reachable peer aggregates, private ones take over when it dies, and it aggregates again when it is back."""
    world = relayed(0, "p0", "p1", "p3", mode=mode, successors=1)
    assert firsts(world) == {"p2"}
    world.crash("p2")
    goes_on(world)
    assert firsts(world) < {"p0", "p1", "p3"}
    world.start("p2")
    world.run(world.now + 2 * CLOSE_S)
    assert firsts(world) == {"p2"}
    goes_on(world)
    assert world.happened["note fork"] == 0
    settle(world)


def test_private_peers_wait_while_no_relay_lives_and_go_on_together() -> None:
    """Below min_peers no peer goes on alone, so the relay's absence leads to no fork."""
    world = relayed(0, "p0", "p1", peers=2, min_peers=2)
    world.ways.switch()
    world.run(world.now + 30.0)
    since = world.now - CLOSE_S
    assert not times(world, "p0", since)
    assert not times(world, "p1", since)
    world.ways.switch()
    goes_on(world)
    assert world.happened["note fork"] == 0
    settle(world)


def test_a_relay_that_dies_is_replaced_by_another() -> None:
    """Without a bootstrap node the reachable peers relay. While one of them lives, no private peer is called dead."""
    world = relayed(0, "p0", "p1", bootstrap=False)
    found_dead = []
    for name in ("p2", "p3"):
        world.crash(name)
        world.run(world.now + CLOSE_S)
        found_dead.append({"p0", "p1"} & (world.alive["p0"].buried | world.alive["p1"].buried))
    assert found_dead == [set(), {"p0", "p1"}], "after the last relay they can't reach each other"
    world.start("p2")
    world.run(world.now + 2 * CLOSE_S)
    goes_on(world)
