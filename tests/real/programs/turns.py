"""A peer that makes inner steps only on command: lines of JSON on stdin, results on stdout.

{"do": "enter", "run": ..., "config": {...}, "elements": n}    join a run, θ₀ = 0; each element is a parameter
{"do": "submit", "delta": x}                                   one inner step with pseudo-gradient x in each element
{"do": "where"}                                                which shards this peer would commit next
{"do": "leave"}
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from train import say

from p2p_diloco import Peer, PeerConfig


def submit(peer: Peer, elements: list[nn.Parameter], optimizer: torch.optim.Optimizer, delta: float) -> None:
    for element in elements:
        element.grad = torch.tensor([float(delta)])
    optimizer.step()
    metrics = peer.metrics
    say(
        "submitted",
        run=peer.config.mode,
        number=metrics.sync_count,
        values=[element.item() for element in elements],
        staleness=metrics.staleness,
        refused=metrics.refused_submissions,
        epoch=peer.epoch,
        step=peer.global_step,
        finished=peer.finished,
    )


def take_part(told: dict[str, Any], commands: Iterator[dict[str, Any]], options: dict[str, Any]) -> None:
    model = nn.Module()
    elements = [nn.Parameter(torch.zeros(1)) for _ in range(told["elements"])]
    for number, element in enumerate(elements):
        model.register_parameter(f"w{number}", element)
    optimizer = torch.optim.SGD(elements, lr=1.0)
    local = PeerConfig(name=options["name"], open=True, **options.get("local", {}))
    initial_peers = options["initial_peers"]
    with Peer(
        model, optimizer, run_id=told["run"], initial_peers=initial_peers, config=told["config"], local=local
    ) as peer:
        say("in", run=told["run"], epoch=peer.epoch, values=[element.item() for element in elements])
        for command in commands:
            match command:
                case {"do": "submit", "delta": delta}:
                    submit(peer, elements, optimizer, delta)
                case {"do": "where"}:
                    answer = peer._entered.node.client.ask("ask", "told")
                    say("where", aggregates=answer["aggregates"], peers=len(answer["peers"]))
                case {"do": "leave"}:
                    break
    say("out", run=told["run"])


def main(options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options['name']}: %(message)s")
    torch.set_num_threads(1)
    commands = (json.loads(line) for line in sys.stdin)
    for told in commands:
        take_part(told, commands, options)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
