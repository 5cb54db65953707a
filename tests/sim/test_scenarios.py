"""Named stories: the guarantees of the protocol, each played in a small world."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core import closing
from p2p_diloco.core.events import Apply
from tests.sim import invariants
from tests.sim.check import check
from tests.sim.face import Face
from tests.sim.process import Process
from tests.sim.settings import PLAIN, Settings
from tests.sim.world import World

FOR_EVER = 1000.0


def calm(seed: int = 0, world: type[World] = World, trace: bool = False, **settings: Any) -> World:
    """A world without random faults, with steps of half a second, in which all peers hold the state."""
    plain = {"peers": 3, "drop": 0.0, "duplicate": 0.0, "delay_mean": 0.02, "step_times": (0.5, 0.5), "interval": 2}
    made = world(seed, Settings(**{**plain, "round_timeout": FOR_EVER, "faults": (), **settings}), trace=trace)
    made.run(5.0)
    made.run(60.0, stop=lambda: len(made.holders()) == made.settings.peers)
    assert len(made.holders()) == made.settings.peers
    return made


def cut(world: World, *side: str) -> None:
    world.cut = {frozenset((a, b)) for a in side for b in world.names if b not in side}


def settle(world: World) -> None:
    """Training stops and exchanges end; then all peers agree, every inner step is accounted for, and in asynchronous
    mode what any trainer was told is counted."""
    world.trainers.training = False
    world.run(world.now + 15.0)
    assert len(invariants.lineage(world)) == 1, invariants.lineage(world)
    invariants.account(world)
    if world.rules.asynchronous:
        invariants.relied_upon(world)


def times(world: World, name: str, since: float = 0.0) -> list[float]:
    """The times at which the peer's fragment 0 moved."""
    return [when for when, who, unit, _ in world.commits if who == name and unit == 0 and when >= since]


def longest_gap(moments: list[float], start: float, end: float) -> float:
    inside = [start, *(t for t in moments if start < t < end), end]
    return max(b - a for a, b in itertools.pairwise(inside))


# -- deaths


@pytest.mark.parametrize(("seed", "silent"), [(0, False), (3, False), (6, False), (9, False), (0, True), (3, True)])
def test_survivors_commit_again_soon(seed: int, silent: bool) -> None:
    """kill -9 of the leader at any moment: besides their own inner steps the others lose less than 3 s. After a silent
    cut no connection closes and no dial is refused; it is noticed within heartbeat_timeout + 2 s."""
    world = calm(seed, peers=4, interval=1)
    moment = 8.0 + seed * (0.27 if silent else 0.13)
    world.run(moment)
    gone = next(iter(world.alive.values())).replica.logs[0].round.leader
    if silent:
        cut(world, gone)
    else:
        world.crash(gone)
    world.run(moment + 15.0)
    within = world.rules.heartbeat_timeout + 2.0 if silent else 3.0
    for name in {*world.names} - {gone}:
        assert longest_gap(times(world, name), moment, moment + 15.0) < within + world.settings.interval * 0.5
    if not silent:
        settle(world)


def test_a_lone_survivor_goes_on() -> None:
    """A lone survivor trains on if min_peers allows; otherwise it waits, and goes on when another peer comes."""
    world = calm(peers=3)
    for name in ("p0", "p2"):
        world.crash(name)
    world.run(20.0)
    assert len(times(world, "p1", 10.0)) >= 5
    strict = calm(peers=3, min_peers=2)
    for name in ("p0", "p2"):
        strict.crash(name)
    strict.run(20.0)
    assert times(strict, "p1", 8.0) == []
    strict.start("p0")
    strict.run(40.0)
    assert len(times(strict, "p1", 25.0)) >= 5
    settle(strict)


# -- restarts


def test_a_power_cut_with_the_newest_disk_back_last() -> None:
    """Two peers have gone on from older disks meanwhile. They are the many, and a disk doesn't know better."""
    world = calm(peers=3)
    for name in ("p0", "p1"):
        world.faults.save(name)
    world.run(20.0)
    world.faults.save("p2")
    newest = world.alive["p2"].replica.versions[0]
    for name in world.names:
        world.crash(name)
    world.run(21.0)
    for name in ("p0", "p1"):
        world.start(name, from_disk=True)
    world.run(28.0)
    gone_on = world.alive["p0"].replica.versions[0]
    assert gone_on.epoch < newest.epoch
    world.start("p2", from_disk=True)
    world.run(45.0)
    for process in world.alive.values():
        assert process.replica.remembers(0, gone_on)
        assert not process.replica.remembers(0, newest)
    settle(world)


# -- partitions


# -- joiners, and peers that stand still


@pytest.mark.parametrize("seed", range(3))
def test_rounds_that_pass_before_the_others_wait_for_it_again(seed: int) -> None:
    """A frozen peer resumes. More than carry_rounds rounds pass before the others notice, so its contributions to them
    come too late; still none of its progress is dropped."""
    world = calm(seed, peers=3, interval=1, step_times=(0.1, 0.15))
    frozen = world.alive["p0"]
    roster = frozen.replica.roster
    # otherwise it may, when it resumes, close a round that the others have closed
    roster.mine = replace(roster.mine, eligible=False)
    world.run(world.now + 5.0)
    frozen.frozen_until = world.now + 20.0
    world.run(world.now + 40.0)
    assert len(times(world, "p0", world.now - 10.0)) > 20  # rounds wait for it again
    settle(world)
    assert not any(frozen.trainer.dropped)


def test_a_joiner_delays_no_round() -> None:
    """While it fetches, and until a commit names it, rounds take as long as before; then it takes part."""
    world = calm(peers=1, interval=6, state_lag=2.0)
    world.names += ["p1", "p2"]
    world.start("p1")
    world.run(40.0)
    assert "p1" in world.alive["p0"].replica.of(0).roll
    usual = longest_gap(times(world, "p0"), 20.0, 40.0)
    joiner = world.start("p2")
    world.run(60.0, stop=lambda: joiner.replica.has_state)
    joined = world.now
    assert joiner.replica.has_state
    assert joined > 42.0
    assert longest_gap(times(world, "p0"), 40.0, joined) <= usual + 0.2
    world.run(joined + 20.0)
    assert longest_gap(times(world, "p0"), joined, world.now) <= usual + world.settings.interval * 0.5 + 0.2
    assert "p2" in world.alive["p0"].replica.of(0).roll
    settle(world)


def test_a_fork_ends_though_a_state_takes_longer_than_a_fetch_may_stand_still() -> None:
    """Its donor is asked again, and staged slices are kept."""
    lag = PLAIN.rules().fetch_again * 1.5
    world = calm(peers=4, interval=4, slices_per_fragment=3, state_lag=lag)
    cut(world, "p0", "p1")
    world.run(world.now + 25.0)
    assert len(invariants.lineage(world)) > 1
    world.cut = set()
    world.run(world.now + 3 * lag + 10.0)
    settle(world)


def test_a_trainer_that_stops_while_its_node_lives() -> None:
    """The first round waits until it is idle, later ones don't; when it trains again it is counted again."""
    world = calm(peers=3)
    stopped = world.alive["p1"]
    stopped.stalled_until = 40.0
    world.run(40.0)
    patience = world.rules.idle_after(0.5) + world.rules.heartbeat_interval + 2 * world.settings.interval * 0.5
    assert longest_gap(times(world, "p0"), 5.0, 40.0) < patience + 1.0
    assert longest_gap(times(world, "p0"), 15.0, 40.0) < 2.0
    assert "p1" not in closing.waited_for(world.alive["p0"].replica.logs[0], 0.0)
    before = world.alive["p0"].replica.of(0).roll["p1"].id
    world.run(60.0)
    assert world.alive["p0"].replica.of(0).roll["p1"].id > before
    settle(world)


# -- memory that changes by itself


def noted(world: World, name: str, text: str) -> int:
    return sum(f" {name} " in line and "Note(" in line and text in line for line in world.lines)


class Unlike(Face):
    """A machine whose outer step rounds differently: none of its slices has the digest that others tell. It does so
    from 8 s on, because half of the peers could else have their first state from it."""

    def _apply(self, process: Process, work: Apply) -> Any:
        done = super()._apply(process, work)
        if process.world.now < 8.0:
            return done
        proposed = self.stores[work.commit.fragment].proposals[work.commit.version]
        proposed[:] = [replace(piece, here=replace(piece.here, chain=b"odd" + piece.here.chain)) for piece in proposed]
        return done


class OneUnlike(World):
    """The last peer's machine computes unlike the others'."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.flips = 1

    def start(self, name: str, found: bool = False, from_disk: bool = False) -> Process:
        self.face = Unlike if name == self.names[-1] else Face
        return super().start(name, found, from_disk)


def test_a_machine_unlike_the_others_repairs_beside_the_rounds() -> None:
    """The run keeps its pace, and every peer's progress is counted. The odd machine notices by the digests that the
    others tell, and fetches slices; no other peer does."""
    world = calm(0, OneUnlike, peers=4, trace=True)
    began, odd = world.now, world.names[-1]
    world.run(began + 60.0)
    assert longest_gap(times(world, "p0"), began, world.now) < 3.0
    assert world.alive["p0"].replica.epoch > 30
    for name in world.names:
        assert bool(noted(world, name, "are fetched again")) == (name == odd)
    before = world.alive["p0"].replica.of(0).roll[odd].epoch
    world.run(world.now + 20.0)
    assert world.alive["p0"].replica.of(0).roll[odd].epoch > before + 5
    assert noted(world, odd, "unlike the other peers") == 1
    assert odd not in world.alive[odd].replica.roster.peers  # else it would probe itself, and find itself dead
    settle(world)


def test_two_machines_unlike_each_other() -> None:
    """A tie decides nothing: no round stalls, and neither fetches."""
    world = calm(0, OneUnlike, peers=2, trace=True)
    world.run(world.now + 30.0)
    lines, epoch = len(world.lines), world.alive["p0"].replica.epoch
    world.run(world.now + 30.0)
    assert world.alive["p0"].replica.epoch > epoch + 15
    assert not any("are fetched again" in line for line in world.lines[lines:])
    settle(world)


# -- data


@pytest.mark.parametrize(("mode", "faults"), [("sync", ("pause",)), ("async", ())])
def test_without_faults_no_progress_is_dropped(mode: str, faults: tuple[str, ...]) -> None:
    """If no peer fails, no position is leased to two peers one after the other, so there is no conflict; all data is
    used. In asynchronous mode no round waits for a peer that pauses, so its lease may go to another."""
    quiet = {"faults": faults, "drop": 0.0, "duplicate": 0.0, "round_timeout": 1000.0}
    world = World(0, Settings(peers=4, mode=mode, samples=200, data_epochs=2, **quiet))
    check(world)
    assert world.data is not None
    assert world.data.used_up_to(400)
    assert not world.happened["conflict"]
