"""One of a group of Hivemind's averagers, with the same outer step.

Law: `DecentralizedAverager` as its documentation has it, told how many will come. A round is the search for a group and
the all-reduce after it; the two are timed apart, for the search takes as long for small models as for large ones.
"""

from __future__ import annotations

import time

import hivemind
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression

from p2p_diloco.cli.bench.member import EXCHANGE, SEARCH, Clock, Line
from p2p_diloco.cli.bench.work import Counterpart

SEARCH_S = 2.0
"""Seconds that a group may take to form; Hivemind's own default is 5."""
LOOK_EVERY_S = 0.002


class Contender(Counterpart):
    """One of the group."""

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
