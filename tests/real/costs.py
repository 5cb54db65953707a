"""What something that is done to a private run costs its nodes: for the commands `tests.real.*_cost`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))

import nodes

ENDS_S = 120.0


def spent() -> float:
    """The processor seconds of this process and the daemons that it has started."""
    daemons = [child for child in psutil.Process().children() if child.name().startswith("p2pd")]
    return time.process_time() + sum(sum(daemon.cpu_times()[:2]) for daemon in daemons)


def measured(field: nodes.Field, seconds: float, command: Sequence[str] = ()) -> dict[str, float]:
    """The rounds a second, the processor seconds a second of this process and its daemons, and its most memory in MB,
    while this command does something to the nodes. It says when it begins, and may tell its own figures at its end."""
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if command else None
    if other is not None:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == "begins"
    began, cost, epoch, most = time.monotonic(), spent(), field.epoch, 0.0
    while time.monotonic() < began + seconds:
        time.sleep(0.1)
        most = max(most, psutil.Process().memory_info().rss / 1e6)
    took = time.monotonic() - began
    figures = {"rounds": round((field.epoch - epoch) / took, 2), "nodes": round((spent() - cost) / took, 2)}
    told = "" if other is None else other.communicate(timeout=ENDS_S)[0]
    return figures | {"MB": round(most)} | json.loads(told or "{}")
