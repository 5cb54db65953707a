"""`demo`: peers on this machine that train together, while one is killed and another joins.

Law: flags in, exit code out. The scenes are `play`'s; what they measured is an `Outcome`, drawn by `report`.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from p2p_diloco.cli.demo.facts import Outcome
from p2p_diloco.errors import ConfigError
from p2p_diloco.observe.plot import Moment
from p2p_diloco.settings import make_writable_folder


def main(arguments: Sequence[str]) -> int:
    """Carry out `demo` with these arguments; the exit status.

    Raises:
        ConfigError: the folder can't be used. P2PDilocoError: something failed.
    """
    command = typer.Typer(
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode="markdown",
    )
    command.command()(demo)
    code = command(args=list(arguments), prog_name="p2p-diloco demo", standalone_mode=False)
    return code if isinstance(code, int) else 0


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder for plot, data and logs; unset: demo-TIME here.", metavar="DIR")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON object.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A third of the rounds, in about a minute.")] = False,
) -> int:
    """Watch peers on this machine train together, while one of them is killed and another joins.

    A bootstrap and three peers, each in processes of its own, train a small GPT on the Python standard library's
    sources. The peer that is to average the next round gets a SIGKILL, and a new one comes in its place. Takes
    about three minutes on two cores; exit code 1 if anything fails.
    """
    from p2p_diloco.cli.demo.cast import FULL, QUICK
    from p2p_diloco.cli.demo.play import play
    from p2p_diloco.cli.demo.processes import Children, Signals
    from p2p_diloco.cli.demo.report import report
    from p2p_diloco.cli.demo.screen import screen
    from p2p_diloco.cli.demo.stage import Interrupted, Stage

    folder = _folder(out)
    try:
        with Signals() as signals, screen() as shown, Children(folder, lambda: len(signals.received) > 1) as children:
            stage = Stage(QUICK if quick else FULL, children, shown, signals)
            outcome = play(stage)
    except Interrupted as interrupted:
        sys.stderr.write(f"p2p-diloco: interrupted; what was written is in {folder}\n")
        return 128 + int(interrupted.args[0])
    outcome = replace(outcome, plot=_png(outcome, stage.moments, folder))
    (folder / "summary.json").write_text(outcome.to_json() + "\n", encoding="utf-8")
    if as_json:
        typer.echo(outcome.to_json())
    else:
        typer.echo("\n".join(report(outcome, stage.moments, shutil.get_terminal_size().columns)))
    return 0 if outcome.digests_equal else 1


def _folder(out: Path | None) -> Path:
    """An empty folder for what the demo writes."""
    folder = out or Path(time.strftime("demo-%Y%m%d-%H%M%S"))
    make_writable_folder(folder, key="--out")
    if any(folder.iterdir()):
        raise ConfigError("is not empty", key="--out", value=folder, mend="name a new folder")
    return folder


def _png(outcome: Outcome, moments: Sequence[Moment], folder: Path) -> str | None:
    """The plot's path; None without matplotlib."""
    from p2p_diloco.cli.demo.report import compared
    from p2p_diloco.observe.plot import write_png

    path = folder / "losses.png"
    try:
        write_png(
            path,
            compared(outcome.swarm_curve, outcome.alone_curve),
            moments,
            title="Three peers in one run, and one peer alone",
            x_label="inner steps of each peer",
            y_label="held-out loss (nats a byte)",
        )
    except ImportError:
        return None
    return str(path)
