"""A peer whose submissions can be found in θ: η = 1, no momentum, whole numbers, asynchronous mode.

Each slice is a parameter with two elements for each life of a peer. This life (`life`) changes only its own two: by
`amounts(k)` with its k-th submission. So θ shows exactly which submissions of which life are counted. Prints the
answered submissions, with the slices that it aggregates; on "end" it stops, and prints θ's elements of all lives.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import torch
from torch import nn
from train import peer_of, say


def amounts(number: int) -> tuple[int, int]:
    """The changes of a life's two elements by its k-th submission."""
    return 1 + number * number % 13, 1 + number % 17


def main(options: dict[str, Any]) -> None:
    life, lives, numel = options["life"], options["lives"], options["numel"]
    model = nn.Module()
    params = [nn.Parameter(torch.zeros(numel)) for _ in range(options["slices"])]
    for index, param in enumerate(params):
        model.register_parameter(f"w{index}", param)
        param.grad = torch.zeros(numel)
    optimizer = torch.optim.SGD(params, lr=1.0)
    config = {"mode": "async", "sync_every": 1, "codec": "fp32", "outer_lr": 1.0, "outer_momentum": 0.0}
    config |= {"step_limit": 0.0, "slice_elements": numel, **options["config"]}
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
    with peer_of(model, optimizer, options, config) as peer:
        say("in", life=life)
        number, sent = 0, 0
        while not ended.is_set():
            for param in params:
                assert param.grad is not None
                param.grad[2 * life], param.grad[2 * life + 1] = amounts(number)
            optimizer.step()
            if (done := peer.metrics.sync_count) > sent:
                told = peer._entered.node.client.ask("ask", "told")
                refused = peer.metrics.refused_submissions
                say("answered", number=number, aggregates=told["aggregates"], peers=len(told["peers"]), refused=refused)
                number, sent = number + 1, done
            time.sleep(options["pause_s"])
        say("last", number=number)
        time.sleep(options["settle_s"])  # meanwhile others' last submissions reach the holders of the fragment
        values = [value[: 2 * lives].tolist() for value in peer.global_state_dict().values()]
        say("theta", values=values)
        time.sleep(options["settle_s"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
