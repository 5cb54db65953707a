"""Steps by time: what a hook does in rounds of pace="time", by a clock that a test sets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from p2p_diloco.peer.hook import Hook
from tests.peer.scripted import KEPT, ScriptedNode, hooked, step, taking

H, ROUND_S = 20, 20.0


class Paced:
    """A hook whose steps take `step_s`, from its second round on. The node plans ROUND_S, unless a test says else."""

    def __init__(self, step_s: float, planned_s: float = ROUND_S, **settings: Any) -> None:
        self.clock, self.step_s = SimpleNamespace(now=0.0), step_s
        values = {"sync_every": H, "pace": "time", **settings}
        made: tuple[Hook, ScriptedNode, nn.Module] = hooked(clock=lambda: self.clock.now, **values)
        self.hook, self.node, self.model = made
        step(self.hook, self.model)  # of which nobody knows how long it takes
        self.hook.synchronise()
        self.node.log.clear()
        self.plan(planned_s)

    def plan(self, seconds: float) -> None:
        self.node.memory.trains_for_s = seconds

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now += self.step_s
            step(self.hook, self.model)

    def round(self) -> int:
        """Steps until the next contribution, and how many these were."""
        before, sent = self.hook.standing.metrics.local_step, len(self.node.contributed())
        while len(self.node.contributed()) == sent:
            self.step()
        return self.hook.standing.metrics.local_step - before

    def waiting(self, seconds: Callable[[], float]) -> None:
        """Each commit comes so late."""
        wait_for = self.node.wait_for
        self.node.wait_for = lambda *a, **b: taking(self.clock, seconds(), wait_for)(*a, **b)  # type: ignore[method-assign]


def test_unlike_speeds_end_together() -> None:
    """Speeds 1 : 0.5 : 0.2: H, half of it and a fifth, all at the same moment, weighed by steps; each tells how many it
    has made. What is waited for is no time to train in."""
    peers = [Paced(step_s) for step_s in (1.0, 2.0, 5.0)]
    for peer in peers:
        peer.waiting(lambda: 7.0)
    for number in range(1, 6):
        assert [peer.round() for peer in peers] == [20, 10, 4]
        assert {peer.clock.now for peer in peers} == {number * (ROUND_S + 7.0)}
    assert [peer.node.contributed()[-1]["weight"] for peer in peers] == [20.0, 10.0, 4.0]
    assert [peer.node.contributed()[-1]["every"] for peer in peers] == [20, 10, 4]
    assert [peer.hook.standing.metrics.sync_every for peer in peers] == [20, 10, 4]


def test_what_slows_a_peer_down_shortens_that_very_round() -> None:
    """Another program takes the device after eight of ten steps: the peer stops when the time is up. In the next round
    the steps that are usual are still quick ones, so that the last one ends late; the one after has as many as fit."""
    peer = Paced(2.0)
    peer.round()
    peer.step(8)
    peer.step_s = 8.0
    assert peer.round() == 1
    assert peer.clock.now == 2 * ROUND_S + 4.0
    assert peer.round() == 3
    assert peer.round() == 2  # 16 of 20 s: for 24 the others would wait
    peer.step_s = 2.0
    assert peer.round() == 10


def test_a_pause_takes_time_of_the_round() -> None:
    """The others' steps go on meanwhile, so the next one here may be the last; it is no step's time."""
    peer = Paced(2.0)
    peer.step(2)
    with peer.hook.pause():
        peer.clock.now += 12.0
    assert peer.round() == 2  # rather than eight
    assert peer.hook._rhythm.step_time_s == 2.0


def test_a_round_that_was_missed_gives_way_to_the_next() -> None:
    """A commit without this peer begins a round for it, too: its time is counted from there, and its progress goes out
    with the others' next."""
    peer = Paced(2.0)
    peer.step(6)
    peer.node.epochs[0] += 1
    peer.node.fresh = {0: KEPT}
    peer.node.memory.changed = peer.node.memory.changed + 1
    assert 6 + peer.round() == 7 + 10
    assert peer.node.contributed()[-1]["weight"] == 17.0


@pytest.mark.parametrize("before_s", [0.0, 1000.0])
def test_the_first_round_begins_with_the_first_step(before_s: float) -> None:
    """A peer that has entered may wait for others, or compile, before it trains: that is no part of its round, and no
    step's time."""
    clock = SimpleNamespace(now=0.0)
    hook, node, model = hooked(clock=lambda: clock.now, sync_every=H, pace="time")
    node.memory.trains_for_s = ROUND_S
    clock.now += before_s
    while not node.contributed():
        clock.now += 2.0
        step(hook, model)
    assert hook.standing.metrics.local_step == 1 + 10
    assert hook._rhythm.step_time_s == 2.0


def test_fragments_are_sent_by_time_in_turn() -> None:
    """Each in its share of the time; what is told is of the whole model."""
    peer = Paced(2.0, planned_s=10.0, fragments=2)
    assert [peer.round() for _ in range(4)] == [5, 5, 5, 5]
    assert [sent["fragment"] for sent in peer.node.contributed()] == [0, 1, 0, 1]
    assert [sent["weight"] for sent in peer.node.contributed()] == [5.0, 10.0, 10.0, 10.0]
    assert peer.node.contributed()[-1]["every"] == 10


@pytest.mark.parametrize("step_s", [1.0, 2.0, 5.0])
def test_overlap_is_a_share_of_the_rounds_time(step_s: float) -> None:
    """A result is merged when `overlap_steps` of the fastest peer's steps are over, after a step at least; rounds are
    as long as without."""
    peer = Paced(step_s, overlap_steps=5, merge="rebase")
    assert peer.round() == ROUND_S / step_s
    while peer.hook.standing.metrics.sync_count == 1:
        peer.step()
    assert peer.clock.now == ROUND_S + 5.0 // step_s * step_s
    for _ in range(3):
        peer.round()
    assert peer.clock.now == 4 * ROUND_S


def test_the_runs_step_follows_the_fastest_and_never_falls() -> None:
    """H for each commit, and own steps since: also where a peer makes a fifth of H, misses a round, or is nudged."""
    peer, seen = Paced(5.0), [0]

    def go(times: int) -> None:
        for _ in range(times):
            peer.step()
            seen.append(peer.hook.standing.global_step)

    go(12)
    assert peer.hook.standing.global_step == 4 * H
    go(2)
    peer.node.epochs[0] += 1  # a round without this peer
    peer.node.memory.changed = peer.node.memory.changed + 1
    go(1)
    peer.node.releases = [False, True]
    go(6)
    peer.node.memory.goal = 8
    go(8)
    assert seen == sorted(seen)
    assert peer.hook.standing.global_step >= H * sum(peer.node.epochs)


def changes_h(peer: Paced, every: int) -> None:
    """A round closes without this peer, and the state has another H from then on."""
    node = peer.node
    led_to = node.steps_before + sum(node.epochs) * node.every + node.every
    node.epochs[0] += 1
    node.every, node.steps_before = every, led_to - sum(node.epochs) * every
    node.memory.changed = node.memory.changed + 1


def test_another_h_holds_from_the_merge_of_its_state() -> None:
    """A round under way goes on to the new H; if it has more steps already, it is sent after its next step. The run's
    step never falls, and each round adds its own H."""
    peer, seen = Paced(1.0, pace="steps"), [0]

    def go(times: int) -> None:
        for _ in range(times):
            peer.step()
            seen.append(peer.hook.standing.global_step)

    assert [peer.round(), peer.round()] == [H, H]
    seen.append(peer.hook.standing.global_step)
    go(5)
    changes_h(peer, 30)
    sent = len(peer.node.contributed())
    go(24)
    assert len(peer.node.contributed()) == sent
    go(1)
    assert len(peer.node.contributed()) == sent + 1
    go(10)
    changes_h(peer, 4)
    go(1)
    assert len(peer.node.contributed()) == sent + 1
    go(1)
    assert len(peer.node.contributed()) == sent + 2
    assert [peer.round(), peer.round()] == [4, 4]
    assert seen == sorted(seen)
    assert peer.hook.standing.metrics.sync_every == 4
