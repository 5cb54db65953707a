"""Bits of θ and of the outer momentum flip in the memory of real nodes, in each role; the damage is fully repaired."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
import torch
from memory import NodeMemory, Unreachable
from swarm import Member, Swarm, agree, until

from p2p_diloco.core.election import assign
from p2p_diloco.core.rules import Rules
from p2p_diloco.tensors.mean import weighted_mean
from p2p_diloco.tensors.outer import OuterOptimizer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(300)]

NUMEL, STEPS = 60_000, 4
SLICE = 10_000
"""The model is cut into slices of this many elements."""
DELTAS = {"a": 1.0, "b": 2.0, "c": 3.5}
ETA, MU = 0.5, 0.9
CONFIG = {
    "sync_every": STEPS,
    "outer_lr": ETA,
    "outer_momentum": MU,
    "codec": "fp32",
    "aggregation": "mean",
    "step_limit": 0.0,
    "start_peers": 3,
    "heartbeat_interval": 0.5,
    "heartbeat_timeout": 2.0,
}
SAY_AGAIN_S = Rules(run="", fragments=(), heartbeat_timeout=2.0).say_again
AGGREGATOR, SUCCESSOR, PLAIN = range(3)
"""Places in the order of succession."""
# (role, place, bit): peers that notice by a commit come first, so that no peer's next turn is within `say_again`
CASES = [
    (SUCCESSOR, "theta", 0),
    (PLAIN, "theta", 30),
    (SUCCESSOR, "m", 12),
    (AGGREGATOR, "theta", 22),
    (AGGREGATOR, "m", 0),
    (PLAIN, "m", 31),
]
ROUNDS = 2
"""Within this many epochs after a flip all must be repaired."""


class Arithmetic:
    """θ and m after each epoch, computed from constant pseudo-gradients: one element, because all are equal."""

    def __init__(self, peers: dict[str, float]) -> None:
        """`peers`: the pseudo-gradient of each, by peer id."""
        self._peers, self._outer = peers, OuterOptimizer("sgd", ETA, MU, nesterov=True)
        self._theta, self._state = torch.zeros(1), self._outer.init_state(1)
        self._known = [(self._theta, self._state)]

    def at(self, epoch: int) -> tuple[np.float32, np.float32]:
        """(θ, m) of an epoch."""
        while len(self._known) <= epoch:
            theta, state = self._known[-1]
            parts = [(peer, float(STEPS), self._trained(theta, delta)) for peer, delta in self._peers.items()]
            self._known.append(self._outer.step(theta, state, weighted_mean(parts, "fp32", 1)))
        theta, state = self._known[epoch]
        return theta.numpy()[0], state["m"].numpy()[0]

    def _trained(self, theta: torch.Tensor, delta: float) -> bytes:
        local = theta.clone()
        for _ in range(STEPS):
            local -= torch.full_like(theta, delta / STEPS)
        return (theta - local).numpy().tobytes()


@pytest.fixture
def members(swarm: Swarm) -> list[Member]:
    """Three peers in rounds of slightly less than a second."""
    swarm.bootstrap()
    training = {"config": CONFIG, "params": {"w": [NUMEL]}, "step_s": 0.2, "log": "INFO"}
    return [swarm.start(name, delta=delta, **training) for name, delta in DELTAS.items()]


def test_a_flipped_bit_leaves_no_trace(swarm: Swarm, members: list[Member]) -> None:
    """Aggregator, successor and plain contributor, in θ and in the momentum: only the damaged peer logs it, once; the
    run goes on, and soon θ and m on all peers equal the computed values to the bit."""
    peers = {member.wait_for("in")["peer_id"]: member for member in members}
    for member in members:
        member.epoch(2)
    by_arithmetic = Arithmetic({peer: DELTAS[member.name] for peer, member in peers.items()})
    try:
        memory = {peer: NodeMemory(member, NUMEL) for peer, member in peers.items()}
    except Unreachable as why:
        pytest.skip(str(why))
    said_at: dict[str, float] = {}
    for role, what, bit in CASES:
        epoch = max(member.reached() for member in members)
        while True:
            epoch += 1
            order = assign("test", epoch, [0], dict.fromkeys(peers, 1.0))[0]
            for member in members:  # all have merged this epoch, and begin to train on it
                member.epoch(epoch)
            if time.monotonic() - said_at.get(order[role], -SAY_AGAIN_S) >= SAY_AGAIN_S:
                break
        damaged = order[role]
        before = {peer: complaints(member) for peer, member in peers.items()}
        strike(memory[damaged], what, bit, epoch, by_arithmetic)
        for member in members:
            member.epoch(epoch + ROUNDS, 30.0)
        expected = {**before, damaged: before[damaged] + 1}
        assert {peer: complaints(member) for peer, member in peers.items()} == expected, (role, what)
        if role != AGGREGATOR:
            said_at[damaged] = time.monotonic()
        sound(memory, by_arithmetic)
    agree(members, 1)
    assert {member.process.poll() for member in members} == {None}
    for one in memory.values():
        one.close()


def test_every_role_and_place_is_struck() -> None:
    """Guards the test above."""
    assert {case[:2] for case in CASES} == set(product(range(3), ("theta", "m")))


def complaints(member: Member) -> int:
    """How many log lines report that damage is repaired."""
    return member.log().count(" are fetched again")


def strike(memory: NodeMemory, what: str, bit: int, epoch: int, by_arithmetic: Arithmetic) -> None:
    """Flip one bit of the present state, that of `epoch`."""
    theta, m = by_arithmetic.at(epoch)
    with memory.stopped():
        assert memory.epoch() == epoch, "too slow: the round has ended"
        assert (memory.theta() == theta).all()
        places = [memory.theta_at(0)] if what == "theta" else memory.runs_of(m, SLICE)
        assert places, f"no momentum of {m} is on the heap"
        for place in places:  # besides the momentum, freed memory is flipped, which is not read
            memory.flip(place + 4 * (SLICE // 3), bit)


def sound(memory: dict[str, NodeMemory], by_arithmetic: Arithmetic) -> None:
    """Whether every node holds the state of its epoch, to the bit."""

    def is_sound(one: NodeMemory) -> bool:
        with one.stopped():
            theta, m = by_arithmetic.at(one.epoch())
            return (
                one.theta().tobytes() == np.full(NUMEL, theta).tobytes()
                and len(one.runs_of(m, SLICE)) >= NUMEL // SLICE
            )

    for peer, one in memory.items():
        until(lambda one=one: is_sound(one), 20.0, f"a sound state of {peer}")  # a commit may be arriving
