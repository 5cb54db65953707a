"""The contender `gloo`: one rank of a group that averages with gloo's all-reduce, and then takes the same outer step as
a run.

Law: works as data-parallel training without this package does, over plain TCP and in a fixed group. With bf16 on the
wire the sums are bf16 too, because gloo adds the values that it sends.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from examples.benchmarks.member import EXCHANGE, Clock, Line
from examples.benchmarks.work import Counterpart


class Contender(Counterpart):
    """One rank of the group."""

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
