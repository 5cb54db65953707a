"""A peer that prints where its time went, by its own metrics and by a stopwatch of the script.

Options: `numel` (elements of the model), `step_s` (seconds of an inner step), `pause_s` (a pause after each exchange).
Prints `times` when the run has ended, counted since the first exchange, when both peers have joined: `metrics`, and
`wall_s`, `inner_s` (asleep, and in the inner optimizer itself), `outer_s` (in the rest of `optimizer.step()`) and
`paused_s`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn
from train import say

from p2p_diloco import Peer, PeerConfig
from p2p_diloco.peer.metrics import Metrics

GROWING = [field.name for field in fields(Metrics) if field.name.endswith("_time_s") and "last" not in field.name]


class Stopped(torch.optim.Optimizer):
    """Plain SGD with a stopwatch: where other processes take the processor, its own step may take long."""

    own_s = 0.0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        began = time.perf_counter()
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"])
        self.own_s += time.perf_counter() - began


def main(options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options['name']}: %(message)s")
    torch.set_num_threads(1)
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(options["numel"]))
    optimizer = Stopped(model.parameters())
    asked = {key: options[key] for key in ("run_id", "initial_peers", "config")}
    with Peer(model, optimizer, local=PeerConfig(name=options["name"], open=True), **asked) as peer:
        model.w.grad = torch.full_like(model.w, 1e-3)
        while not peer.metrics.sync_count:
            optimizer.step()
        before, began, optimizer.own_s = asdict(peer.metrics), time.perf_counter(), 0.0
        slept_s, inside_s, paused_s, exchanges = 0.0, 0.0, 0.0, 1
        while not peer.finished:
            sleeping = time.perf_counter()
            time.sleep(options["step_s"])
            stepping = time.perf_counter()
            slept_s += stepping - sleeping
            optimizer.step()
            inside_s += time.perf_counter() - stepping
            if peer.metrics.sync_count > exchanges:
                exchanges, pausing = peer.metrics.sync_count, time.perf_counter()
                with peer.pause():
                    time.sleep(options["pause_s"])
                paused_s += time.perf_counter() - pausing
        wall_s, metrics = time.perf_counter() - began, asdict(peer.metrics)
        times = {name: metrics[name] - before[name] for name in GROWING}
        own_s = optimizer.own_s
        stopped = {"inner_s": slept_s + own_s, "outer_s": inside_s - own_s, "paused_s": paused_s}
        say("times", metrics=times, wall_s=wall_s, exchanges=exchanges, **stopped)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
