"""`bench`: the whole measurement, from flags to figures.

Law: contenders take turns, a round each; whatever happens their processes are ended and their machines taken down.
Figures go to stdout, progress to stderr.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import typer

from p2p_diloco.cli.bench.contenders import Bench, Contender, Failed, Interrupted, all_of
from p2p_diloco.cli.bench.measure import Result
from p2p_diloco.cli.bench.network import CONGESTION, Network, NoNetwork
from p2p_diloco.cli.bench.plan import WARM_UP, Plan
from p2p_diloco.cli.bench.table import as_object, drawn, headline, seconds, size
from p2p_diloco.cli.demo.processes import Children, Signals
from p2p_diloco.errors import P2PDilocoError, UsageError

WIDTH = 140
"""Columns of a table that is no terminal's."""
LEAVE_S, LOOK_EVERY_S = 5.0, 0.05
"""How long processes that are told to end may take."""


def bench(plan: Plan, *, as_json: bool) -> int:
    """Measure, and tell; the exit status: 1 if somebody failed, 128 + n after signal n.

    Raises:
        UsageError: this machine can't give the links that were asked for.
        P2PDilocoError: the processes don't start.
    """
    machine = _machine()
    try:
        results, machine["congestion"] = measured(plan)
    except Interrupted as interrupted:
        sys.stderr.write("p2p-diloco: interrupted; every process is ended\n")
        return 128 + int(interrupted.args[0])
    except Failed as failed:
        raise P2PDilocoError(f"the processes don't start: {failed}", mend="try fewer peers or parameters") from None
    if as_json:
        typer.echo(json.dumps(as_object(plan, results, machine), indent=2))
    else:
        _draw(plan, results)
    return int(any(result.failed for result in results))


def measured(plan: Plan) -> tuple[list[Result], str | None]:
    """What each contender came to; and how TCP found its speed, on machines with links of their own.

    Raises:
        UsageError: as `bench`. Failed: a process didn't start. Interrupted: a signal came.
    """
    _check_memory(plan)
    tell(f"measuring {headline(plan)}; starting processes")
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="p2p-diloco-bench-")))
        signals = ending.enter_context(Signals())
        network = _network() if plan.links_mbit else None
        if network is not None:
            ending.callback(network.close)
        children = ending.enter_context(Children(folder, lambda: True))  # goodbyes are said below, or not at all
        contenders = all_of(Bench(plan, children, signals, network))
        if network is not None and network.congestion != CONGESTION:
            tell(unlike_most(network.congestion))
        for number in range(WARM_UP + plan.rounds):
            _turn(contenders, "warm-up" if number < WARM_UP else f"round {number - WARM_UP + 1} of {plan.rounds}")
        results = [contender.result(WARM_UP) for contender in contenders]
        _leave(children)
        return results, None if network is None else network.congestion


def _turn(contenders: Sequence[Contender], name: str) -> None:
    """A round of each that still can."""
    told = []
    for contender in contenders:
        if contender.failed:
            continue
        try:
            told.append(f"{contender.name} {seconds(contender.play().took_s)}")
        except Failed as failed:
            contender.failed = str(failed)
            told.append(f"{contender.name} failed")
    tell(f"{name}: {', '.join(told)}")


def _leave(children: Children) -> None:
    """Let all processes end by themselves, which they do once nobody commands them, for a while."""
    for child in children.all:
        child.tell('{"do": "end"}')
    give_up_at = time.monotonic() + LEAVE_S
    while any(child.status is None for child in children.all) and time.monotonic() < give_up_at:
        time.sleep(LOOK_EVERY_S)


def tell(text: str) -> None:
    """A line of progress."""
    typer.echo(text, err=True)


def unlike_most(congestion: str) -> str:
    """What to know of figures that another way of finding the speed gave."""
    return (
        f"the machines use TCP's {congestion or 'unknown congestion control'}, as this one does: {CONGESTION}, which "
        "most use, is not allowed there; add it to net.ipv4.tcp_allowed_congestion_control to measure with it"
    )


def _check_memory(plan: Plan) -> None:
    """All contenders are there at once; a machine whose memory is full measures nothing, and harms others.

    Raises:
        UsageError: there is not enough.
    """
    needed_gb, free_gb = plan.memory_bytes / 1e9, psutil.virtual_memory().available / 1e9
    if needed_gb > free_gb:
        wrong = f"takes about {needed_gb:.1f} GB of memory with {plan.peers} peers and all that is measured beside"
        mend = f"{free_gb:.1f} GB are free: choose fewer, or less with --beside"
        raise UsageError(wrong, key="--parameters", value=size(plan.parameters), mend=mend)


def _network() -> Network:
    try:
        return Network()
    except NoNetwork as error:
        mend = "run as root on Linux with ip and tc (iproute2), or leave it out"
        raise UsageError(f"can't be made here ({error})", key="--link", mend=mend) from None


def _draw(plan: Plan, results: Sequence[Result]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(drawn(plan, results))


def _machine() -> dict[str, Any]:
    load = os.getloadavg() if hasattr(os, "getloadavg") else ()
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_before": [round(value, 2) for value in load],
    }
