"""A training script of a sharded model: each process is one rank of one peer. Options are JSON, output is JSON lines.

Without `rank` it is a peer of one process, and nothing is sharded. Every rank trains on the same data, so that the mean
of their gradients equals that of a single process, to the bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from train import peer_of, say

from p2p_diloco import P2PDilocoError, Peer, UsageError
from p2p_diloco.peer import ranks


class Model(nn.Module):
    """Rows that two ranks share unevenly, or too few rows for both; one parameter tied, one frozen, one not sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)
        self.head = nn.Linear(5, 1)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x) + self.tied(x) * self.frozen[0])
        out: Tensor = self.head(self.second(x)) * self.scale.mean()
        return out


def spread(model: Model, options: dict[str, Any]) -> nn.Module:
    """Distribute the model over all ranks: sharded, except the scale, which is whole on each rank; or replicated.
    `mesh`: the shape of a mesh with copies of the shards. `store`: a file or an address where the ranks meet."""
    from torch.distributed.fsdp import fully_shard

    rank, world = options["rank"], options["world"]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    distributed.init_process_group("gloo", init_method=options["store"], rank=rank, world_size=world)
    if options.get("copied"):
        return nn.parallel.DistributedDataParallel(model)
    shape = tuple(options.get("mesh", [world]))
    mesh = distributed.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "rows")[-len(shape) :])
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.scale, model.frozen})
    return model


def collectives(what: Callable[[], None]) -> int:
    """Counts all calls of torch.distributed's collectives."""
    if not distributed.is_initialized():
        what()
        return 0
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as counting:
        what()
    return int(counting.get_total_counts())


def gather() -> None:
    """A collective that the test makes, not the peer."""
    distributed.all_gather([torch.zeros(1) for _ in range(distributed.get_world_size())], torch.ones(1))


def fingerprint(values: dict[str, Tensor]) -> dict[str, str]:
    """A digest of each value to the bit; a sharded value is gathered by the test."""
    whole = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in values.items()}
    return {name: hashlib.sha256(v.detach().numpy().tobytes()).hexdigest()[:12] for name, v in whole.items()}


def digest_of(peer: Peer) -> str:
    """The digest, or the reason why this rank does not know it."""
    try:
        return peer.digest
    except UsageError as error:
        return error.sentence


def train(peer: Peer, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(options["seed"])
    before, epoch, known = peer.metrics.sync_count, peer.epoch, {}

    def exchange() -> None:
        nonlocal known
        optimizer.step()
        if peer.epoch > epoch:
            known = peer.global_state_dict()

    while not peer.finished:
        x = torch.randn(4, 5, generator=generator)
        loss = (model(x).squeeze() - x.sum(1)).square().mean()
        loss.backward()
        peer.report(loss=loss.item(), samples=len(x))
        called = collectives(exchange)
        optimizer.zero_grad()
        if peer.epoch == epoch:
            continue
        epoch = peer.epoch
        held, metrics = fingerprint(getattr(model, "module", model).state_dict()), peer.metrics
        say("epoch", epoch=epoch, step=peer.global_step, theta=fingerprint(known), local=held, collectives=called,
            sync_count=metrics.sync_count)  # fmt: skip
        if "dies_after" in options and metrics.sync_count - before >= options["dies_after"]:  # exchanges
            os._exit(9)
        time.sleep(options.get("pause_s", 0.0))


def main(options: dict[str, Any]) -> int:
    model: nn.Module = Model()
    if "rank" in options:
        model = spread(model, options)
        say("one gather", collectives=collectives(gather))
    if options.get("far"):
        reached = ranks._reached  # as if rank 0 were on another host
        ranks._reached = lambda place, rank: reached(replace(place, path=""), rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.5)
    try:
        with peer_of(model, optimizer, options) as peer:
            say("in", epoch=peer.epoch, addresses=peer.addresses, local=peer.metrics.local_step, digest=digest_of(peer))
            train(peer, model, optimizer, options)
            say("finished", epoch=peer.epoch, local=fingerprint(getattr(model, "module", model).state_dict()))
    except P2PDilocoError as error:
        say("error", kind=type(error).__name__, sentence=error.sentence)
        return error.exit_code
    except RuntimeError as error:  # torch.distributed's error when another rank is gone
        say("failed", error=str(error))
        return 1
    finally:
        say("left")
    return 0


if __name__ == "__main__":
    status = main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)  # threads of torch.distributed may outlive the other ranks
