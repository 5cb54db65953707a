"""One rank of an all-reduce by gloo, with the same outer step after it.

Law: what data-parallel training has without us: plain TCP, and a fixed group. On a wire of bf16 the sums are of bf16
too, for gloo adds what it sends.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from p2p_diloco.cli.bench.member import EXCHANGE, Clock, Line
from p2p_diloco.cli.bench.work import Counterpart


class Contender(Counterpart):
    """One of the ranks."""

    def build(self, everyone: list[Line], sent_bytes: int) -> Line:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.asked['meeting']}",
            rank=self.asked["rank"],
            world_size=self.plan.peers,
            timeout=timedelta(seconds=self.plan.round_s_max),
        )
        dist.barrier()
        return {}

    def round(self) -> Line:
        clock, replica = Clock(), self.replica
        replica.write_pseudo_gradient(clock)
        with clock.part(EXCHANGE):
            mean = replica.mean
            if self.asked["wire"] == "bf16":
                reduced = mean.to(torch.bfloat16)
                dist.all_reduce(reduced)
                mean.copy_(reduced)
            else:
                dist.all_reduce(mean)
            mean.div_(self.plan.peers)
        replica.take(clock)
        return clock.round()
