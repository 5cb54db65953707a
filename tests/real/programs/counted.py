"""A peer whose every inner step can be found in θ: η = 1, no momentum, equal weights.

Element i belongs to slot i % `slots`, and an inner step of this peer adds 1 to the elements of its own `slot`. A commit
of n contributions changes a slot by an n-th of the steps that it counts, and leaves uncounted slots unchanged.

Prints "epoch" after each step that ended a round, by its number or by the run's epoch: `before` and `epoch`, the epochs
before and after the step; `theta`, the global value of each slot in each shard; the digest; the steps made and
`sync_count`. It reads them as any script would, one after another: `whole` says that the epoch was the same before and
after. A line on stdin ends the pauses (`step_s`) between steps.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from train import say

from p2p_diloco import Peer, PeerConfig
from p2p_diloco.tensors.partition import slices


class Count(Optimizer):
    """An optimizer step that adds 1 to the elements of this peer."""

    def __init__(self, parameter: nn.Parameter, slot: int, slots: int) -> None:
        super().__init__([parameter], {})
        self._mine = parameter.detach()[slot::slots]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        self._mine.add_(1.0)


def places(numel: int, shard_elements: int, slots: int) -> list[list[int]]:
    """An element of each slot in each shard."""
    starts = [start for start, _ in slices(0, numel, -(-numel // shard_elements))]
    return [[start + (slot - start) % slots for slot in range(slots)] for start in starts]


def look(peer: Peer, at: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Epoch, digest and θ, as the peer reports them."""
    epoch, digest, theta = peer.epoch, peer.digest, peer.global_state_dict()["w"]
    whole, values = peer.epoch == epoch, [theta[shard].tolist() for shard in at]
    return {"epoch": epoch, "whole": whole, "digest": digest, "theta": values}


def main(options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options['name']}: %(message)s")
    logging.getLogger("p2p_diloco").setLevel(options.get("log", "INFO"))
    torch.set_num_threads(1)
    numel, slots, pause_s = options["numel"], options["slots"], options.get("step_s", 0.0)
    config = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "weighting": "uniform", "aggregation": "mean"}
    config |= {"step_limit": 0.0} | options["config"]
    at = places(numel, config["shard_elements"], slots)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(numel))
    optimizer = Count(model.w, options["slot"], slots)
    hurry, steps = threading.Event(), 0
    threading.Thread(target=lambda: sys.stdin.readline() and hurry.set(), daemon=True).start()
    asked = {"run_id": options["run_id"], "initial_peers": options["initial_peers"], "config": config}
    with Peer(model, optimizer, local=PeerConfig(name=options["name"], open=True), **asked) as peer:
        say("in", **look(peer, at))
        every = peer.config.sync_every
        while not peer.finished:
            hurry.wait(pause_s)
            before, steps = peer.epoch, steps + 1
            optimizer.step()
            if steps % every == 0 or peer.epoch != before:
                seen, count = look(peer, at), peer.metrics.sync_count
                moved = seen["whole"] and seen["epoch"] > before
                say("epoch", before=before, synced=moved, step=steps, sync_count=count, **seen)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
