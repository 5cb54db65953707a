"""Runs a user's training script for a while, and times its optimizer's steps.

Law: the script is not changed and joins no run: it gets none of this package's variables. It is ended once enough steps
were timed, or after MEASURE_S. What it prints goes to stderr.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import typer

from p2p_diloco.cli.wrap import check_command, tied
from p2p_diloco.errors import UsageError
from p2p_diloco.settings import without_ours

MEASURE_S = 600.0
WARM_UP = 3
"""Steps that are made before those that are timed: they compile, and use memory for the first time."""
LOOK_EVERY_S = 0.05
END_S = 10.0


def step_time(command: Sequence[str], steps: int) -> float:
    """The median time of `steps` steps of the command's optimizer, in seconds. Of several processes the slowest counts.

    Raises:
        UsageError: there is no such command, or it makes too few steps.
    """
    check_command(command)
    typer.echo(
        f"running {' '.join(command)} until {steps + WARM_UP} steps are made, {MEASURE_S:.0f} s at most", err=True
    )
    with tempfile.TemporaryDirectory(prefix="p2p-diloco-plan-") as folder:
        times = Path(folder) / "times"
        found, status = _run(command, times, steps + WARM_UP + 1)
    if not found:
        ended = (
            "made too few steps of a torch optimizer within" if status is None else f"ended (exit code {status}) before"
        )
        wrong = f"{ended} {MEASURE_S:.0f} s" if status is None else f"{ended} it made {WARM_UP + 3} steps"
        raise UsageError(wrong, key="--measure", value=" ".join(command), mend="mend it, or give --step-time")
    return max(statistics.median(later - earlier for earlier, later in pairwise(each[WARM_UP:])) for each in found)


def _run(command: Sequence[str], times: Path, wanted: int) -> tuple[list[list[float]], int | None]:
    """Run the command until a process has made `wanted` steps. Returns the times at which each process made its steps,
    for processes that made enough, and the command's exit code; None if this process ended the command."""
    here = os.pathsep.join([str(Path(__file__).parent / "timing"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**without_ours(os.environ), "PYTHONPATH": here, "PLAN_TIMES_FILE": str(times)}
    until = time.monotonic() + MEASURE_S
    child = tied(command, env=environment, stdout=sys.stderr.fileno(), stdin=subprocess.DEVNULL)
    try:
        while (status := child.poll()) is None and time.monotonic() < until:
            if any(len(each) >= wanted for each in _read(times)):
                break
            time.sleep(LOOK_EVERY_S)
    finally:
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    return [each[:wanted] for each in _read(times) if len(each) >= WARM_UP + 3], status


def _read(times: Path) -> list[list[float]]:
    return [[float(line) for line in file.read_text().split("\n")[:-1]] for file in times.parent.glob("times.*")]
