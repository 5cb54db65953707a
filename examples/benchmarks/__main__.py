"""`python -m examples.benchmarks` (`make bench`), in a checkout: measures how long a whole round takes between real
processes, and where its time goes. Measures other methods in the same way.

Law: only measures. Each peer, and each member of another method, is a process of its own (`serve`). Groups of them take
turns, a round each, so that other work on the machine slows all groups equally.

    command    the whole measurement
    plan       what is measured, from the flags
    group      processes that are measured together, and their rounds
    measure    processor time and memory; the figures of all rounds
    table      figures for people and for programs
    network    simulated machines, each on a link of its own
    delay      the program of the switch between them, if packets are to be delayed or lost
    frames     the packets in the switch's frames
    serve      the program of a measured process, which runs one of these four contenders:
    ours       a peer of a run          gloo        gloo's all-reduce
    raw        a transfer of bytes      averager    Hivemind's averager
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from examples.benchmarks.command import bench
from examples.benchmarks.plan import CPU, Plan, links_of, names_of
from p2p_diloco.cli.flags import as_flag
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.observe.figures import count_of

FLAGS = {
    "peers": (int, 2, "peers of the run"),
    "parameters": (str, "10M", "parameters of the model: 25M, 100k"),
    "codec": (str, "bf16", "how pseudo-gradients are written on the wire"),
    "tensors": (int, 100, "parameter tensors of the model, of unlike sizes"),
    "fragments": (int, 1, "fragments that the model is sent in"),
    "rounds": (int, 7, "rounds to measure, after 2 for warm-up"),
    "link": (
        str,
        None,
        "RATE[,...][:DELAY[:LOSS]]: speed of each peer's link, 100mbit or 100mbit,100mbit,20mbit; with the round trip "
        "time between any two machines, 1gbit:100ms, and the packets lost each way, 1gbit:100ms:0.4%% (Linux, as "
        "root, with iproute2); unset: loopback",
    ),
    "beside": (
        str,
        None,
        "methods measured beside the run, of raw, gloo and averager; unset: raw,gloo, or none with --steps, "
        "--step-time, --overlap or --device",
    ),
    "steps": (int, 0, "inner steps of a round; 0: one for each fragment"),
    "step-time": (float, 0.0, "seconds that an inner step computes; 0: no training"),
    "overlap": (int, 0, "inner steps to make during an exchange"),
    "device": (str, CPU, "device of the peers' models; with e.g. cuda no other method is measured"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the figures. Returns the exit code: 1 if a measurement failed."""
    parser = argparse.ArgumentParser(prog="bench", description="Measure whole rounds between real processes.")
    for name, (kind, default, text) in FLAGS.items():
        shown = "" if default is None else f" ({default})"
        parser.add_argument(f"--{name}", type=kind, default=default, help=text + shown)
    parser.add_argument("--no-direct", action="store_true", help="payloads go over libp2p's streams only")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    asked = parser.parse_args(arguments)
    try:
        return bench(plan_of(asked), as_json=asked.json)
    except P2PDilocoError as error:
        sys.stderr.write(f"bench: {error.spelled(as_flag)}\n")
        return error.exit_code


def plan_of(asked: argparse.Namespace) -> Plan:
    """The plan that the flags describe.

    Raises:
        UsageError: a flag can't be used. ConfigError: a setting can't be used.
    """
    alone = bool(asked.steps or asked.step_time or asked.overlap) or asked.device != CPU
    return Plan(
        peers=asked.peers,
        parameters=count_of(asked.parameters),
        codec=asked.codec,
        fragments=asked.fragments,
        rounds=asked.rounds,
        **links_of(asked.link, asked.peers)._asdict(),
        beside=names_of(("none" if alone else "raw,gloo") if asked.beside is None else asked.beside),
        steps=asked.steps,
        step_s=asked.step_time,
        overlap=asked.overlap,
        direct=not asked.no_direct,
        device=asked.device,
        tensors=asked.tensors,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before anything was started
        sys.exit(128 + signal.SIGINT)
