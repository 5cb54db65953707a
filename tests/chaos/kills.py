"""Kills of real peers, and what each costs the others: `python tests/chaos/kills.py --kills 60`.

Runs of three and four peers, of which one leads a round. Trainer, node and p2pd of one peer are killed together, each
role in each phase in turn, and the peer is replaced. Prints one
line of JSON for each kill, then a table. The exit code is 1 if a kill stalled the others for more than 3 s, or if
survivors differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))

from kept import ROUNDS, Kept, after_death
from swarm import Swarm

INTERVAL_S, TIMEOUT_S = 0.5, 5.0
NUMEL = 3_000_000
WORST_S = 3.0
"""The most seconds for which a kill may stall the others."""
ROLES = ("leader", "contributor")
PHASES = ("training", "sending", "sent", "committing")


def training(size: int) -> dict[str, object]:
    """Options of a peer in a run of this size."""
    config = {
        "sync_every": 4,
        "outer_lr": 0.5,
        "codec": "fp32",
        "slice_elements": NUMEL,
        "start_peers": size,
        "heartbeat_interval": INTERVAL_S,
        "heartbeat_timeout": TIMEOUT_S,
    }
    return {"params": {"u": [NUMEL]}, "step_s": 0.04, "config": config, "log": "INFO"}


def kill(run: Kept, folder: Path, number: int, role: str, phase: str) -> dict[str, object]:
    """Kill one peer; the figures."""
    note = folder / f"note-{run.size}-{number}.json"
    plan = {"role": role, "phase": phase, "after": ROUNDS + 2, "victims": "machine", "note": str(note)}
    *survivors, victim = run.filled(sabotage=plan)
    assert victim.status(120.0) == -9
    died = json.loads(note.read_text())
    figures = after_death(survivors, died["time"], died["epoch"])
    return {"peers": run.size, "role": role, "phase": phase, **{name: round(v, 2) for name, v in figures.items()}}


def main() -> int:
    """Kill peers, print each result, then the summary."""
    parser = argparse.ArgumentParser(description="Kill real peers, and measure what each kill costs the others.")
    parser.add_argument("--kills", type=int, default=60)
    wanted = parser.parse_args().kills
    told, began = [], time.monotonic()
    for size, share in ((3, wanted - wanted // 2), (4, wanted // 2)):
        with tempfile.TemporaryDirectory() as name:
            swarm = Swarm(Path(name))
            try:
                run = Kept(swarm, size, training(size))
                moments = itertools.cycle(itertools.product(PHASES, ROLES))
                for number, (phase, role) in enumerate(itertools.islice(moments, share)):
                    told.append(kill(run, Path(name), number, role, phase))
                    print(json.dumps(told[-1]), flush=True)
            finally:
                swarm.end()
    for key in ("stall_s", "to_commit_s"):
        for role in (*ROLES, "all"):
            values = [float(str(one[key])) for one in told if role in (one["role"], "all")]
            middle, worst = statistics.median(values), max(values)
            print(f"{key:12} {role:10} {len(values):3} kills: median {middle:.2f}, worst {worst:.2f}")
    print(f"{len(told)} kills in {time.monotonic() - began:.0f} s; survivors were equal at every epoch")
    return int(max(float(str(one["stall_s"])) for one in told) > WORST_S)


if __name__ == "__main__":
    sys.exit(main())
