r"""A model sharded over several processes, which together are one peer of a run.

The script is the same with and without a run, on one host or several (torchrun's `--nnodes`):

    torchrun --nproc-per-node 2 examples/sharded.py
    p2p-diloco join --initial-peers ADDRESS --sync-every 50 --start-peers 2 -- \
        torchrun --nproc-per-node 2 examples/sharded.py

In a run the first peer waits for a second one.
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard

from p2p_diloco import Peer

STEPS = 200
OWN_DATA = torch.Generator()
OWN_DATA.seed()  # every rank draws its own data


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Points of a plane, and the height of a hilly landscape over them: [size, 2] and [size, 1]."""
    points = 4 * torch.rand(size, 2, generator=OWN_DATA) - 2
    return points.to(device), ((2 * points[:, :1]).sin() * points[:, 1:].cos()).to(device)


def build() -> nn.Module:
    """The model, sharded: the same on every peer, with one rank or several."""
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    return fully_shard(model)


device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
first = distributed.get_rank() == 0

model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with Peer.from_env(model, optimizer) as peer:  # on every rank; does nothing if no run is named
    for step in range(STEPS):
        points, heights = batch(64)
        loss = F.mse_loss(model(points), heights)
        loss.backward()
        peer.report(loss=loss.item(), samples=len(points))  # of this rank; samples of all ranks are added up
        optimizer.step()  # every sync_every steps, each rank exchanges its own rows here
        optimizer.zero_grad()
        if step % 50 == 0 and first:
            sys.stderr.write(f"step {peer.global_step}  epoch {peer.epoch}  loss {loss.item():.4f}\n")
        if peer.finished:  # at the same step on every rank
            break
    with peer.pause():
        result = build()
        result.load_state_dict(peer.global_state_dict())  # every rank calls it and gets its part
        points, heights = batch(4096)
        with torch.no_grad():
            loss = F.mse_loss(result(points), heights)
        if first:
            sys.stdout.write(f"loss of the global parameters: {loss:.4f}\n")
distributed.destroy_process_group()
