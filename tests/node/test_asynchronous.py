"""The asynchronous numbers out of replicas and stores together, also where an aggregator dies between any two."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from p2p_diloco.core.events import (
    Accept,
    Applied,
    Apply,
    Average,
    Averaged,
    Contribute,
    Delivered,
    Discovered,
    Effect,
    Event,
    Fill,
    Filled,
    Found,
    Merge,
    Received,
    Send,
    SendFailed,
    Wakeup,
)
from p2p_diloco.core.messages import State
from p2p_diloco.core.replica import Replica, founding_meta
from p2p_diloco.core.rules import Rules
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.delayed import DelayedNesterov
from p2p_diloco.tensors.layout import Layout, ParamSpec
from p2p_diloco.tensors.outer import OuterOptimizer
from p2p_diloco.tensors.store import Proposal, ShardStore

LAYOUT = Layout.build((ParamSpec("a", (1,), "float32"),), 1, shard_elements=1)


class Table:
    """Replicas with stores of one element, whose messages arrive at once and in order; the clock is turned by hand."""

    def __init__(self, names: str, size: int, momentum: float = 0.9, **rules: Any) -> None:
        outer = OuterOptimizer("sgd", 1.0, momentum)
        self.rules = Rules(run="r", fragments=((0,),), mode="async", dn_buffer_size=size, **rules)
        self.now, self.queue = 0.0, deque[tuple[str, Event]]()
        self.replicas = {n: Replica(n, self.rules, incarnation=i + 1, now=0.0) for i, n in enumerate(names)}
        step = DelayedNesterov(outer, size) if size > 1 else outer
        self.stores = {n: ShardStore(LAYOUT, step, torch.zeros(1)) for n in names}
        self.proposals: dict[tuple[str, str], Proposal] = {}
        founder = names[0]
        self.feed(founder, Found(0, (self.stores[founder].digest(0, founding_meta(0, founder, "worker")),)))
        for one in names:
            for other in names:
                self.feed(one, Discovered(other))
        self.wait(20)

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for name in list(self.replicas):
                self.feed(name, Wakeup())

    def feed(self, name: str, event: Event) -> None:
        self.queue.append((name, event))
        while self.queue:
            to, next_event = self.queue.popleft()
            if to in self.replicas:
                for effect in self.replicas[to].handle(next_event, self.now):
                    self.carry_out(to, effect)
                self.replicas[to].next_wakeup()

    def carry_out(self, name: str, effect: Effect) -> None:
        store, queue = self.stores[name], self.queue
        match effect:
            case Send(to, message):
                if isinstance(message, State):
                    message = State(*self.fields(message), payload=b"".join(store.export(message.shard)))
                queue.append((to, Received(name, message)))
                there = to in self.replicas
                queue.append((name, Delivered(to, message) if there else SendFailed(to, message, gone=True)))
            case Average(_, base, contributions, meta, _, buffered):
                sent = [codecs.decode(c.payload, "fp32", 1) for _, c in contributions]
                mean = bytes(codecs.encode(torch.stack(sent).mean(0) if sent else torch.zeros(1), "fp32"))
                digest = self.proposed(name, mean, meta, len(sent), buffered)
                queue.append((name, Averaged(0, base, effect.number, digest, mean)))
            case Apply(commit, meta, buffered):
                digest = self.proposed(name, commit.payload, meta, len(commit.contributions), buffered)
                queue.append((name, Applied(0, commit.base, digest)))
            case Fill(state, meta):
                proposal = store.load(0, state.payload, meta)
                self.proposals[name, proposal.digest] = proposal
                queue.append((name, Filled(0, state.version, proposal.digest)))
            case Accept(proposals):
                for shard, digest in proposals:
                    store.accept(shard, self.proposals[name, digest])

    def proposed(self, name: str, mean: bytes, meta: bytes, submissions: int, buffered: int) -> str:
        store = self.stores[name]
        proposal = store.restate(0, meta)
        if submissions:
            proposal = store.propose(0, mean, "fp32", meta, submissions, buffered)
        self.proposals[name, proposal.digest] = proposal
        return proposal.digest

    @staticmethod
    def fields(state: State) -> tuple[Any, ...]:
        return (state.shard, state.version, state.term, state.plan, state.counted, state.history, state.buffered)

    def submit(self, name: str, grad: float = 1.0, seconds: int = 2) -> float:
        """A peer's pseudo-gradient, and the value that it is answered with."""
        self.feed(name, Merge())
        self.feed(name, Contribute((0,), 1.0, 1, (bytes(codecs.encode(torch.tensor([grad]), "fp32")),)))
        self.wait(seconds)
        assert self.replicas[name].own.flight is None, self.replicas[name].waiting()
        self.feed(name, Merge())
        return self.theta(name).item()

    def theta(self, name: str) -> Tensor:
        return self.stores[name].theta(0)

    def kill_the_aggregator(self) -> None:
        """Its process is gone, and the others notice before long."""
        newest = max(self.replicas.values(), key=lambda replica: replica.versions[0].epoch)  # type: ignore[union-attr]
        del self.replicas[newest.logs[0].state.plan.succession[0]]
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
def test_the_same_where_the_aggregator_dies_between_any_two(size: int, after: int) -> None:
    """Momentum, buffer and count go on with the successor; the survivors take the dead one's turns."""
    table, found = Table("abcd", size), []
    for number in range(6):
        if number == after:
            table.kill_the_aggregator()
        living = sorted(table.replicas)
        found.append(table.submit(living[number % len(living)]))
    assert found == pytest.approx(NUMBERS[size], rel=1e-6)


def test_the_same_where_each_aggregator_dies_in_turn() -> None:
    """One after another, until two are left."""
    table, found = Table("abcdefgh", 3), []
    for _ in range(6):
        found.append(table.submit(min(table.replicas)))
        table.kill_the_aggregator()
    assert len(table.replicas) == 2
    assert found == pytest.approx(NUMBERS[3], rel=1e-6)


def test_a_window_counts_all_that_are_in_it() -> None:
    """Three peers within one grace window, N = 3: one commit, and one outer step on their mean."""
    table = Table("abc", 3, async_grace=1.5)
    for name, grad in zip("abc", (0.0, 1.0, 2.0), strict=True):
        table.feed(name, Merge())
        table.feed(name, Contribute((0,), 1.0, 1, (bytes(codecs.encode(torch.tensor([grad]), "fp32")),)))
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
