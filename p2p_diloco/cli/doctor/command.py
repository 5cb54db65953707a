"""`doctor`: reads the settings, makes all checks and shows the report.

Law: the report goes to stdout, progress to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import typer
from rich.console import Console

from p2p_diloco.cli.doctor.examination import Wish, examine
from p2p_diloco.cli.doctor.report import Report
from p2p_diloco.cli.doctor.view import drawn, lines
from p2p_diloco.cli.loop import run
from p2p_diloco.cli.quantities import count_of
from p2p_diloco.net.invitation_used import with_invitation
from p2p_diloco.settings import read_settings


def examine_this_machine(
    flags: Mapping[str, object], config_file: Path | None, parameters: str | None, *, as_json: bool
) -> int:
    """Make all checks and show the report. Returns the exit status: 1 if something must be mended, else 0.
    `parameters`: the number of the model's parameters as text, such as 25M; None: the user gave none.

    Raises:
        UsageError, ConfigError: the settings can't be used.
    """
    count = None if parameters is None else count_of(parameters, key="--params")
    run_config, peer = read_settings(flags, os.environ, config_file)
    peer = with_invitation(peer)
    typer.echo(f"checking this machine and {_count(len(peer.initial_peers))}: 20 s at most", err=True)
    return run(_examine(Wish(run_config, peer, count), as_json)).exit_code


async def _examine(wish: Wish, as_json: bool) -> Report:
    report = await examine(wish)
    _show(report, as_json=as_json)  # before the loop ends: its end waits for threads, such as one that looks up a name
    return report


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        typer.echo(report.to_json())
    elif sys.stdout.isatty():
        Console().print(drawn(report))
    else:
        typer.echo("\n".join(lines(report)))


def _count(number: int) -> str:
    return "no other peer" if not number else f"{number} initial peer{'' if number == 1 else 's'}"
