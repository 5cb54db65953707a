"""A peer that exchanges its model after every inner step; meanwhile its main thread does what it is told.

Lines on stdin: "busy" (from the contribution until its commits are there, a pure Python loop that gives the interpreter
away only when made to), "idle", "leave". Says of every exchange how long it took, and what the main thread was doing.
The optimizer's hook is in a second thread, so that something can be done in this process while it waits.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from typing import Any

import torch
from torch import nn
from train import say

from p2p_diloco import Peer, PeerConfig
from p2p_diloco.peer import peer as peer_module
from p2p_diloco.peer.hook import Hook

UNDER_WAY = threading.Event()
"""An exchange is in the node's hands."""


class TellingHook(Hook):
    """A hook that tells when its exchange is in the node's hands."""

    def _wait_for_release(self, n: int) -> bool:
        UNDER_WAY.set()
        try:
            return super()._wait_for_release(n)
        finally:
            UNDER_WAY.clear()


peer_module.Hook = TellingHook


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
        local=PeerConfig(name=options["name"]),
    )
    with peer:
        say("in", addresses=peer.addresses, epoch=peer.epoch)
        entered.set()
        model.w.grad = torch.full_like(model.w, 1e-3)
        while not peer.finished and doing[-1] != "leave":
            state = tuple(doing)
            optimizer.step()
            if len(state) == len(doing):  # the same all the time
                metrics = peer.metrics
                say("exchange", doing=doing[-1], turn=len(doing), epoch=peer.epoch, took_s=metrics.last_sync_time_s)


def main(options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options['name']}: %(message)s")
    doing, entered = ["idle"], threading.Event()
    threading.Thread(target=lambda: doing.extend(line.strip() for line in sys.stdin), daemon=True).start()
    training = threading.Thread(target=train, args=(options, doing, entered))
    training.start()
    entered.wait()
    while training.is_alive():
        if UNDER_WAY.is_set() and doing[-1] == "busy":
            sum(i * i for i in range(20_000))
        elif not UNDER_WAY.wait(0.02) or doing[-1] != "busy":
            training.join(0.02)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
