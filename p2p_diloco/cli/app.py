"""Puts the commands together, in the order in which the help lists them.

Law: a command declares its flags and returns its exit code. One whose module loads much is declared here, and imports
that module only when it runs; any other is declared where it is carried out. Errors are raised; `p2p_diloco.cli` prints
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer import Argument, Option

from p2p_diloco import __version__
from p2p_diloco.cli.bootstrap import bootstrap
from p2p_diloco.cli.data import data
from p2p_diloco.cli.export import export
from p2p_diloco.cli.flags import (
    A_RUN,
    BASELINE,
    BASELINE_BOUND,
    FOUNDER,
    KEY,
    METRICS_HOST,
    METRICS_PORT,
    OUTCOME,
    TOKENS_PER_SAMPLE,
    TOLD,
    BriefHelp,
    ListsAndCommand,
    with_dashes,
    with_settings,
)
from p2p_diloco.cli.join import join
from p2p_diloco.cli.plan import plan
from p2p_diloco.cli.replay import replay
from p2p_diloco.cli.revise import save, set_values, stop
from p2p_diloco.cli.status import read_baseline, status

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
app.command(cls=BriefHelp, options_metavar="[OPTIONS] [-- COMMAND ...]")(join)
app.command(cls=ListsAndCommand)(status)


@app.command(cls=ListsAndCommand)
@with_settings(
    (*A_RUN, "identity_path", "otlp_endpoint"),
    {**TOLD, "identity_path": "Identity file of the run's founder; with it the page can set, save and stop."},
)
def dashboard(
    flags: dict[str, Any],
    config: Path | None,
    host: str = Option("127.0.0.1", help="Address of this machine that browsers can reach.", metavar="ADDR"),
    port: int = Option(9465, min=0, max=65535, help="TCP port; 0: any.", metavar="N"),
    interval: float = Option(1.0, min=0.01, help="Seconds between two looks.", metavar="X"),
    baseline: Path | None = BASELINE,
    baseline_bound: float = BASELINE_BOUND,
    tokens_per_sample: float | None = TOKENS_PER_SAMPLE,
    key: Path | None = Option(
        None, help="File of the run's key; with it the page can set, save, stop and put peers out.", metavar="PATH"
    ),
    metrics_port: int | None = METRICS_PORT,
    metrics_host: str = METRICS_HOST,
) -> None:
    """Show a run in the browser: prints a link. Takes no part in the run, and needs no internet.

    It only shows the run unless the founder's identity file or the run's key is given.
    """
    from p2p_diloco.cli.dashboard import show

    beside = read_baseline(baseline, baseline_bound, tokens_per_sample)
    metrics = None if metrics_port is None else (metrics_host, metrics_port)
    show(flags, config, host=host, port=port, interval_s=interval, baseline=beside, key=key, metrics=metrics)


app.command(cls=ListsAndCommand)(export)


@app.command(cls=ListsAndCommand)
def invite(
    name: str = Option(..., help="The name of the person or machine that is let in.", metavar="NAME"),
    role: str = Option("worker", help="What it may do.", metavar="[worker|aggregator|observer]"),
    expires: str = Option("30d", help="How long the invitation is valid: 7d, 12h, 30m.", metavar="TIME"),
    peer: str | None = Option(None, help="Only the peer with this id may use it; unset: any peer.", metavar="ID"),
    key: Path | None = KEY,
    initial_peers: list[str] | None = Option(
        None, help="Addresses to join through; unset: those of the run's own invitation.", metavar="ADDR..."
    ),
    out: Path | None = Option(None, help="File to write; unset: NAME.invite.", metavar="PATH"),
    line: bool = Option(False, "--line", help="Print the invitation as a line for P2P_DILOCO_INVITE, not to a file."),
) -> None:
    """Write an invitation to a private run. Needs the run's key, and no network."""
    from p2p_diloco.cli.invite import invite as make

    make(name, role, expires, peer=peer, key_file=key, initial_peers=initial_peers or (), out=out, as_line=line)


@app.command(cls=ListsAndCommand)
@with_settings(("initial_peers",), FOUNDER, config=False)
def revoke(
    flags: dict[str, Any],
    name: str = Argument(..., help="The name in an invitation, or its grant's id.", metavar="NAME|ID"),
    key: Path | None = KEY,
    as_json: bool = OUTCOME,
) -> None:
    """Revoke an invitation to a private run: the run's members end all connections with peers that use it.

    Needs the run's key. What those peers have read or contributed is not undone.
    """
    from p2p_diloco.cli.invite import revoke as put_out

    put_out(name, key, flags.get("initial_peers", ()), as_json=as_json)


@app.command(cls=ListsAndCommand)
@with_settings(("initial_peers",), FOUNDER, config=False)
def kick(
    flags: dict[str, Any],
    name: str = Argument(
        ...,
        help="A name that `status` shows or that is in an invitation, a grant's id, or a peer id.",
        metavar="NAME|ID",
    ),
    key: Path | None = KEY,
    as_json: bool = OUTCOME,
) -> None:
    """Put peers out of a private run, and say which other invitations may still let them in. Needs the run's key.

    Revokes the invitation of that name or grant's id, the one that was made for that peer id, or the one with which
    the peer of that name has come, if no other peer uses it.
    """
    from p2p_diloco.cli.invite import kick as put_out

    put_out(name, key, flags.get("initial_peers", ()), as_json=as_json)


app.command("set", cls=ListsAndCommand)(set_values)
app.command(cls=ListsAndCommand)(stop)
app.command(cls=ListsAndCommand)(save)
app.command(cls=ListsAndCommand, options_metavar="[OPTIONS] [-- COMMAND ...]")(plan)
app.command(cls=ListsAndCommand)(data)


@app.command(cls=ListsAndCommand)
@with_settings(
    (*A_RUN, "host_maddrs", "announce_maddrs", "direct_port", "client_mode", "checkpoint_dir"),
    {**TOLD, "run_id": "The run whose peers are tried; unset: main."},
    quiet=True,
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
