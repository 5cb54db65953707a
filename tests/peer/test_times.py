"""Where a trainer's time goes, by a clock that a test sets, and what is told of its GPU's memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from p2p_diloco.peer import hook as hook_module
from p2p_diloco.peer.hook import Hook
from tests.peer.scripted import KEPT, ScriptedNode, hooked, step, taking


def every_time(hook: Hook) -> dict[str, float]:
    return hook.standing.metrics.totals()


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_where_the_time_goes(overlap_steps: int) -> None:
    """Every second of training is one part's: what the trainer does is its own, the wait for the others is told apart
    by the node, and what the node doesn't tell is the group's. The hidden parts come beside. Steps take 1 s, pauses 99.
    """
    clock = SimpleNamespace(now=1000.0)
    hook, node, model = hooked(clock=lambda: clock.now, overlap_steps=overlap_steps, merge="rebase")
    node.stood = {"codec": 0.25, "transfer": 1.0, "outer_step": 0.5, "group": 0.25}
    node.hidden = {"codec": 0.125, "transfer": 1.5, "outer_step": 0.0, "group": 0.375} if overlap_steps else {}
    hook._local.write_delta = taking(clock, 0.5, hook._local.write_delta)  # type: ignore[method-assign]
    hook._local.merge = taking(clock, 0.25, hook._local.merge)  # type: ignore[method-assign]
    node.wait_for = taking(clock, 4.0, node.wait_for)  # type: ignore[method-assign]
    began = clock.now
    for _ in range(8 + overlap_steps):
        clock.now += 1.0
        step(hook, model)
        with hook.beside():
            clock.now += 99.0
    times, merges = every_time(hook), 5  # at the first step, before and after each exchange
    assert times["inner_time_s"] == 8 + overlap_steps
    assert times["paused_time_s"] == 99.0 * (8 + overlap_steps)
    assert (times["pseudo_gradient_time_s"], times["merge_time_s"]) == (2 * 0.5, merges * 0.25)
    assert (times["codec_time_s"], times["transfer_time_s"], times["outer_step_time_s"]) == (0.5, 2.0, 1.0)
    assert times["group_time_s"] == 2 * (4.0 - 1.75)
    assert times["waiting_time_s"] == clock.now - began - times["inner_time_s"] - times["paused_time_s"]
    assert times["hidden_time_s"] == (4.0 if overlap_steps else 0.0)
    assert times["hidden_transfer_time_s"] == (3.0 if overlap_steps else 0.0)
    assert times["total_sync_time_s"] == times["waiting_time_s"] - 0.25 + times["hidden_time_s"]
    assert times["total_sync_time_s"] == 2 * hook.standing.metrics.last_sync_time_s
    assert node.memory.last_round is not None
    *seconds, ended = astuple(node.memory.last_round)
    assert seconds == [4.0, 0.75, 2.25, 1.0, 0.5, 0.5, 2.0 if overlap_steps else 0.0]
    assert ended == pytest.approx(time.time(), abs=600.0)


def test_the_log_tells_now_and_then_where_the_time_went(caplog: pytest.LogCaptureFixture) -> None:
    """The first round, then one a minute at most."""
    clock = SimpleNamespace(now=0.0)
    hook, _, model = hooked(clock=lambda: clock.now, sync_every=1)
    with caplog.at_level("INFO", logger="p2p_diloco"):
        for _ in range(8):
            clock.now += 20.0
            step(hook, model)
    assert [message.split(":")[0] for message in caplog.messages] == [
        f"round {number} took 20.00 s" for number in (1, 4, 7)
    ]
    assert "inner 100.0%, encode 0.0%" in caplog.messages[0]


def test_the_node_is_told_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every step: the question takes some time."""
    told: list[tuple[int, int]] = []

    def reserved() -> tuple[int, int]:
        told.append((len(told) + 1, 80))
        return told[-1]

    monkeypatch.setattr(hook_module, "memory_reserved", reserved)
    hook, node, model = hooked()
    assert (node.memory.gpu_reserved, node.memory.gpu_total) == (0, 0)
    for steps in range(1, 13):
        step(hook, model)
        assert len(told) == steps // 4
    assert (node.memory.gpu_reserved, node.memory.gpu_total) == (3, 80)


# -- steps by time


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


def test_a_pause_takes_time_of_the_round() -> None:
    """The others' steps go on meanwhile, so the next one here may be the last; it is no step's time."""
    peer = Paced(2.0)
    peer.step(2)
    with peer.hook.pause():
        peer.clock.now += 12.0
    assert peer.round() == 2  # rather than eight
    assert peer.hook._schedule.step_time_s == 2.0


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
    assert hook._schedule.step_time_s == 2.0


def test_fragments_are_sent_by_time_in_turn() -> None:
    """Each in its share of the time; what is told is of the whole model."""
    peer = Paced(2.0, planned_s=10.0, fragments=2)
    assert [peer.round() for _ in range(4)] == [5, 5, 5, 5]
    assert [sent["fragment"] for sent in peer.node.contributed()] == [0, 1, 0, 1]
    assert [sent["weight"] for sent in peer.node.contributed()] == [5.0, 10.0, 10.0, 10.0]
    assert peer.node.contributed()[-1]["every"] == 10


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
