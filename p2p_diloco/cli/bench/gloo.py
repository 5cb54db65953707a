"""`python -m p2p_diloco.cli.bench.gloo OPTIONS`: one rank of an all-reduce by gloo, with the same outer step after it.

Law: what data-parallel training has without us: plain TCP, nobody may come, leave or die. On a wire of bf16 the sums
are of bf16 too, for gloo adds what it sends.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from p2p_diloco.cli.bench.parts import EXCHANGE
from p2p_diloco.cli.bench.side import Clock, options, serve
from p2p_diloco.cli.bench.work import Replica


class Rank:
    """One of the ranks, and the answers to what it is asked to do."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._asked, self._clock = asked, Clock()

    def make(self, _: dict[str, Any]) -> dict[str, Any]:
        """Meet the other ranks."""
        asked = self._asked
        dist.init_process_group(
            "gloo",
            init_method=f"file://{asked['meeting']}",
            rank=asked["rank"],
            world_size=asked["peers"],
            timeout=timedelta(seconds=asked["round_s_max"]),
        )
        self._replica = Replica(asked["parameters"], asked["fragments"], asked["rank"])
        dist.barrier()
        return {}

    def train(self, _: dict[str, Any]) -> dict[str, Any]:
        """Move the parameters."""
        self._replica.train()
        return {}

    def round(self, _: dict[str, Any]) -> dict[str, Any]:
        """One all-reduce and one outer step."""
        clock, replica = self._clock, self._replica
        replica.write_pseudo_gradient(clock)
        with clock.part(EXCHANGE):
            mean = replica.mean
            if self._asked["wire"] == "bf16":
                reduced = mean.to(torch.bfloat16)
                dist.all_reduce(reduced)
                mean.copy_(reduced)
            else:
                dist.all_reduce(mean)
            mean.div_(self._asked["peers"])
        replica.take(clock)
        return clock.round()


def main() -> int:
    """Take part until told to end; the exit status."""
    torch.set_num_threads(1)
    rank = Rank(options())
    serve({"make": rank.make, "train": rank.train, "round": rank.round})
    return 0


if __name__ == "__main__":
    sys.exit(main())
