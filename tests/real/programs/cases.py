"""A peer of several short runs, one after another: `cases` in the options, each a run of its own.

A case: `run_id`, `config`, `theta` (θ₀ of every element), `deltas` (this peer's pseudo-gradient of each element and
round) and `samples` (reported over each round). Says the model's values after every exchange, and the digest.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import torch
from torch import nn
from train import say

from p2p_diloco import Peer, PeerConfig


def run(case: dict[str, Any], options: dict[str, Any]) -> None:
    model = nn.Module()
    w = nn.Parameter(torch.full((len(case["deltas"]),), float(case["theta"])))
    model.register_parameter("w", w)
    optimizer = torch.optim.SGD([w], lr=1.0)
    local = PeerConfig(name=options["name"])
    with Peer(
        model,
        optimizer,
        run_id=case["run_id"],
        initial_peers=options["initial_peers"],
        config=case["config"],
        local=local,
    ) as peer:
        every = peer.config.sync_every
        while not peer.finished:
            w.grad = torch.tensor(case["deltas"]) / every
            if case.get("samples"):
                peer.report(samples=case["samples"] // every)
            optimizer.step()
            if peer.metrics.local_step % every == 0:
                known = peer.global_state_dict()["w"].tolist()
                say(
                    "epoch",
                    run=case["run_id"],
                    epoch=peer.epoch,
                    values=w.detach().tolist(),
                    known=known,
                    digest=peer.digest,
                    step=peer.global_step,
                )


def main(options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options['name']}: %(message)s")
    for case in options["cases"]:
        run(case, options)
        say("done", run=case["run_id"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
