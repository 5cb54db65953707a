"""Puts the commands together, in the order in which the help lists them.

Law: a command declares its flags and returns its exit code. One whose module loads much is declared here, and imports
that module only when it runs; any other is declared where it is carried out. Errors are raised; `p2p_diloco.cli` prints
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer import Option

from p2p_diloco import __version__
from p2p_diloco.cli.bootstrap import bootstrap
from p2p_diloco.cli.dashboard import dashboard
from p2p_diloco.cli.data import data
from p2p_diloco.cli.export import export
from p2p_diloco.cli.flags import A_RUN, TOLD, BriefHelp, ListsAndCommand, with_dashes, with_settings
from p2p_diloco.cli.invite import invite, kick, revoke
from p2p_diloco.cli.join import join
from p2p_diloco.cli.plan import plan
from p2p_diloco.cli.replay import replay
from p2p_diloco.cli.revise import save, set_values, stop
from p2p_diloco.cli.status import status

app = typer.Typer(
    help="Train one model on many machines, without a server.",
    context_settings={"token_normalize_func": with_dashes, "help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def start(ctx: typer.Context, version: bool = Option(False, "--version", help="Print the version and exit.")) -> None:
    """Train one model on many machines, without a server."""
    if version:
        typer.echo(f"p2p-diloco {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit


app.command(cls=ListsAndCommand)(bootstrap)
app.command(cls=BriefHelp, options_metavar="[OPTIONS] [-- COMMAND ...]", context_settings={"allow_extra_args": True})(
    join
)
app.command(cls=ListsAndCommand)(status)
app.command(cls=ListsAndCommand)(dashboard)
app.command(cls=ListsAndCommand)(export)
app.command(cls=ListsAndCommand)(invite)
app.command(cls=ListsAndCommand)(revoke)
app.command(cls=ListsAndCommand)(kick)
app.command("set", cls=ListsAndCommand)(set_values)
app.command(cls=ListsAndCommand)(stop)
app.command(cls=ListsAndCommand)(save)
app.command(cls=ListsAndCommand, options_metavar="[OPTIONS] [-- COMMAND ...]")(plan)
app.command(cls=ListsAndCommand)(data)


@app.command(cls=ListsAndCommand)
@with_settings(
    (*A_RUN, "host_maddrs", "announce_maddrs", "direct_port", "client_mode", "checkpoint_dir"),
    {**TOLD, "run_id": "The run whose peers are tried; unset: main."},
)
def doctor(
    flags: dict[str, Any],
    config: Path | None,
    params: str | None = Option(
        None, help="Parameters of the model, such as 25M: are memory and disk large enough?", metavar="N"
    ),
    as_json: bool = Option(False, "--json", help="Print the report as one JSON object (docs/cli.md)."),
) -> int:
    """Check whether a peer would work here: programs, ports, clock, NAT, links, memory, disk.

    Give the addresses and ports that [bold]join[/bold] would get; other settings are read as by join.
    Changes nothing, takes no part in a run, and ends within 20 s.
    The exit code is 1 if something must be mended.
    """
    from p2p_diloco.cli.doctor.examination import doctor as examine

    return examine(flags, config, params, as_json=as_json)


@app.command()
def env() -> None:
    """Print versions, machine and settings from the environment, for a bug report."""
    from p2p_diloco.cli.doctor.machine import described

    for line in described():
        typer.echo(line)


app.command(cls=ListsAndCommand)(replay)


@app.command()
def demo(
    out: Path | None = Option(None, help="Folder for plot, data and logs; unset: demo-TIME here.", metavar="DIR"),
    as_json: bool = Option(False, "--json", help="Print the outcome as one JSON object."),
    quick: bool = Option(False, "--quick", help="A third of the rounds, in about a minute."),
) -> int:
    """Watch peers on this machine train together, while one of them is killed and another joins.

    A bootstrap and three peers, each in processes of its own, train a small GPT.
    One that is to average a part of the next round gets a SIGKILL, and a new one joins.
    Takes about three minutes on two cores. The exit code is 1 if anything fails.
    """
    from p2p_diloco.cli.demo import demo as show

    return show(out, as_json=as_json, quick=quick)
