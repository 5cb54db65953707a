"""Carries out the whole measurement, from flags to figures.

Law: groups take turns, a round each. Their processes are always ended and their machines removed. Figures go to stdout,
progress to stderr.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from examples.benchmarks.group import Bench, Failed, Group, groups_of
from examples.benchmarks.measure import Result
from examples.benchmarks.network import CONGESTION, Network, NoNetwork
from examples.benchmarks.plan import CPU, WARM_UP, Plan
from examples.benchmarks.table import as_object, drawn, headline, seconds, size
from p2p_diloco.cli.processes import Children
from p2p_diloco.errors import P2PDilocoError, UsageError
from p2p_diloco.interrupts import Interrupts, exit_code

WIDTH = 140
"""Columns of a table that is not drawn on a terminal."""


def bench(plan: Plan, *, as_json: bool) -> int:
    """Measure all groups and print the figures. Returns the exit status: 1 if something failed, 128 + n after signal n.

    Raises:
        UsageError: this machine has too little memory, or can't provide the links that the flags name.
        ConfigError: it can't provide the device.
        P2PDilocoError: the processes don't start.
    """
    if plan.device != CPU:
        from p2p_diloco.peer.devices import usable  # loads torch, which takes seconds

        usable(plan.device)
    machine: dict[str, Any] = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_before": [round(value, 2) for value in os.getloadavg()],
    }
    try:
        with Interrupts():
            results, machine["congestion"] = measured(plan)
    except KeyboardInterrupt as interrupt:
        tell("bench: interrupted; every process is ended")
        return exit_code(interrupt)
    except Failed as failed:
        raise P2PDilocoError(f"the processes don't start: {failed}", mend="try fewer peers or parameters") from None
    if as_json:
        sys.stdout.write(json.dumps(as_object(plan, results, machine), indent=2) + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else WIDTH).print(drawn(plan, results))
    return int(any(result.failed for result in results))


def measured(plan: Plan) -> tuple[list[Result], str | None]:
    """Measure all groups. Returns the result of each group, and the TCP congestion control of the simulated machines
    (None on loopback).

    Raises:
        UsageError: as `bench`. Failed: a process didn't start.
    """
    _check_memory(plan)
    tell(f"measuring {headline(plan)}; starting processes")
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="p2p-diloco-bench-")))
        network = _network(plan) if plan.links_mbit else None
        if network is not None:
            ending.callback(network.close)
        groups = groups_of(Bench(plan, ending.enter_context(Children(folder)), network))
        if network is not None and network.congestion != CONGESTION:
            tell(unlike_most(network.congestion))
        for number in range(WARM_UP + plan.rounds):
            turn(groups, "warm-up" if number < WARM_UP else f"round {number - WARM_UP + 1} of {plan.rounds}")
        return [group.result(WARM_UP) for group in groups], None if network is None else network.congestion


def turn(groups: Sequence[Group], name: str) -> None:
    """Let each group that has not failed play one round. Then write their times to stderr, in a line that begins with
    `name`."""
    told = []
    for group in groups:
        if group.failed:
            continue
        try:
            told.append(f"{group.name} {seconds(group.play().took_s)}")
        except Failed as failed:
            group.failed = str(failed)
            told.append(f"{group.name} failed")
    tell(f"{name}: {', '.join(told)}")


def tell(text: str) -> None:
    """Write a line of progress to stderr."""
    sys.stderr.write(f"{text}\n")


def unlike_most(congestion: str) -> str:
    """The warning that the simulated machines use another TCP congestion control than `CONGESTION`."""
    return (
        f"the simulated machines use TCP's {congestion or 'unknown congestion control'}, as this machine does; to "
        f"measure with {CONGESTION}, which most systems use, add it to net.ipv4.tcp_allowed_congestion_control"
    )


def _check_memory(plan: Plan) -> None:
    """Check that this machine has memory for all groups at the same time. If it had to swap, the figures would be
    useless.

    Raises:
        UsageError: there is not enough memory.
    """
    needed_gb, free_gb = plan.memory_bytes / 1e9, psutil.virtual_memory().available / 1e9
    if needed_gb > free_gb:
        wrong = f"takes about {needed_gb:.1f} GB of memory with {plan.peers} peers and all that is measured beside"
        mend = f"{free_gb:.1f} GB are free: choose fewer, or less with --beside"
        raise UsageError(wrong, key="--parameters", value=size(plan.parameters), mend=mend)


def _network(plan: Plan) -> Network:
    try:
        return Network(plan.rtt_s, plan.loss)
    except NoNetwork as error:
        mend = "run as root on Linux with ip and tc (iproute2), or leave it out"
        raise UsageError(
            f"needs simulated machines, which can't be made here ({error})", key="--link", mend=mend
        ) from None
