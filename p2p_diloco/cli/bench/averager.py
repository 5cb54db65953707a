"""`python -m p2p_diloco.cli.bench.averager OPTIONS`: one of a group of Hivemind's averagers, with the same outer step.

Law: `DecentralizedAverager` as its documentation has it, told how many will come. A round is the search for a group and
the all-reduce after it; the two are timed apart, for the search takes as long for small models as for large ones.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import hivemind
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression

from p2p_diloco.cli.bench.parts import EXCHANGE, SEARCH
from p2p_diloco.cli.bench.side import Clock, options, say, serve
from p2p_diloco.cli.bench.work import Replica

SEARCH_S = 2.0
"""Seconds that a group may take to form; Hivemind's own default is 5."""
LOOK_EVERY_S = 0.002


class Averaging:
    """One of the group, and the answers to what it is asked to do."""

    def __init__(self, asked: dict[str, Any], dht: hivemind.DHT) -> None:
        self._asked, self._dht, self._clock = asked, dht, Clock()
        self._averager: Any = None

    def make(self, _: dict[str, Any]) -> dict[str, Any]:
        """Start the averager, over the vector that pseudo-gradients are written into."""
        asked = self._asked
        self._replica = Replica(asked["parameters"], asked["fragments"], asked["rank"])
        self._averager = hivemind.DecentralizedAverager(
            [self._replica.mean],
            self._dht,
            start=True,
            prefix="bench",
            target_group_size=asked["peers"],
            min_group_size=asked["peers"],
            min_matchmaking_time=SEARCH_S,
            request_timeout=SEARCH_S / 2,
            compression=NoCompression() if asked["wire"] == "fp32" else Float16Compression(),
            allow_state_sharing=False,
        )
        return {}

    def train(self, _: dict[str, Any]) -> dict[str, Any]:
        """Move the parameters."""
        self._replica.train()
        return {}

    def round(self, _: dict[str, Any]) -> dict[str, Any]:
        """Find the others, average, and take the outer step."""
        clock, replica, within_s = self._clock, self._replica, self._asked["round_s_max"]
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
            assert len(group) == self._asked["peers"], "the group is not whole"
        with self._averager.get_tensors() as (vector,):
            replica.take(clock, vector)
        return clock.round()

    def end(self) -> None:
        """Stop the averager."""
        if self._averager is not None:
            self._averager.shutdown()


def main() -> int:
    """Take part until told to end; the exit status."""
    asked = options()
    torch.set_num_threads(1)
    dht = hivemind.DHT(
        initial_peers=asked["initial_peers"],
        host_maddrs=asked["host_maddrs"],
        start=True,
        use_relay=False,
        use_auto_relay=False,
        startup_timeout=60,
    )
    say("dht", addresses=[str(address) for address in dht.get_visible_maddrs()])
    averaging = Averaging(asked, dht)
    try:
        serve({"make": averaging.make, "train": averaging.train, "round": averaging.round})
    finally:
        averaging.end()
        dht.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
