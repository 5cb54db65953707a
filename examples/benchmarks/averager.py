"""The contender `averager`: one process of a group that averages with Hivemind's `DecentralizedAverager`, and then
takes the same outer step as a run.

Law: `DecentralizedAverager` is used as documented, and knows the group's size. A round is the search for a group and
the all-reduce after it. The two are timed separately, because the search takes equally long for small and large models.
"""

from __future__ import annotations

import time

import hivemind
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression

from examples.benchmarks.member import EXCHANGE, SEARCH, Clock, Line
from examples.benchmarks.work import Counterpart

SEARCH_S = 2.0
"""Deadline in seconds for forming a group; Hivemind's own default is 5."""
LOOK_EVERY_S = 0.002


class Contender(Counterpart):
    """One process of the group, with a `DecentralizedAverager` of its own."""

    def open(self, first: Line) -> Line:
        self._dht = hivemind.DHT(
            initial_peers=first.get("addresses", []),
            host_maddrs=self.asked["host_maddrs"],
            start=True,
            use_relay=False,
            use_auto_relay=False,
            startup_timeout=60,
        )
        self.leaving.callback(self._dht.shutdown)
        return {"addresses": [str(address) for address in self._dht.get_visible_maddrs()]}

    def build(self, everyone: list[Line], sent_bytes: int) -> Line:
        peers = self.plan.peers
        self._averager = hivemind.DecentralizedAverager(
            [self.replica.mean],
            self._dht,
            start=True,
            prefix="bench",
            target_group_size=peers,
            min_group_size=peers,
            min_matchmaking_time=SEARCH_S,
            request_timeout=SEARCH_S / 2,
            compression=NoCompression() if self.asked["wire"] == "fp32" else Float16Compression(),
            allow_state_sharing=False,
        )
        self.leaving.callback(self._averager.shutdown)
        return {}

    def round(self) -> Line:
        clock, replica, within_s = Clock(), self.replica, self.plan.round_s_max
        with self._averager.get_tensors() as (vector,):
            replica.write_pseudo_gradient(clock, vector)
        with clock.part(SEARCH):
            give_up_at = time.monotonic() + within_s
            step = self._averager.step(wait=False, require_trigger=True, timeout=within_s)
            while step.stage is not AveragingStage.AWAITING_TRIGGER and not step.done():
                assert time.monotonic() < give_up_at, "no group was found"
                time.sleep(LOOK_EVERY_S)
        with clock.part(EXCHANGE):
            step.allow_allreduce()
            group = step.result(timeout=within_s)
            assert len(group) == self.plan.peers, "the group is not whole"
        with self._averager.get_tensors() as (vector,):
            replica.take(clock, vector)
        return clock.round()
