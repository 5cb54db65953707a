"""A peer whose use of each sample can be found in θ: sample i has the element i, and each inner step an element of its
own.

With lr 1, η = 1 and no momentum, an inner step subtracts 1 from the elements of its samples and from its own. So θ
shows which steps are counted, and what all counted steps together have used. Each step is printed before it is made.
At the end θ is written to a file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from train import peer_of, say


class Numbers(Dataset[int]):
    """Each sample is its own number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Counting(IterableDataset[int]):
    """The same numbers as a stream, which knows no length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


def read(lines: list[str]) -> torch.Tensor:
    """The samples of a text that has the number of each line."""
    return torch.tensor([int(line) for line in lines])


def main(options: dict[str, Any]) -> None:
    samples, life, ticks = options["samples"], options["life"], options["ticks"]
    numel = samples + options["lives"] * ticks
    model = nn.Module()
    weight = nn.Parameter(torch.zeros(numel))
    model.register_parameter("weight", weight)
    weight.grad = torch.zeros(numel)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    config = {"codec": "fp32", "outer_lr": 1.0, "outer_momentum": 0.0, "aggregation": "mean", "weighting": "uniform"}
    config |= {"step_limit": 0.0, "slice_elements": options.get("slice_elements", numel), **options["config"]}
    if "caches" in options:
        options["local"] = {"cache_dir": f"{options['caches']}/{life}", **options.get("local", {})}
    with peer_of(model, optimizer, options, config) as peer:
        say("in", life=life)
        more: dict[str, Any] = {}
        dataset: Any = Numbers(samples)
        if "slices" in options:
            dataset, more = peer.slices(options["slices"]).samples, {"collate_fn": read}
        if "stream" in options:
            dataset = Counting(samples)
        shard = peer.shard(dataset, epochs=options["epochs"], length=options.get("stream"))
        loader = shard.loader(batch_size=options["batch"], num_workers=options.get("workers", 0), **more)
        tick, accumulate = 0, options.get("accumulate", 1)

        def step() -> None:
            optimizer.step()
            weight.grad.zero_()
            time.sleep(options["step_s"])

        while not shard.complete:
            made = 0
            for made, batch in enumerate(loader, 1):
                say("step", tick=tick, batch=batch.tolist(), used=shard.used, epoch=peer.epoch)
                weight.grad[batch] = 1.0
                weight.grad[samples + life * ticks + tick] = 1.0
                tick += 1
                if made % accumulate == 0:
                    step()
            if made % accumulate:
                step()
        say("end", complete=shard.complete, used=shard.used, dropped=peer.metrics.dropped_samples)
        np.save(options["out"], peer.global_state_dict()["weight"].numpy())
        say("theta")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
