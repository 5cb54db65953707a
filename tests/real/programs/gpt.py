"""A peer that trains the built-in GPT on bytes of its own in several short runs, and keeps what it exchanged.

For each case, in the folder `into`: `<name>-<run_id>.pt`, a list with one entry per exchange of `local` (the
parameters just before it, by name), `after` (the model's just after), `known` (the global ones) and `digest`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from train import peer_of, say

from p2p_diloco.trainer.gpt import GPT, GPTConfig

SHAPE = GPTConfig(layers=3, width=16, heads=2, context=16)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def run(case: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    model = GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(options["seed"])
    exchanges: list[dict[str, Any]] = []
    local: dict[str, Tensor] = {}
    optimizer.register_step_post_hook(lambda *_: local.update(snapshot(model)))  # before the peer's, which exchanges
    with peer_of(model, optimizer, {**options, **case}, case["config"]) as peer:
        while len(peer.peers) < options["peers"]:  # rounds here are shorter than the time in which peers meet
            time.sleep(0.05)
        exchanges.append({"after": snapshot(model), "fragments": peer.plan.fragments, "peer_id": peer.peer_id})
        while not peer.finished:
            tokens = torch.randint(0, 256, (options["batch"], SHAPE.context + 1), generator=generator)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            peer.report(loss=loss.item(), samples=options["batch"])
            before = peer.metrics.sync_count
            optimizer.step()
            optimizer.zero_grad()
            if peer.metrics.sync_count != before:
                known = dict(peer.global_state_dict())
                exchanges.append(
                    {
                        "step": peer.metrics.local_step,
                        "local": dict(local),
                        "after": snapshot(model),
                        "known": {name: known[name] for name in local},
                        "digest": peer.digest,
                    }
                )
    return exchanges


def main(options: dict[str, Any]) -> None:
    for case in options["cases"]:
        path = Path(options["into"]) / f"{options['name']}-{case['run_id']}.pt"
        torch.save(run(case, options), path)
        say("done", run=case["run_id"], path=str(path))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
