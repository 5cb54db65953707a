"""Ten rounds of the GPT on three real peers against a plain reference, computed here in the documented order.

From the swarm the reference only takes θ₀ and each peer's parameters just before each exchange; it computes all else by
itself, on whole parameters, in one process, without slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from swarm import Member, Swarm
from torch import Tensor

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

ROUNDS, ETA, MU = 10, 0.7, 0.9
PEERS = {"a": 2, "b": 3, "c": 1}
"""Name and batch size: with weighting="samples" they have unequal weights."""
CASES = [("fp32", 1, "contiguous", 4), ("bf16", 3, "strided", 6)]
"""Codec, fragments, their layout, and H."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run_id(codec: str, fragments: int) -> str:
    return f"{codec}-{fragments}"


def config(codec: str, fragments: int, layout: str, every: int) -> dict[str, Any]:
    return {
        "sync_every": every,
        "num_fragments": fragments,
        "fragment_layout": layout,
        "slice_elements": 2000,
        "codec": codec,
        "outer_lr": ETA,
        "outer_momentum": MU,
        "weighting": "samples",
        "aggregation": "mean",
        "step_limit": 0.0,
        "start_peers": 3,
        "stop_after_epochs": ROUNDS,
        "heartbeat_timeout": 30.0,  # a machine that stands still for a while does not count as dead
    }


@pytest.fixture(scope="module")
def peers(shared_swarm: Swarm) -> Iterator[list[Member]]:
    shared_swarm.bootstrap()
    cases = [{"run_id": run_id(*case[:2]), "config": config(*case)} for case in CASES]
    folder = str(shared_swarm.folder)
    return [
        shared_swarm.start(name, "gpt.py", cases=cases, into=folder, seed=seed, batch=batch, peers=len(PEERS))
        for seed, (name, batch) in enumerate(PEERS.items())
    ]


class Reference:
    """The outer step on whole parameters: one operation a line, each rounded to fp32 separately."""

    def __init__(self, theta: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.theta, self.dtype = dict(theta), dtype
        self.m = {name: torch.zeros_like(value) for name, value in theta.items()}
        self.torch_theta = {name: value.clone().requires_grad_() for name, value in theta.items()}
        self.torch_sgd = {
            name: torch.optim.SGD([value], lr=ETA, momentum=MU, nesterov=True)
            for name, value in self.torch_theta.items()
        }

    def step(self, name: str, contributions: list[tuple[str, float, Tensor]]) -> None:
        """One parameter's outer step from (peer id, weight, local value) of each peer."""
        g = self.mean([(peer, w, self.theta[name] - local) for peer, w, local in contributions])
        m = self.m[name] * MU
        m = m + g
        u = m * MU
        u = u + g
        u = u * ETA
        self.m[name], self.theta[name] = m, self.theta[name] - u
        self.torch_theta[name].grad = g
        self.torch_sgd[name].step()

    def mean(self, deltas: list[tuple[str, float, Tensor]]) -> Tensor:
        """The mean after encoding and decoding."""
        (_, first, delta), *others = sorted(deltas, key=lambda delta: delta[0])
        acc, total = self.on_the_wire(delta), torch.tensor(1.0)
        for _, weight, delta in others:
            ratio = torch.tensor(weight) / torch.tensor(first)
            product = self.on_the_wire(delta) * ratio
            acc = acc + product
            total = total + ratio
        return self.on_the_wire(acc / total)

    def on_the_wire(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).to(torch.float32)


@pytest.mark.parametrize(("codec", "fragments", "layout", "every"), CASES)
def test_the_swarm_is_the_reference_to_the_bit(
    peers: list[Member], codec: str, fragments: int, layout: str, every: int
) -> None:
    """After each exchange the fragment and the global parameters of all peers equal the reference's, bit by bit, and at
    the end their whole models; all digests are equal; torch.optim.SGD with the same means is within 1e-6 of them."""
    lines = [peer.wait_for("done", run=run_id(codec, fragments)) for peer in peers]
    told = [torch.load(line["path"], weights_only=True) for line in lines]
    starts = [exchanges.pop(0) for exchanges in told]
    ids, plan = [start["peer_id"] for start in starts], starts[0]["fragments"]
    assert len(plan) == fragments
    assert sorted(name for part in plan for name in part) == sorted(starts[0]["after"])
    for start in starts:
        assert same(start["after"], starts[0]["after"])
    reference = Reference(starts[0]["after"], DTYPES[codec])
    sent_at = [0] * fragments
    assert [len(exchanges) for exchanges in told] == [ROUNDS * fragments] * 3
    for number, exchange in enumerate(zip(*told, strict=True)):
        fragment, step = number % fragments, (number + 1) * every // fragments
        assert [entry["step"] for entry in exchange] == [step] * 3
        steps, sent_at[fragment] = step - sent_at[fragment], step
        weights = [float(steps * batch) for batch in PEERS.values()]
        for name in plan[fragment]:
            locals_ = [entry["local"][name] for entry in exchange]
            reference.step(name, list(zip(ids, weights, locals_, strict=True)))
        for entry in exchange:
            assert entry["digest"] == exchange[0]["digest"]
            assert same(entry["known"], reference.theta)
            assert same({n: entry["after"][n] for n in plan[fragment]}, {n: reference.theta[n] for n in plan[fragment]})
            others = [name for part in plan[:fragment] + plan[fragment + 1 :] for name in part]
            goes_on = number + 1 < ROUNDS * fragments  # at the end of the run all peers have its model
            expected = entry["local"] if goes_on else reference.theta
            assert all(torch.equal(entry["after"][name], expected[name]) for name in others)
    digests = [entry["digest"] for entry in told[0]]
    assert all(earlier != later for earlier, later in pairwise(digests))
    for name, value in reference.torch_theta.items():
        torch.testing.assert_close(reference.theta[name], value.detach(), rtol=1e-6, atol=1e-6)


def same(here: dict[str, Tensor], there: dict[str, Tensor]) -> bool:
    """Whether two sets of parameters are equal to the bit."""
    assert here.keys() == there.keys()
    return all(torch.equal(here[name].view(torch.int32), there[name].view(torch.int32)) for name in here)
