"""Measures what limits add to the time of a mean: `python tests/tensors/mean_cost.py`.

One slice in bf16 of as many elements as given (2²⁰ unless told otherwise), on one thread, by number of contributions:
processor time in ms of the plain mean, of each aggregation, and of the plain mean with its encoding and the
outer step. Medians of several turns. One object of JSON by number.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from p2p_diloco.config import RunConfig
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.layout import Layout, ParamSpec
from p2p_diloco.tensors.limits import Aggregation
from p2p_diloco.tensors.mean import weighted_mean
from p2p_diloco.tensors.outer import OuterOptimizer
from p2p_diloco.tensors.outer_state import OuterState

TURNS = 41


def took_ms(what: Callable[[], object]) -> float:
    times = []
    for _ in range(TURNS):
        began = time.process_time()
        what()
        times.append(time.process_time() - began)
    return round(1000 * statistics.median(times), 2)


def measured(count: int, numel: int, layout: Layout) -> dict[str, float]:
    """A row."""
    source = torch.Generator().manual_seed(count)
    parts = [
        (f"{index:02}", 20.0, memoryview(bytes(codecs.encode(torch.randn(numel, generator=source), "bf16"))))
        for index in range(count)
    ]
    held = OuterState(layout, OuterOptimizer(), torch.zeros(numel), RunConfig().step_limit)

    def mean(method: Aggregation) -> Callable[[], Tensor]:
        return lambda: weighted_mean(parts, "bf16", numel, torch.bfloat16, method)

    def step() -> object:
        return held.step(0, held.slices[0], codecs.encode(mean("mean")(), "bf16"), "bf16")

    row = {method: took_ms(mean(method)) for method in get_args(Aggregation)}
    return {**row, "outer step": took_ms(step)}


def main() -> None:
    """Measure, tell."""
    torch.set_num_threads(1)
    numel = int(sys.argv[1]) if sys.argv[1:] else 2**20
    layout = Layout.build((ParamSpec("p", (numel,), "float32"),), 1, slice_elements=numel)
    for count in (3, 4, 8, 16):
        print(json.dumps({count: measured(count, numel, layout)}), flush=True)


if __name__ == "__main__":
    main()
