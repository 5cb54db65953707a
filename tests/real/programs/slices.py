"""A peer that reads each slice of a data set once, as fast as they come. Options are JSON, output is JSON lines."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from train import peer_of, say


def main(options: dict[str, Any]) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    options["local"] = {"found": True, "cache_dir": options["cache"]}
    with peer_of(model, optimizer, options) as peer:
        slices = peer.slices(options["slices"])
        say("in", slices=len(slices))
        sys.stdin.readline()
        began = time.monotonic()
        slices.fetch_ahead(np.arange(len(slices)))
        nbytes = sum(slices[index].stat().st_size for index in range(len(slices)))
        say("read", seconds=time.monotonic() - began, nbytes=nbytes)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
