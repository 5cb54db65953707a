"""A peer that reads each slice of a data set once, as fast as they come. Options are JSON, output is JSON lines."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import numpy as np
import torch
from train import say

from p2p_diloco import Peer, PeerConfig


def main(options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {options['name']}: %(message)s")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    local = PeerConfig(name=options["name"], open=True, found=True, cache_dir=options["cache"])
    with Peer(model, optimizer, run_id="test", initial_peers=options["initial_peers"], local=local) as peer:
        slices = peer.slices(options["slices"])
        say("in", slices=len(slices))
        sys.stdin.readline()
        began = time.monotonic()
        slices.fetch_ahead(np.arange(len(slices)))
        nbytes = sum(slices[index].stat().st_size for index in range(len(slices)))
        say("read", seconds=time.monotonic() - began, nbytes=nbytes)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
