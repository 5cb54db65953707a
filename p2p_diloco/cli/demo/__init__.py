"""`demo`: lets peers on this machine train together, while one of them is killed and another joins.

Law: turns the flags into an exit code. `play` has the scenes; its measurements are an `Outcome`, which `report` draws.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from p2p_diloco.cli.demo.facts import Outcome
from p2p_diloco.cli.demo.play import FULL, QUICK, play
from p2p_diloco.cli.demo.report import compared, report
from p2p_diloco.cli.demo.screen import Screen
from p2p_diloco.cli.demo.stage import Stage
from p2p_diloco.cli.processes import Children
from p2p_diloco.errors import ConfigError
from p2p_diloco.interrupts import Interrupts, exit_code
from p2p_diloco.observe.plot import Moment, write_png
from p2p_diloco.settings import make_writable_folder


def demo(out: Path | None, *, as_json: bool, quick: bool) -> int:
    """Play the demo and print its outcome. Returns the exit code: 1 if the peers' digests differ at the end.

    Raises:
        ConfigError: the folder can't be used. P2PDilocoError: a process failed.
    """
    folder = _folder(out)
    try:
        with Interrupts(), Screen() as screen, Children(folder) as children:
            stage = Stage(QUICK if quick else FULL, children, screen.show)
            outcome = play(stage)
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"p2p-diloco: interrupted; what was written is in {folder}\n")
        return exit_code(interrupt)
    outcome = replace(outcome, plot=_png(outcome, stage.moments, folder))
    (folder / "summary.json").write_text(outcome.to_json() + "\n", encoding="utf-8")
    lines = [outcome.to_json()] if as_json else report(outcome, stage.moments, shutil.get_terminal_size().columns)
    typer.echo("\n".join(lines))
    return 0 if outcome.digests_equal else 1


def _folder(out: Path | None) -> Path:
    """Make the folder for the demo's files, and return it. A folder that isn't empty is refused."""
    folder = out or Path(time.strftime("demo-%Y%m%d-%H%M%S"))
    make_writable_folder(folder, key="--out")
    if any(folder.iterdir()):
        raise ConfigError("is not empty", key="--out", value=folder, mend="name a new folder")
    return folder


def _png(outcome: Outcome, moments: Sequence[Moment], folder: Path) -> str | None:
    """Write the plot and return its path; None without matplotlib."""
    path, curves = folder / "losses.png", compared(outcome.swarm_curve, outcome.alone_curve)
    title, x_label, y_label = (
        "Three peers in one run, and one peer alone",
        "inner steps of each peer",
        "held-out loss (nats a byte)",
    )
    try:
        write_png(path, curves, moments, title=title, x_label=x_label, y_label=y_label)
    except ImportError:
        return None
    return str(path)
