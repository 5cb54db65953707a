"""What a newcomer, or a peer on a slow link, costs the others in a run with a large model: `tests/chaos/joiner.py`.

Two peers on separate machines (network namespaces; needs root) train 25 million parameters over links of 200 Mbit/s. A
third peer, whose link may be slower (`--newcomer-mbit`), joins during rounds, and fetches 200 MB of state from both.
Prints one JSON object: the usual round, the rounds while it joined, how much longer these were, and how long joining
took. The exit code is 1 if they were a fifth longer or more.

With `--from-start` the third peer is there from the first round on. Prints the rounds and the exchanges, and what each
commit counts of the steps that all have made; the exit code is 1 if one counts less.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from swarm import Member, Swarm, kept_in

from examples.benchmarks.network import Network

STEP_S, SYNC_EVERY = 0.25, 40
ROUNDS = 6
"""Usual rounds, before the newcomer comes."""
GROWTH_MAX = 0.2
TENSORS, SLOW_ROUNDS = 8, 3
"""With `--from-start`: the model's tensors, and the rounds after the first."""
CONFIG = {"sync_every": SYNC_EVERY, "outer_lr": 0.5, "codec": "bf16", "start_peers": 2}


def rounds(member: Member) -> list[tuple[float, float]]:
    """When each of the peer's rounds began and ended."""
    return list(itertools.pairwise(line["time"] for line in member.lines("epoch", synced=True)))


def exchanges(member: Member, after: float, before: float) -> list[float]:
    """How long its exchanges took, within this time."""
    return [round(line["sync_s"], 2) for line in member.lines("epoch", synced=True) if after < line["time"] < before]


def measure(swarm: Swarm, network: Network, numel: int, mbit: int, newcomer_mbit: int) -> dict[str, object]:
    """Let one newcomer join; its figures."""
    swarm.bootstrap("10.77.0.1", network.machine("seed"))
    options = {"params": {"u": [numel]}, "step_s": STEP_S, "config": CONFIG, "log": "INFO"}
    machines = {name: network.machine(name) for name in ("a", "b", "newcomer")}
    for name in machines:
        network.throttle(name, newcomer_mbit if name == "newcomer" else mbit)
    donors = [swarm.start(name, on=machines[name], **options) for name in ("a", "b")]
    for donor in donors:
        donor.epoch(ROUNDS + 1, 600.0)
    started_at = time.time()
    newcomer = swarm.start("newcomer", on=machines["newcomer"], **options)
    joining_at = newcomer.wait_for("joining", 600.0)["time"]
    in_at = newcomer.wait_for("in", 600.0)["time"]
    took_part = newcomer.wait_for("epoch", 600.0, synced=True)
    usual = statistics.median(b - a for donor in donors for a, b in rounds(donor) if b < started_at)
    meanwhile = [b - a for donor in donors for a, b in rounds(donor) if b > joining_at and a < in_at]
    usual_exchange = statistics.median(took for donor in donors for took in exchanges(donor, 0, started_at))
    return {
        "parameters": numel,
        "link_mbit": mbit,
        "newcomers_link_mbit": newcomer_mbit,
        "usual_round_s": round(usual, 2),
        "usual_exchange_s": round(usual_exchange, 2),
        "exchanges_while_it_joined_s": [took for donor in donors for took in exchanges(donor, joining_at, in_at)],
        "rounds_while_it_joined_s": [round(took, 2) for took in meanwhile],
        "grown_by": round(statistics.median(meanwhile) / usual - 1, 3),
        "joining_s": round(in_at - joining_at, 2),
        "to_its_first_commit_s": round(took_part["time"] - joining_at, 2),
    }


def from_the_start(swarm: Swarm, network: Network, numel: int, mbit: int, slow_mbit: int) -> dict[str, object]:
    """Let a peer on a slow link take part in a few rounds from the first one on; their figures."""
    swarm.bootstrap("10.77.0.1", network.machine("seed"))
    config = {**CONFIG, "start_peers": 3, "sync_every": 4 * SYNC_EVERY}
    params = {f"u{index}": [numel // TENSORS] for index in range(TENSORS)}
    members = []
    for name in ("a", "b", "slow"):
        machine = network.machine(name)
        network.throttle(name, slow_mbit if name == "slow" else mbit)
        members.append(swarm.start(name, on=machine, params=params, step_s=STEP_S, config=config, log="INFO"))
    members[0].epoch(SLOW_ROUNDS + 1, 3000.0)
    lines = members[0].lines("epoch", synced=True)
    return {
        "parameters": numel,
        "links_mbit": [mbit, mbit, slow_mbit],
        "means_alone_take_s": round(2 * numel * 8 / (slow_mbit * 1e6), 1),
        "rounds_s": [round(b["time"] - a["time"], 1) for a, b in itertools.pairwise(lines)],
        "exchanges_s": exchanges(members[0], 0, lines[-1]["time"] + 1),
        "counted_of_made": [round(line["counted"] / (3 * line["step"]), 3) for line in lines],
    }


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description="Measure what a newcomer costs the other peers.")
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--newcomer-mbit", type=int, help="default: as the others")
    parser.add_argument("--from-start", action="store_true", help="the third peer takes part from the first round on")
    asked = parser.parse_args()
    play = from_the_start if asked.from_start else measure
    with contextlib.closing(Network()) as network, kept_in(None) as folder, Swarm(folder) as swarm:
        told: dict[str, Any] = play(swarm, network, asked.parameters, asked.mbit, asked.newcomer_mbit or asked.mbit)
    print(json.dumps(told, indent=2))
    return int(min(told["counted_of_made"]) < 1 if asked.from_start else told["grown_by"] >= GROWTH_MAX)


if __name__ == "__main__":
    sys.exit(main())
