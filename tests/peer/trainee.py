"""A training script for tests: one process, one peer. It gets a JSON object, and says what it does in JSON lines.

The inner optimizer is SGD with learning rate 1 and the gradient is set by hand, so that in `sync_every` steps each
element of the parameters moves by exactly -`delta`. A line on stdin ends the pauses (`step_s`) between steps; with
`stays` the peer leaves an ended run only once stdin is closed.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from typing import Any

import torch
from torch import nn

from p2p_diloco import Peer, PeerConfig


def say(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, "time": time.time(), **values}), flush=True)


class Tied(nn.Module):
    """A model with a tied parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def build(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    if options.get("kind") == "tied":
        return Tied()
    model = nn.Module()
    for name, size in options.get("params", {"w": 3}).items():
        model.register_parameter(name, nn.Parameter(torch.zeros(size)))
    return model


def train(peer: Peer, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    hurry = threading.Event()
    if "step_s" in options:
        threading.Thread(target=lambda: sys.stdin.readline() and hurry.set(), daemon=True).start()
    epoch = peer.epoch
    while not peer.finished and peer.metrics.local_step < options.get("steps", math.inf):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, options["delta"] / peer.config.sync_every)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer += 1
        optimizer.step()
        if peer.epoch != epoch:
            epoch = peer.epoch
            known = {name: value.tolist() for name, value in peer.global_state_dict().items()}
            say("epoch", epoch=epoch, digest=peer.digest, theta=known)
        hurry.wait(options.get("step_s", 0.0))
    say("finished", epoch=peer.epoch, digest=peer.digest)
    if options.get("stays"):
        sys.stdin.read()


def main(options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format=f"{options['name']}: %(message)s")
    local = PeerConfig(name=options["name"], **options.get("local", {}))
    model = build(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = {name: options[name] for name in ("run_id", "initial_peers", "config")}
    with Peer(model, optimizer, local=local, **given) as peer:
        say("in", addresses=peer.addresses)
        train(peer, model, optimizer, options)
    theta = {name: value.tolist() for name, value in peer.global_state_dict().items()}
    say("after", theta=theta, epoch=peer.epoch, digest=peer.digest)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
