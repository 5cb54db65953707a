"""Two ranks of a sharded model as one peer, beside a plain one: real processes, torch.distributed over gloo, p2pd."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm import MARK, PROGRAMS, ROOT, Line, Member, Swarm, until

sys.path.insert(0, str(PROGRAMS))

from ranks import Model, fingerprint

pytest.importorskip("torch.distributed.fsdp", reason="this torch has no fully_shard")
if not hasattr(torch.distributed.fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

EVERY, ETA, MU = 3, 0.5, 0.5
CONFIG = {
    "sync_every": EVERY,
    "num_fragments": 1,
    "slice_elements": 20,  # several slices, whose borders are not those of the rows
    "codec": "fp32",
    "outer_lr": ETA,
    "outer_momentum": MU,
    "heartbeat_interval": 0.5,
    "heartbeat_timeout": 30.0,
}


def start_group(swarm: Swarm, name: str, *, each: Sequence[dict[str, Any]] = ({}, {}), **options: Any) -> list[Member]:
    """Start the ranks of one peer; `each`: additional options for each rank."""
    store = f"file://{swarm.folder}/store-{name}"
    return [
        swarm.start(
            f"{name}-{rank}", "ranks.py", **{"rank": rank, "world": len(each), "store": store, **options, **own}
        )
        for rank, own in enumerate(each)
    ]


def meet(swarm: Swarm, member: Member) -> Line:
    """Wait until the peer is in its run, so that others can join through it."""
    line = member.wait_for("in")
    swarm.addresses = line["addresses"]
    return line


class Twin:
    """The same computation as a peer's, in this process and on whole parameters."""

    def __init__(self, seed: int) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.005, momentum=0.5)
        self.generator = torch.Generator().manual_seed(seed)

    def train(self) -> None:
        for _ in range(EVERY):
            x = torch.randn(4, 5, generator=self.generator)
            (self.model(x).squeeze() - x.sum(1)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


class Reference:
    """Two plain peers, and the outer step for whole parameters."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.twins = [Twin(seed) for seed in seeds]
        trained = ((n, p) for n, p in self.twins[0].model.named_parameters() if p.requires_grad)
        self.theta = {name: p.detach().clone() for name, p in trained}
        self.m = {name: torch.zeros_like(p) for name, p in self.theta.items()}

    @torch.no_grad()
    def exchange(self) -> dict[str, str]:
        """One outer step with the mean; every model is loaded with the result. Returns its fingerprint."""
        for name, theta in self.theta.items():
            one, other = (theta - dict(twin.model.named_parameters())[name] for twin in self.twins)
            g = (one + other) / 2
            self.m[name] = self.m[name] * MU + g
            self.theta[name] = theta - (self.m[name] * MU + g) * ETA
            for twin in self.twins:
                dict(twin.model.named_parameters())[name].copy_(self.theta[name])
        return fingerprint(self.twins[0].model.state_dict())

    def rounds(self, count: int) -> list[dict[str, str]]:
        told = []
        for _ in range(count):
            for twin in self.twins:
                twin.train()
            told.append(self.exchange())
        return told


ROUNDS = 4
FAR = {"far": True}
"""The option of a rank that takes itself to be on another host than rank 0."""


@pytest.mark.parametrize(
    ("each", "spread"),
    [
        pytest.param(({}, {}), {}, id="fully_shard", marks=pytest.mark.chaos),
        pytest.param(({}, {}), {"copied": True}, id="DistributedDataParallel", marks=pytest.mark.chaos),
        pytest.param(({}, FAR), {}, id="two hosts", marks=pytest.mark.chaos),
        pytest.param(({}, FAR), {"copied": True}, id="two hosts, DistributedDataParallel", marks=pytest.mark.chaos),
        pytest.param(({}, {}, FAR, FAR), {"mesh": [2, 2]}, id="two hosts, HSDP"),
    ],
)
def test_ranks_train_as_one_process(swarm: Swarm, each: Sequence[dict[str, Any]], spread: dict[str, Any]) -> None:
    """A model sharded over ranks (rows uneven, too few for all, tied, frozen, not sharded), or replicated to them, on
    one host or two, and a plain peer get the parameters of two plain peers, to the bit, in each round; all ranks see
    the same steps; and the peer calls no collective, so no parameter is gathered."""
    config = {**CONFIG, "start_peers": 2, "stop_after_epochs": ROUNDS}
    group = start_group(swarm, "group", each=each, config=config, seed=1, **spread)
    meet(swarm, group[0])
    alone = swarm.start("alone", "ranks.py", config={}, seed=2)
    assert len(group[0].last("in")["digest"]) > 20
    for member in group[1:]:
        assert member.wait_for("in")["digest"] == group[0].last("in")["digest"]
    rounds, expected = ROUNDS, Reference([1, 2]).rounds(ROUNDS)
    for member in (*group, alone):
        member.wait_for("finished", epoch=rounds)
        assert member.status() == 0
        lines = member.lines("epoch")
        assert [line["theta"] for line in lines] == expected
        assert [line["local"] for line in lines] == expected
        assert [line["step"] for line in lines] == [EVERY * (n + 1) for n in range(rounds)]
        assert [line["collectives"] for line in lines] == [0] * rounds
    assert {member.last("one gather")["collectives"] for member in group} == {1}  # the counter works
    assert not list(Path("/tmp").glob("p2p-diloco-*/ranks"))


def in_step(lines: list[Line]) -> list[Line]:
    """The lines of epochs that the peer took part in, after another such epoch: no peer advances without it, so the θ
    that it reads is that epoch's."""
    before = zip(lines, lines[1:], lines[2:], strict=False)
    return [c for a, b, c in before if a["sync_count"] < b["sync_count"] < c["sync_count"]]


def test_a_rank_that_dies_ends_its_peer_alone(swarm: Swarm) -> None:
    """If any rank of a group dies, also one on another host, the other one ends too, their node leaves, and the run
    goes on. A group that is started again joins the run at its present epoch, with optimizer and steps from its
    checkpoint."""
    kept = {"checkpoint_dir": str(swarm.folder / "kept"), "save_every": 1, "restart_wait": 1.0}
    other = swarm.start("other", "ranks.py", config=CONFIG, seed=2, pause_s=0.1)
    meet(swarm, other)
    for dying in (1, 0):
        each = [{"dies_after": 5} if rank == dying else {} for rank in (0, 1)]
        each[1] |= FAR if dying else {}
        group = start_group(swarm, f"group-{dying}", each=each, config={}, seed=1, local=kept)
        if dying == 0:
            assert group[0].wait_for("in")["local"] >= EVERY
        for rank in group:
            rank.wait_for("in")
        assert group[dying].status(120) == 9
        survivor = group[1 - dying]
        assert survivor.status(120) == 1
        assert survivor.lines("failed") or survivor.lines("error", kind="RankDied")
        theirs = {line["epoch"]: line["theta"] for line in other.lines("epoch")}
        shared = [line for line in in_step(survivor.lines("epoch")) if line["epoch"] in theirs]
        assert shared
        assert all(line["theta"] == theirs[line["epoch"]] for line in shared)
        other.epoch(other.reached() + 3, 60.0)
    until(lambda: len(other.family()) <= 4, 30.0, "the dead peers' processes are gone")


def test_the_example_is_one_peer_under_torchrun(swarm: Swarm) -> None:
    """`p2p-diloco join -- torchrun examples/sharded.py`: its ranks found a run, end it, and evaluate its result."""
    swarm.bootstrap()
    join = [
        "-m", "p2p_diloco", "join", "--initial-peers", *swarm.addresses, "--sync-every", "20", "--stop-after-epochs",
        "3", "--heartbeat-timeout", "2", "--", sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", "2", str(ROOT / "examples" / "sharded.py"),
    ]  # fmt: skip
    environment = {**os.environ, MARK: swarm.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *join], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss of the global parameters: ")
    assert "step 51  epoch 2" in done.stderr
