"""An example script as a peer of a run, in a process of a test.

The script runs as it is. This program only prepares the environment, as `p2p-diloco join -- COMMAND` does, and watches
the peer that the script makes.

{"path": ..., "loads": [...], "folder": ...}      the script, modules to load first, and where it works
"run_id", "initial_peers", "config", "local"      the run
"waits"                                           begin only at a line on stdin
"holds_at"                                        pause at this epoch until a line on stdin
"tells_at"                                        tell that this step of its own begins

Under torchrun each rank is such a process; `rank` in its lines tells which, and only rank 0 knows digests.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

from p2p_diloco import Peer, PeerConfig, RunConfig
from p2p_diloco.settings import to_environment

OUT = sys.stdout
RANK = int(os.environ.get("RANK", "0"))


def say(what: str, **values: Any) -> None:
    OUT.write(json.dumps({"what": what, "time": time.time(), "rank": RANK, **values}) + "\n")
    OUT.flush()


def digest_of(peer: Any) -> str:
    return "" if RANK else str(peer.digest)


class Watch:
    """Records the learning rate of each step, and tells each epoch."""

    def __init__(self, holds_at: int | None, tells_at: int | None) -> None:
        self.holds_at, self.tells_at, self.epoch = holds_at, tells_at, -1
        self.rates: list[tuple[int, float]] = []
        enter = Peer.__enter__

        def entered(peer: Peer) -> Peer:
            enter(peer)
            self.peer, self.optimizer = peer, peer._optimizers[-1]
            self.optimizer.register_step_pre_hook(self._before_step)
            say("in", epoch=peer.epoch, step=peer.global_step, seed=peer.seed)
            return peer

        Peer.__enter__ = entered  # type: ignore[method-assign]

    def _before_step(self, *_: object) -> None:
        peer = self.peer
        self.rates.append((peer.global_step, self.optimizer.param_groups[0]["lr"]))
        if len(self.rates) == self.tells_at:
            say("begins")
        if peer.epoch == self.epoch:
            return
        self.epoch = peer.epoch
        say("epoch", epoch=peer.epoch, digest=digest_of(peer), synced=True, step=peer.global_step)
        if peer.epoch == self.holds_at:
            with peer.pause():  # so that the others wait
                say("holds")
                sys.stdin.readline()


def main(options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options['name']}: %(message)s")
    logging.getLogger("p2p_diloco").setLevel("DEBUG")
    sys.stdout = sys.stderr
    os.chdir(options["folder"])
    for module in options["loads"]:
        importlib.import_module(module)
    torch.set_num_threads(1)
    say("ready")
    if options.get("waits"):
        sys.stdin.readline()
    watch = Watch(options.get("holds_at"), options.get("tells_at"))
    given = {key: options[key] for key in ("run_id", "initial_peers", "name")}
    local = PeerConfig(**given, **options.get("local", {}))
    os.environ.update(to_environment(RunConfig(**options.get("config", {})), local))
    made = runpy.run_path(options["path"], run_name="__main__")
    peer = made["peer"] if "peer" in made else made["callback"].peer
    model = {name: value.double().sum().item() for name, value in peer.global_state_dict().items()}
    say(
        "result", loss=float(made["loss"]), step=peer.global_step, local=peer.metrics.local_step, epoch=peer.epoch,
        digest=digest_of(peer), rates=watch.rates, model=model, files=[str(path) for path in Path().rglob("*")],
    )  # fmt: skip


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
