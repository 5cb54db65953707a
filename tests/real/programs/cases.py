"""A peer of several short runs, one after another: `cases` in the options, each its own run.

A case has `run_id`, `config`, `theta` (θ₀ of every element), `deltas` (this peer's pseudo-gradient of each element and
round) and `samples` (reported over each round). Each element is a separate parameter. Prints the model's values after
every exchange, and the digest.
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
    elements = [nn.Parameter(torch.tensor([float(case["theta"])])) for _ in case["deltas"]]
    for number, element in enumerate(elements):
        model.register_parameter(f"w{number}", element)
    optimizer = torch.optim.SGD(elements, lr=1.0)
    local = PeerConfig(name=options["name"], open=True)
    with Peer(
        model,
        optimizer,
        run_id=case["run_id"],
        initial_peers=options["initial_peers"],
        config=case["config"],
        local=local,
    ) as peer:
        every, exchanges = peer.config.sync_every, 0
        while not peer.finished:
            for element, delta in zip(elements, case["deltas"], strict=True):
                element.grad = torch.tensor([delta]) / every
            if case.get("samples"):
                peer.report(samples=case["samples"] // every)
            optimizer.step()
            if peer.metrics.sync_count > exchanges:
                exchanges = peer.metrics.sync_count
                known = [value.item() for value in peer.global_state_dict().values()]
                say(
                    "epoch",
                    run=case["run_id"],
                    epoch=peer.epoch,
                    values=[element.item() for element in elements],
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
