"""`plan`: answers a question, or checks the model of the papers.

Law: data go to stdout, progress to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from shutil import get_terminal_size

import typer

from p2p_diloco.cli.plan import papers, view
from p2p_diloco.cli.plan.inputs import Asked as Asked
from p2p_diloco.cli.plan.inputs import Question, question
from p2p_diloco.errors import ConfigError, UsageError, reason
from p2p_diloco.observe.plot import write_png
from p2p_diloco.planning.advice import advise

WIDTH = 80
"""Columns of the output if it is not a terminal."""


def plan(
    asked: Asked, settings: Mapping[str, object], config_file: Path | None, png: Path | None, *, as_json: bool
) -> None:
    """Print the forecast and the advice.

    Raises:
        UsageError, ConfigError: an input is missing or can't be used. NoBootstrapReached: no peer of the run answers.
    """
    asks = question(asked, settings, config_file)
    advice = advise(asks.forecast, asks.wanted, asks.tokens)
    if png is not None:
        _draw(asks, png)
    if as_json:
        typer.echo(json.dumps(view.as_object(asks, advice), indent=2))
    else:
        width = get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
        typer.echo("\n".join(view.drawn(asks, advice, width)))


def check_papers(*, as_json: bool) -> int:
    """Print the papers' figures beside ours. Returns the exit status: 1 if one differs by more than it may, else 0."""
    if as_json:
        typer.echo(json.dumps(papers.as_object(), indent=2))
    else:
        typer.echo("\n".join(papers.drawn()))
    return int(not papers.all_fit())


def _draw(asks: Question, png: Path) -> None:
    curves, moments, _ = view.curves_of(asks.forecast)
    title, x_label = view.headline(asks).replace(", H=", "\nH="), "bandwidth of the slowest link, Mbit/s"
    try:
        write_png(png, curves, moments, title=title, x_label=x_label, y_label="utilisation", log_x=True)
    except ImportError:
        mend = "install it: pip install 'p2p-diloco[plot]', or leave --png out"
        raise UsageError("needs matplotlib, which isn't installed", key="--png", value=png, mend=mend) from None
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"can't be written ({why})", key="--png", value=png, mend="name another file") from None
    typer.echo(f"wrote {png}", err=True)
