"""Declares the commands and their flags.

Law: each command declares its flags and calls the module that does the work, which it imports only then. Errors are
raised; `p2p_diloco.cli` prints them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer import Option

from p2p_diloco import __version__
from p2p_diloco.cli import control
from p2p_diloco.cli.data import data
from p2p_diloco.cli.flags import BriefHelp, ListsAndCommand, given, show_all, with_dashes, with_flags
from p2p_diloco.cli.logs import set_up_logs
from p2p_diloco.cli.options import (
    BASELINE,
    BASELINE_BOUND,
    CONFIG,
    DEBUG,
    INITIAL_PEERS,
    INVITE,
    JOIN,
    LOGS,
    METRICS_HOST,
    METRICS_PORT,
    OTLP_ENDPOINT,
    TOKENS_PER_SAMPLE,
)
from p2p_diloco.cli.plan.flags import plan
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.trainer.config import TrainerConfig

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
def bootstrap(
    host: str = Option("127.0.0.1", help="Address to listen on; 0.0.0.0 listens on every interface.", metavar="IP"),
    port: int = Option(0, help="TCP port to listen on; 0 lets the system choose.", metavar="N"),
    host_maddrs: list[str] | None = Option(
        None, help="Addresses to listen on, instead of --host and --port.", metavar="ADDR..."
    ),
    announce_maddrs: list[str] | None = Option(None, help="Addresses that peers are told to dial.", metavar="ADDR..."),
    initial_peers: list[str] | None = Option(None, help="Other bootstraps of the same swarm.", metavar="ADDR..."),
    identity_path: Path | None = Option(
        None,
        help="File that keeps the identity, and so the address, across restarts; unset: a new one.",
        metavar="PATH",
    ),
    relay_mbit: float | None = Option(
        None,
        help="Mbit/s to relay between peers that can't reach each other; 0: none.",
        metavar="X",
        show_default="50",
    ),
    run_key: list[str] | None = Option(
        None,
        help="Relay for the private runs with these public keys only; unset: for every run.",
        metavar="HEX...",
    ),
    as_json: bool = Option(False, "--json", help="Print the addresses as one JSON object."),
    logs: str = LOGS,
    debug: bool = DEBUG,
) -> None:
    """Start a bootstrap (a peer of the DHT, and a relay), and print the command line with which peers join."""
    set_up_logs(logs, debug=debug)
    from p2p_diloco.cli.bootstrap import serve

    flags = {
        "host_maddrs": host_maddrs,
        "announce_maddrs": announce_maddrs,
        "initial_peers": initial_peers,
        "identity_path": identity_path,
        "relay_mbit": relay_mbit,
    }
    serve(host, port, given(PeerConfig, flags), run_keys=run_key or (), as_json=as_json)


@app.command(cls=BriefHelp, options_metavar="[OPTIONS] [-- COMMAND ...]")
@with_flags(JOIN)
def join(
    ctx: typer.Context,
    config: Path | None = CONFIG,
    logs: str = LOGS,
    debug: bool = DEBUG,
    _help_all: bool = Option(
        False, "--help-all", help="Show all options.", is_eager=True, callback=show_all, expose_value=False
    ),
    **flags: Any,
) -> None:
    """Join a run, or found it. Train with the built-in trainer, or run the command after [bold]--[/bold].

    The options below are those that most people set; [bold]--help-all[/bold] shows all of them.
    What no flag, P2P_DILOCO_... variable or file gives is taken from the run.
    """
    set_up_logs(logs, debug=debug)
    from p2p_diloco.cli.join import join_run

    settings = {**given(RunConfig, flags), **given(PeerConfig, flags)}
    raise typer.Exit(join_run(settings, given(TrainerConfig, flags), config, ctx.obj))


@app.command(cls=ListsAndCommand)
def status(
    initial_peers: list[str] | None = INITIAL_PEERS,
    run_id: str | None = Option(None, help="The run to look at.", show_default="main", metavar="NAME"),
    invite: str | None = INVITE,
    as_json: bool = Option(False, "--json", help="JSON, described in docs/status.md."),
    once: bool = Option(False, "--once", help="Look once and leave."),
    check: bool = Option(
        False, "--check", help="Look once, and print what is wrong; the exit code is 1 if anything is."
    ),
    stall_rounds: float = Option(
        5.0, help="For --check: a run without a commit for X times a round's usual length is stalled.", metavar="X"
    ),
    interval: float = Option(2.0, help="Seconds between two looks.", metavar="X"),
    baseline: Path | None = BASELINE,
    baseline_bound: float = BASELINE_BOUND,
    tokens_per_sample: float | None = TOKENS_PER_SAMPLE,
    metrics_port: int | None = METRICS_PORT,
    metrics_host: str = METRICS_HOST,
    otlp_endpoint: str | None = OTLP_ENDPOINT,
    config: Path | None = CONFIG,
    logs: str = LOGS,
    debug: bool = DEBUG,
) -> None:
    """Show the peers and the progress of a run. Reads the DHT, and takes no part in the run."""
    set_up_logs(logs, debug=debug)
    from p2p_diloco.cli.status import beside, check_once, show

    own = {"initial_peers": initial_peers, "run_id": run_id, "invite": invite, "otlp_endpoint": otlp_endpoint}
    flags = given(PeerConfig, own)
    compare = beside(baseline, baseline_bound, tokens_per_sample)
    if check:
        raise typer.Exit(check_once(flags, config, compare, stall_rounds, as_json=as_json))
    metrics = None if metrics_port is None else (metrics_host, metrics_port)
    show(flags, config, as_json=as_json, once=once, interval_s=interval, compare=compare, metrics=metrics)


@app.command(cls=ListsAndCommand)
def dashboard(
    initial_peers: list[str] | None = INITIAL_PEERS,
    run_id: str | None = Option(None, help="The run to look at.", show_default="main", metavar="NAME"),
    invite: str | None = INVITE,
    host: str = Option("127.0.0.1", help="Address of this machine that browsers can reach.", metavar="ADDR"),
    port: int = Option(9465, min=0, max=65535, help="TCP port; 0: any.", metavar="N"),
    interval: float = Option(1.0, help="Seconds between two looks.", metavar="X"),
    baseline: Path | None = BASELINE,
    baseline_bound: float = BASELINE_BOUND,
    tokens_per_sample: float | None = TOKENS_PER_SAMPLE,
    identity_path: Path | None = Option(
        None, help="Identity file of the run's founder; with it the page can set, save and stop.", metavar="PATH"
    ),
    key: Path | None = Option(
        None, help="File of the run's key; with it the page can do that and put peers out.", metavar="PATH"
    ),
    metrics_port: int | None = METRICS_PORT,
    metrics_host: str = METRICS_HOST,
    otlp_endpoint: str | None = OTLP_ENDPOINT,
    config: Path | None = CONFIG,
    logs: str = LOGS,
    debug: bool = DEBUG,
) -> None:
    """Show a run in the browser: prints a link. Takes no part in the run, and needs no internet.

    It only shows the run unless the founder's identity file or the run's key is given.
    """
    set_up_logs(logs, debug=debug)
    from p2p_diloco.cli.dashboard import show
    from p2p_diloco.cli.status import beside

    compare = beside(baseline, baseline_bound, tokens_per_sample)
    own = {"initial_peers": initial_peers, "run_id": run_id, "invite": invite, "identity_path": identity_path,
           "otlp_endpoint": otlp_endpoint}  # fmt: skip
    metrics = None if metrics_port is None else (metrics_host, metrics_port)
    show(given(PeerConfig, own), config, host=host, port=port, interval_s=interval, compare=compare, key=key,
         metrics=metrics)  # fmt: skip


@app.command(cls=ListsAndCommand)
def export(
    out: Path = Option(..., help="Folder to write to.", metavar="DIR"),
    initial_peers: list[str] | None = INITIAL_PEERS,
    run_id: str | None = Option(None, help="The run to read.", show_default="main", metavar="NAME"),
    invite: str | None = INVITE,
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
    wait_timeout: float | None = Option(
        None, help="Seconds to wait for the run and for its state.", metavar="X", show_default="300"
    ),
    config: Path | None = CONFIG,
    logs: str = LOGS,
    debug: bool = DEBUG,
) -> None:
    """Write a run's global parameters as a model, and print one line of JSON.

    Reads the newest state from a run's peers, and takes no part in the run.
    """
    set_up_logs(logs, debug=debug)
    from p2p_diloco.cli.export import export as write

    flags = {"initial_peers": initial_peers, "run_id": run_id, "invite": invite, "wait_timeout": wait_timeout}
    write(given(PeerConfig, flags), config, checkpoint, out, form, dtype, replace=force)


for _name, _command in control.COMMANDS.items():
    app.command(_name, cls=ListsAndCommand)(_command)
app.command(cls=ListsAndCommand, options_metavar="[OPTIONS] [-- COMMAND ...]")(plan)
app.command(cls=ListsAndCommand)(data)


@app.command(cls=ListsAndCommand)
def doctor(
    initial_peers: list[str] | None = INITIAL_PEERS,
    run_id: str | None = Option(None, help="The run whose peers are tried.", show_default="main", metavar="NAME"),
    invite: str | None = INVITE,
    host_maddrs: list[str] | None = Option(None, help="Addresses that the peer would listen on.", metavar="ADDR..."),
    announce_maddrs: list[str] | None = Option(
        None, help="Addresses that other peers would be told to dial.", metavar="ADDR..."
    ),
    direct_port: int | None = Option(None, help="TCP port for direct connections.", metavar="N"),
    client_mode: bool | None = Option(
        None, "--client-mode/--no-client-mode", help="The peer would take no incoming connections."
    ),
    checkpoint_dir: Path | None = Option(None, help="Folder that checkpoints would go to.", metavar="PATH"),
    params: str | None = Option(
        None, help="Parameters of the model, such as 25M: are memory and disk large enough?", metavar="N"
    ),
    as_json: bool = Option(False, "--json", help="Print the report as one JSON object (docs/cli.md)."),
    config: Path | None = CONFIG,
    logs: str = LOGS,
    debug: bool = DEBUG,
) -> None:
    """Check whether a peer would work here: programs, ports, clock, NAT, links, memory, disk.

    Give the addresses and ports that [bold]join[/bold] would get; other settings are read as by join.
    Changes nothing, takes no part in a run, and ends within 20 s.
    The exit code is 1 if something must be mended.
    """
    set_up_logs(logs, debug=debug, quiet=True)
    from p2p_diloco.cli.doctor.examination import doctor as examine

    flags = {
        "initial_peers": initial_peers,
        "run_id": run_id,
        "invite": invite,
        "host_maddrs": host_maddrs,
        "announce_maddrs": announce_maddrs,
        "direct_port": direct_port,
        "client_mode": client_mode,
        "checkpoint_dir": checkpoint_dir,
    }
    raise typer.Exit(examine(given(PeerConfig, flags), config, params, as_json=as_json))


@app.command()
def env() -> None:
    """Print versions, machine and settings from the environment, for a bug report."""
    from p2p_diloco.cli.doctor.machine import described

    for line in described():
        typer.echo(line)


@app.command(cls=ListsAndCommand)
def replay(
    paths: list[Path] | None = typer.Argument(
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
    The peer that is to average the next round gets a SIGKILL, and a new one joins.
    Takes about three minutes on two cores. The exit code is 1 if anything fails.
    """
    from p2p_diloco.cli.demo import demo as show

    raise typer.Exit(show(out, as_json=as_json, quick=quick))
