"""A training loop that works in a run or alone. It is the same script either way:

python examples/minimal.py

or on two machines or in two terminals, of which the first waits for the second:

p2p-diloco join --initial-peers ADDRESS --sync-every 50 --start-peers 2 -- python examples/minimal.py
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p2p_diloco import Peer

STEPS = 600
OWN_DATA = torch.Generator()
OWN_DATA.seed()  # every peer draws its own data


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Points of a plane, and the height of a hilly landscape over them: [size, 2] and [size, 1]."""
    points = 4 * torch.rand(size, 2, generator=OWN_DATA) - 2
    return points, (2 * points[:, :1]).sin() * points[:, 1:].cos()


def build() -> nn.Module:
    """The model: the same shapes on every peer. The first weights are the founder's."""
    return nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with Peer.from_env(model, optimizer) as peer:  # does nothing if no run is named
    for step in range(STEPS):
        points, heights = batch(64)
        loss = F.mse_loss(model(points), heights)
        loss.backward()
        peer.report(loss=loss.item(), samples=len(points))
        optimizer.step()  # every sync_every steps, this exchanges with the other peers
        optimizer.zero_grad()
        if step % 100 == 0:
            sys.stderr.write(f"step {peer.global_step}  epoch {peer.epoch}  loss {loss.item():.4f}\n")
        if peer.finished:
            break
    with peer.pause():  # the other peers wait at most pause_timeout
        result = build()
        result.load_state_dict(peer.global_state_dict())  # the result of the run, not this peer's own weights
        points, heights = batch(4096)
        with torch.no_grad():
            sys.stdout.write(f"loss of the global parameters: {F.mse_loss(result(points), heights):.4f}\n")
