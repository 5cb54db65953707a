"""Measures what the step limit adds to an outer step: `python tests/tensors/step_limit_cost.py`.

One slice in bf16 with SGD, on one thread, by its number of elements: processor time in ms of what a peer computes for
another peer's commit (the check of the payload's values, decoding, the outer step, the digest and the copy into θ),
with the setting step_limit at 0 and at its default, measured in turns. The median of each, and the median of the ratios
of neighbours, as one object of JSON by number.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from p2p_diloco.config import RunConfig
from p2p_diloco.node.slice_work import check_values
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.layout import Layout, ParamSpec
from p2p_diloco.tensors.outer import OuterOptimizer
from p2p_diloco.tensors.outer_state import OuterState

TURNS = 101


def applying(numel: int, step_limit: float) -> Callable[[], None]:
    """What a peer computes for another peer's commit."""
    layout = Layout.build((ParamSpec("p", (numel,), "float32"),), 1, slice_elements=numel)
    held = OuterState(layout, OuterOptimizer(), torch.zeros(numel), step_limit)
    payload = memoryview(bytes(codecs.encode(torch.randn(numel, generator=torch.Generator().manual_seed(0)), "bf16")))

    def apply() -> None:
        check_values(payload, "bf16", numel)
        held.step(0, held.slices[0], payload, "bf16")

    return apply


def took_ms(what: Callable[[], None]) -> float:
    began = time.process_time()
    what()
    return 1000 * (time.process_time() - began)


def measured(numel: int) -> dict[str, float]:
    """A row."""
    without, limited = applying(numel, 0.0), applying(numel, RunConfig().step_limit)
    pairs = [(took_ms(without), took_ms(limited)) for _ in range(TURNS)][3:]
    return {
        "without": round(statistics.median(a for a, _ in pairs), 3),
        "with": round(statistics.median(b for _, b in pairs), 3),
        "ratio": round(statistics.median(b / a for a, b in pairs), 2),
    }


def main() -> None:
    """Measure, tell."""
    torch.set_num_threads(1)
    for numel in map(int, sys.argv[1:] or ("9000", "131072", "1048576")):
        print(json.dumps({numel: measured(numel)}), flush=True)


if __name__ == "__main__":
    main()
