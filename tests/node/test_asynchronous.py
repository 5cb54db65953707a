"""Submissions of an asynchronous run, in numbers: replicas with real outer states, whose messages arrive at once."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from p2p_diloco.config import RunConfig
from p2p_diloco.core import events as e
from p2p_diloco.core.messages import Part
from p2p_diloco.core.replica import Replica
from p2p_diloco.node.run import Run
from p2p_diloco.node.signatures import hash_of
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.layout import Layout, ParamSpec
from p2p_diloco.tensors.outer import OuterOptimizer

LAYOUT = Layout.build((ParamSpec("a", (1,), "float32"),), 1, slice_elements=1)
EXACT = {"codec": "fp32", "aggregation": "mean", "step_limit": 0.0, "nesterov": True}


class Table:
    """Replicas with outer states of one element, whose messages arrive at once and in order; the clock is turned by
    hand."""

    def __init__(self, names: str, size: int, momentum: float = 0.9, **more: Any) -> None:
        config = RunConfig(mode="async", dn_buffer_size=size, outer_lr=1.0, outer_momentum=momentum, **EXACT, **more)
        run = Run("r", config, LAYOUT)
        self.now, self.queue = 0.0, deque[tuple[str, e.Event]]()
        self.replicas = {n: Replica(n, run.rules, incarnation=i + 1 << 20, now=0.0) for i, n in enumerate(names)}
        self.works = {name: SliceWork(run, torch.zeros(1), lambda *of: b"") for name in names}
        self.feed(names[0], e.Found(0, ("0" * 32,)))
        for one in names:
            for other in names:
                if other != one:
                    self.feed(one, e.Discovered(other))
        self.wait(20)

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for name in list(self.replicas):
                self.feed(name, e.Wakeup())

    def feed(self, name: str, event: e.Event) -> None:
        self.queue.append((name, event))
        while self.queue:
            to, next_event = self.queue.popleft()
            if to in self.replicas:
                effects = self.replicas[to].handle(next_event, self.now)
                if isinstance(next_event, e.Found):
                    self.works[to].hold(0, self.replicas[to].logs[0].held.version)
                for effect in effects:
                    self.carry_out(to, effect)
                self.replicas[to].next_wakeup()

    def carry_out(self, name: str, effect: e.Effect) -> None:
        work, queue = self.works[name], self.queue
        match effect:
            case e.Send(to, message):
                if isinstance(message, Part):
                    message = work.part(message.fragment, message.number)
                queue.append((to, e.Received(name, message)))
                there = to in self.replicas
                queue.append((name, e.Delivered(to, message) if there else e.SendFailed(to, message, gone=True)))
            case e.Average():
                queue.append((name, work.average(effect)))
            case e.Apply():
                queue.append((name, work.apply(effect)))
            case e.Fill():
                queue.append((name, work.fill(effect)))
            case e.Roll():
                queue.append((name, work.roll(effect)))
            case e.Accept():
                work.accept(effect)

    def contribute(self, name: str, grad: float) -> None:
        payload = memoryview(bytes(codecs.encode(torch.tensor([grad]), "fp32")))
        self.feed(name, e.Merge())
        self.feed(name, e.Contribute(0, 1.0, 1, (hash_of(payload),), (payload,)))

    def submit(self, name: str, grad: float = 1.0, seconds: int = 2) -> float:
        """A peer's pseudo-gradient, and the value that it is answered with."""
        self.contribute(name, grad)
        self.wait(seconds)
        assert not self.replicas[name].own.flying, self.replicas[name].waiting()
        self.feed(name, e.Merge())
        return self.theta(name).item()

    def theta(self, name: str) -> Tensor:
        return self.works[name].state.slices[0].theta

    def kill_the_leader(self) -> None:
        """Its process is gone, and the others notice before long."""
        newest = max(self.replicas.values(), key=lambda replica: replica.epoch)
        del self.replicas[newest.logs[0].held.plan.succession[0]]
        self.wait(15)


NUMBERS = {
    1: [-1.9, -4.61, -8.049],
    2: [-0.5, -1.9, -2.4, -4.61, -5.11, -8.049],
    3: [-1 / 3, -2 / 3, -1.9, -2.2333333, -2.5666667, -4.61],
}


@pytest.mark.parametrize(("size", "expected"), NUMBERS.items())
def test_each_submitter_is_answered_with_the_number(size: int, expected: list[float]) -> None:
    """Peers in turn, η = 1, μ = 0.9, each with a pseudo-gradient of 1."""
    table = Table("abc", size)
    assert [table.submit("abc"[i % 3]) for i in range(len(expected))] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("size", [2, 3])
def test_the_same_where_the_leader_dies_between_any_two(size: int, after: int) -> None:
    """Momentum, buffer and count go on with the successor; the survivors take the dead one's turns."""
    table, found = Table("abcd", size), []
    for number in range(6):
        if number == after:
            table.kill_the_leader()
        living = sorted(table.replicas)
        found.append(table.submit(living[number % len(living)]))
    assert found == pytest.approx(NUMBERS[size], rel=1e-6)


def test_the_same_where_each_leader_dies_in_turn() -> None:
    """One after another, until two are left."""
    table, found = Table("abcdefgh", 3), []
    for _ in range(6):
        found.append(table.submit(min(table.replicas)))
        table.kill_the_leader()
    assert len(table.replicas) == 2
    assert found == pytest.approx(NUMBERS[3], rel=1e-6)


def test_a_window_counts_all_that_are_in_it() -> None:
    """Three peers within one grace window, N = 3: one commit, and one outer step on their mean."""
    table = Table("abc", 3, async_grace=1.5)
    for name, grad in zip("abc", (0.0, 1.0, 2.0), strict=True):
        table.contribute(name, grad)
    table.wait(3)
    assert {name: table.theta(name).item() for name in "abc"} == pytest.approx(dict.fromkeys("abc", -1.9), rel=1e-6)


def test_full_buffers_are_synchronous_rounds() -> None:
    """Three peers, N = 3, 12 given pseudo-gradients in any order within a round: after each full buffer θ is what a
    synchronous round on their mean makes of it."""
    draw, synchronous = random.Random(5), OuterOptimizer("sgd", 1.0, 0.9)
    table = Table("abc", 3)
    theta, state = torch.zeros(1), synchronous.init_state(1)
    for _ in range(4):
        grads = dict(zip("abc", (draw.gauss(0.0, 1.0) for _ in range(3)), strict=True))
        theta, state = synchronous.step(theta, state, torch.tensor([sum(grads.values()) / 3]))
        found = [table.submit(name, grads[name]) for name in draw.sample("abc", 3)]
        assert found[-1] == pytest.approx(theta.item(), rel=1e-5)


def test_of_many_submissions_each_counts_once() -> None:
    """Ten peers, η = 1, no momentum: θ is the sum of all that was submitted, to the last one."""
    table = Table("abcdefghij", 0, momentum=0.0)
    for number in range(400):
        assert table.submit("abcdefghij"[number * 7 % 10], seconds=0) == -(number + 1.0)
