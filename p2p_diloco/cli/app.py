"""Declares the commands and their flags.

Law: each command declares its flags and calls the module that does the work, which it imports only then. Errors are
raised; `p2p_diloco.cli` prints them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Argument, Option

from p2p_diloco import __version__
from p2p_diloco.cli.data import data
from p2p_diloco.cli.flags import (
    A_RUN,
    BASELINE,
    BASELINE_BOUND,
    FOUNDER,
    JOIN,
    KEY,
    METRICS_HOST,
    METRICS_PORT,
    OUTCOME,
    TOKENS_PER_SAMPLE,
    TOLD,
    WAIT,
    BriefHelp,
    ListsAndCommand,
    given,
    show_all,
    with_dashes,
    with_settings,
)
from p2p_diloco.cli.plan import plan
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.core.revision import CHANGEABLE
from p2p_diloco.trainer.config import TrainerConfig

if TYPE_CHECKING:
    from p2p_diloco.observe.baseline import Baseline

FOUNDERS = (*A_RUN, "identity_path")
"""The settings that name a run and who changes it."""

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


@app.command(cls=ListsAndCommand)
@with_settings(
    ("host_maddrs", "announce_maddrs", "initial_peers", "identity_path", "relay_mbit"),
    {
        "host_maddrs": "Addresses to listen on, instead of --host and --port.",
        "initial_peers": "Other bootstraps of the same swarm.",
        "identity_path": "File that keeps the identity, and so the address, across restarts; unset: a new one.",
        "relay_mbit": "Mbit/s to relay between peers that can't reach each other; 0: none. [dim](default 50)[/dim]",
    },
    config=False,
)
def bootstrap(
    flags: dict[str, Any],
    host: str = Option("127.0.0.1", help="Address to listen on; 0.0.0.0 listens on every interface.", metavar="IP"),
    port: int = Option(0, min=0, max=65535, help="TCP port to listen on; 0 lets the system choose.", metavar="N"),
    run_key: list[str] | None = Option(
        None,
        help="Relay for the private runs with these public keys only; unset: for every run.",
        metavar="HEX...",
    ),
    as_json: bool = Option(False, "--json", help="Print the addresses as one JSON object."),
) -> None:
    """Start a bootstrap (a peer of the DHT, and a relay), and print the command line with which peers join."""
    from p2p_diloco.cli.bootstrap import serve

    serve(host, port, flags, run_keys=run_key or (), as_json=as_json)


@app.command(cls=BriefHelp, options_metavar="[OPTIONS] [-- COMMAND ...]")
@with_settings(JOIN)
def join(
    ctx: typer.Context,
    flags: dict[str, Any],
    config: Path | None,
    _help_all: bool = Option(
        False, "--help-all", help="Show all options.", is_eager=True, callback=show_all, expose_value=False
    ),
) -> None:
    """Join a run, or found it. Train with the built-in trainer, or run the command after [bold]--[/bold].

    The options below are those that most people set; [bold]--help-all[/bold] shows all of them.
    What no flag, P2P_DILOCO_... variable or file gives is taken from the run.
    """
    from p2p_diloco.cli.join import join_run

    settings = {**given(RunConfig, flags), **given(PeerConfig, flags)}
    raise typer.Exit(join_run(settings, given(TrainerConfig, flags), config, ctx.obj))


@app.command(cls=ListsAndCommand)
@with_settings((*A_RUN, "otlp_endpoint"), TOLD)
def status(
    flags: dict[str, Any],
    config: Path | None,
    as_json: bool = Option(False, "--json", help="JSON, described in docs/status.md."),
    once: bool = Option(False, "--once", help="Look once and leave."),
    check: bool = Option(
        False, "--check", help="Look once, and print what is wrong; the exit code is 1 if anything is."
    ),
    stall_rounds: float = Option(
        5.0,
        min=0.01,
        help="For --check: a run without a commit for X times a round's usual length is stalled.",
        metavar="X",
    ),
    interval: float = Option(2.0, min=0.01, help="Seconds between two looks.", metavar="X"),
    baseline: Path | None = BASELINE,
    baseline_bound: float = BASELINE_BOUND,
    tokens_per_sample: float | None = TOKENS_PER_SAMPLE,
    metrics_port: int | None = METRICS_PORT,
    metrics_host: str = METRICS_HOST,
) -> None:
    """Show the peers and the progress of a run. Reads the DHT, and takes no part in the run."""
    from p2p_diloco.cli.status import check_once, show

    beside = _read_baseline(baseline, baseline_bound, tokens_per_sample)
    if check:
        raise typer.Exit(check_once(flags, config, beside, stall_rounds, as_json=as_json))
    metrics = None if metrics_port is None else (metrics_host, metrics_port)
    show(flags, config, as_json=as_json, once=once, interval_s=interval, baseline=beside, metrics=metrics)


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

    beside = _read_baseline(baseline, baseline_bound, tokens_per_sample)
    metrics = None if metrics_port is None else (metrics_host, metrics_port)
    show(flags, config, host=host, port=port, interval_s=interval, baseline=beside, key=key, metrics=metrics)


def _read_baseline(path: Path | None, bound: float, tokens_per_sample: float | None) -> Baseline | None:
    if path is None:
        return None
    from p2p_diloco.observe.baseline import Baseline

    return Baseline.read(path, bound, tokens_per_sample)


@app.command(cls=ListsAndCommand)
@with_settings(
    (*A_RUN, "wait_timeout"), TOLD | {"wait_timeout": "Seconds to wait for the run and for its state; unset: 300."}
)
def export(
    flags: dict[str, Any],
    config: Path | None,
    out: Path = Option(..., help="Folder to write to.", metavar="DIR"),
    checkpoint: Path | None = Option(
        None, help="Read this checkpoint, or the newest in this folder, instead of a run.", metavar="PATH"
    ),
    form: str = Option(
        "safetensors",
        "--format",
        help="hf: for from_pretrained of Transformers; torch: a state_dict.",
        metavar="[safetensors|hf|torch]",
    ),
    dtype: str = Option("keep", help="Data type of the parameters.", metavar="[keep|float32|bfloat16|float16]"),
    force: bool = Option(False, "--force", help="Replace the files of an earlier export."),
) -> None:
    """Write a run's global parameters as a model, and print one line of JSON.

    Reads the newest state from a run's peers, and takes no part in the run.
    """
    from p2p_diloco.cli.export import export as write

    write(flags, config, checkpoint, out, form, dtype, replace=force)


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


@app.command("set", cls=ListsAndCommand)
@with_settings((*FOUNDERS, *CHANGEABLE), FOUNDER)
def set_values(flags: dict[str, Any], config: Path | None, wait: float = WAIT, as_json: bool = OUTCOME) -> None:
    """Change settings of a run in progress. Settings that are not given stay. Only the run's founder may do this.

    Every fragment takes the new values with its next commit, the same on all peers.
    Once one peer knows the new values, the change happens even if this command is ended.
    """
    from p2p_diloco.cli.revise import set_values as ask

    ask(given(RunConfig, flags), given(PeerConfig, flags), config, wait_s=wait, as_json=as_json)


@app.command(cls=ListsAndCommand)
@with_settings(FOUNDERS, FOUNDER)
def stop(
    flags: dict[str, Any],
    config: Path | None,
    save: bool = Option(False, "--save", help="Refuse to stop if no peer saves the last state."),
    wait: float = WAIT,
    as_json: bool = OUTCOME,
) -> None:
    """End a run for all its peers, after the next commits. Only the run's founder may do this.

    All peers end with the same state. Those that have a checkpoint folder save it.
    """
    from p2p_diloco.cli.revise import stop as ask

    ask(flags, config, save=save, wait_s=wait, as_json=as_json)


@app.command(cls=ListsAndCommand)
@with_settings(FOUNDERS, FOUNDER)
def save(flags: dict[str, Any], config: Path | None, wait: float = WAIT, as_json: bool = OUTCOME) -> None:
    """Let all peers that have a checkpoint folder save after the next commit. Only the run's founder may do this."""
    from p2p_diloco.cli.revise import save as ask

    ask(flags, config, wait_s=wait, as_json=as_json)


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
) -> None:
    """Check whether a peer would work here: programs, ports, clock, NAT, links, memory, disk.

    Give the addresses and ports that [bold]join[/bold] would get; other settings are read as by join.
    Changes nothing, takes no part in a run, and ends within 20 s.
    The exit code is 1 if something must be mended.
    """
    from p2p_diloco.cli.doctor.examination import doctor as examine

    raise typer.Exit(examine(flags, config, params, as_json=as_json))


@app.command()
def env() -> None:
    """Print versions, machine and settings from the environment, for a bug report."""
    from p2p_diloco.cli.doctor.machine import described

    for line in described():
        typer.echo(line)


@app.command(cls=ListsAndCommand)
def replay(
    paths: list[Path] | None = Argument(
        None, help="Histories of a run's peers, or folders of them; unset: this user's own.", metavar="[FILE]..."
    ),
    run_id: str | None = Option(None, help="Which run of a folder; unset: the newest there.", metavar="NAME"),
    epoch: int | None = Option(None, "--round", help="Show one round in detail: what each peer did.", metavar="N"),
    events: bool = Option(False, "--events", help="Print every event and its effects, one a line."),
    peer: str | None = Option(None, help="With --events: only the events of this peer.", metavar="NAME"),
    check: bool = Option(False, "--check", help="Play each history again, and compare effects with the recorded ones."),
    as_json: bool = Option(False, "--json", help="Print the story as one JSON object (docs/history.md)."),
) -> None:
    """Tell from the histories of a run's peers what happened, in fewer than 30 lines.

    Each peer writes a history (history_path). The more peers' histories there are, the more is told.
    With [bold]--check[/bold] the exit code is 1 if a history does not lead to the recorded effects.
    """
    from p2p_diloco.cli.replay import replay as tell

    raise typer.Exit(tell(paths or [], run_id, epoch, peer, events=events, checks=check, as_json=as_json))


@app.command()
def demo(
    out: Path | None = Option(None, help="Folder for plot, data and logs; unset: demo-TIME here.", metavar="DIR"),
    as_json: bool = Option(False, "--json", help="Print the outcome as one JSON object."),
    quick: bool = Option(False, "--quick", help="A third of the rounds, in about a minute."),
) -> None:
    """Watch peers on this machine train together, while one of them is killed and another joins.

    A bootstrap and three peers, each in processes of its own, train a small GPT.
    One that is to average a part of the next round gets a SIGKILL, and a new one joins.
    Takes about three minutes on two cores. The exit code is 1 if anything fails.
    """
    from p2p_diloco.cli.demo import demo as show

    raise typer.Exit(show(out, as_json=as_json, quick=quick))
