"""A peer that exchanges its model after every inner step, while its main thread idles or spins as told.

Lines on stdin: "busy" (from the contribution until its commits have arrived, a pure Python loop that gives up the
interpreter only when forced to), "idle", "leave". For every exchange it prints how long it took, what the main thread
was doing, and the speed of its loop: during the exchange, and before it while it does the same. The optimizer's hook is
in a second thread, so that the main thread can work while the hook waits.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any

import torch
from torch import nn
from train import say

from p2p_diloco import Peer, PeerConfig
from p2p_diloco.peer import session
from p2p_diloco.peer.hook import Hook
from p2p_diloco.peer.merging import Flight

BETWEEN, UNDER_WAY = threading.Event(), threading.Event()
"""Nothing is exchanged; an exchange is in the node's hands."""
PAUSE_S = 0.5
"""How long nothing is."""


class Pace:
    """The speed of the main thread's loop."""

    def __init__(self) -> None:
        self.turns, self.seconds = 0, 0.0

    def spin(self) -> None:
        """Spin for some milliseconds."""
        began = time.perf_counter()
        sum(i * i for i in range(20_000))
        self.turns, self.seconds = self.turns + 1, self.seconds + time.perf_counter() - began

    def read(self) -> float:
        """Turns a second since the last call; 0: there was none."""
        turns, seconds, self.turns, self.seconds = self.turns, self.seconds, 0, 0.0
        return turns / seconds if seconds else 0.0


ALONE, BESIDE = Pace(), Pace()


class TellingHook(Hook):
    """A hook that reports when the node has its exchange."""

    def _wait_for_commits(self, flight: Flight) -> float | None:
        UNDER_WAY.set()
        try:
            return super()._wait_for_commits(flight)
        finally:
            UNDER_WAY.clear()


session.Hook = TellingHook


def train(options: dict[str, Any], doing: list[str], entered: threading.Event) -> None:
    torch.set_num_threads(1)
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.zeros(options["numel"])))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    peer = Peer(
        model,
        optimizer,
        run_id=options["run_id"],
        initial_peers=options["initial_peers"],
        config=options["config"],
        local=PeerConfig(name=options["name"], open=True),
    )
    with peer:
        say("in", addresses=peer.addresses, epoch=peer.epoch)
        entered.set()
        model.w.grad = torch.full_like(model.w, 1e-3)
        while not peer.finished and doing[-1] != "leave":
            state = tuple(doing)
            BETWEEN.set()
            time.sleep(PAUSE_S)
            BETWEEN.clear()
            optimizer.step()
            pace = {"alone": ALONE.read(), "beside": BESIDE.read()}
            if len(state) == len(doing):  # the same during the whole exchange
                metrics = peer.metrics
                took = {"took_s": metrics.last_sync_time_s, **pace}
                say("exchange", doing=doing[-1], turn=len(doing), epoch=peer.epoch, **took)


def main(options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options['name']}: %(message)s")
    doing, entered = ["idle"], threading.Event()
    threading.Thread(target=lambda: doing.extend(line.strip() for line in sys.stdin), daemon=True).start()
    training = threading.Thread(target=train, args=(options, doing, entered))
    training.start()
    entered.wait()
    while training.is_alive():
        if BETWEEN.is_set() and doing[-1] == "busy":
            ALONE.spin()
        elif UNDER_WAY.is_set() and doing[-1] == "busy":
            BESIDE.spin()
        elif not UNDER_WAY.wait(0.02) or doing[-1] != "busy":
            training.join(0.02)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
