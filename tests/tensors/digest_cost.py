"""Measures the time of digests: `python tests/tensors/digest_cost.py`.

An aggregator hashes its base before it averages, and every peer hashes the outer state that a commit leads to. Of a
model of 25 million parameters in bf16, in one process: the outer step of all shards with the two digests, and the
digests alone; the median of several turns, as one object of JSON.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Average
from p2p_diloco.core.messages import Contribution
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.node.run import Run
from p2p_diloco.node.tensor_work import TensorWork
from p2p_diloco.tensors.layout import Layout, ParamSpec

NUMEL, PEERS, TURNS = 25_000_000, 2, 9
META = b"meta"


def took_s(what: Callable[[], object]) -> float:
    """The median of several turns, after one to warm up."""
    times = []
    for _ in range(TURNS + 1):
        began = time.perf_counter()
        what()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main() -> None:
    """Measure, tell."""
    torch.set_num_threads(1)
    config = RunConfig()
    layout = Layout.build((ParamSpec("u", (NUMEL,), "float32"),), config.num_fragments)
    work = TensorWork(Run("run", config, layout), torch.randn(NUMEL))
    shards, delta = range(len(layout.shards)), torch.randn(NUMEL)
    id = ContributionId(1, 1)

    def average(shard: int) -> None:
        base = Version(0, 0, 0, work.store.digest(shard, META))
        encoded = [work.encode(shard, delta, id) for _ in range(PEERS)]
        parts = tuple((str(n), Contribution(shard, base, id, id, 1.0, 1, e)) for n, e in enumerate(encoded))
        began = time.perf_counter()
        work.average(Average(shard, base, parts, META, META))
        spent.append(time.perf_counter() - began)
        work._proposals.clear()

    wholes = []
    for _ in range(TURNS):
        spent: list[float] = []
        for shard in shards:
            average(shard)
        wholes.append(sum(spent))
    whole_s = statistics.median(wholes)
    digest_s = took_s(lambda: [work.store.digest(shard, META) for shard in shards])
    print(
        json.dumps(
            {
                "parameters": NUMEL,
                "shards": len(shards),
                "mean_and_outer_step_s": round(whole_s, 3),
                "one_digest_s": round(digest_s, 4),
                "hashed_gb_per_s": round(2 * 4 * NUMEL / digest_s / 1e9, 1),
                "both_digests_of_the_whole": round(2 * digest_s / whole_s, 3),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
