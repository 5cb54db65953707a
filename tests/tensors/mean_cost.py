"""Measures what limits add to the time of a mean: `python tests/tensors/mean_cost.py`.

One shard in bf16 of as many elements as given (2²⁰ unless told otherwise), on one thread, by number of contributions:
processor time in ms of the plain mean, of each aggregation, and of a whole outer step on the plain mean (`TensorWork.
average`: mean, encoding, outer step and digest). Medians of several turns. One object of JSON by number.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import get_args

import torch

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Average
from p2p_diloco.core.messages import Contribution
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.node.run import Run
from p2p_diloco.node.tensor_work import TensorWork
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.layout import Layout, ParamSpec
from p2p_diloco.tensors.limits import Aggregation
from p2p_diloco.tensors.mean import weighted_mean

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
    id, base = ContributionId(1, 1), Version(0, 0, 0, "")
    given = tuple((peer, Contribution(0, base, id, id, weight, 1, raw)) for peer, weight, raw in parts)
    work = TensorWork(Run("r", RunConfig(aggregation="mean"), layout), torch.zeros(numel))

    def mean(method: Aggregation) -> Callable[[], object]:
        return lambda: weighted_mean(parts, "bf16", numel, torch.bfloat16, method)

    row = {method: took_ms(mean(method)) for method in get_args(Aggregation)}
    return {**row, "outer step": took_ms(lambda: work.average(Average(0, base, given, b"", None)))}


def main() -> None:
    """Measure, tell."""
    torch.set_num_threads(1)
    numel = int(sys.argv[1]) if sys.argv[1:] else 2**20
    layout = Layout.build((ParamSpec("p", (numel,), "float32"),), 1, shard_elements=numel)
    for count in (3, 4, 8, 16):
        print(json.dumps({count: measured(count, numel, layout)}), flush=True)


if __name__ == "__main__":
    main()
