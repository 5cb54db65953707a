"""Declares the flags of `plan`.

Law: only declares. The modules that carry the command out are loaded only when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer import Option

from p2p_diloco.cli.flags import given
from p2p_diloco.cli.logs import set_up_logs
from p2p_diloco.cli.options import CONFIG, DEBUG, INITIAL_PEERS, INVITE, LOGS
from p2p_diloco.config import PeerConfig, RunConfig

_MACHINES, _WORK = "Machines and links", "The work"


def _setting(key: str, metavar: str) -> Any:
    """The flag of one of the run's settings."""
    field = RunConfig.model_fields[key]
    default = False if field.default is None else str(field.default)
    panel = "What all peers agree on"
    return Option(None, help=field.description, show_default=default, metavar=metavar, rich_help_panel=panel)


def _work(help_: str, metavar: str, default: Any = None) -> Any:
    return Option(default, help=help_, metavar=metavar, rich_help_panel=_WORK)


def _machine(help_: str, metavar: str, **more: Any) -> Any:
    return Option(None, help=help_, metavar=metavar, rich_help_panel=_MACHINES, **more)


def plan(
    ctx: typer.Context,
    params: str | None = _work("Trained parameters of the model: 150M, 1B.", "N"),
    model: Path | None = _work("Instead of --params: a run's checkpoint, or a Transformers config.json.", "PATH"),
    tokens_per_step: str | None = _work("Tokens of an inner step of one peer: 16k.", "N"),
    tokens: str | None = _work("Tokens to train on, of all peers together: 10B.", "N"),
    utilisation: float = _work("The fraction of the time that should be training.", "X", 0.95),
    peers: int | None = _machine("Number of peers; unset: as many as a list below has values.", "K", min=1),
    bandwidth: str | None = _machine("Speed of a link's slower direction: 50mbit; or one for each.", "RATE[,...]"),
    latency: str | None = _machine("Round trip between two peers: 60ms; or one for each peer.", "TIME[,...]"),
    step_time: str | None = _machine("Time of an inner step: 0.5; or one for each peer.", "X[,...]"),
    measure: bool = Option(
        False, "--measure", help="Run the script after --, and time its steps.", rich_help_panel=_MACHINES
    ),
    measure_steps: int = Option(20, min=3, help="Steps to time.", metavar="N", rich_help_panel=_MACHINES),
    sync_every: str | None = _setting("sync_every", "N"),
    num_fragments: str | None = _setting("num_fragments", "N"),
    overlap_steps: str | None = _setting("overlap_steps", "N"),
    codec: str | None = _setting("codec", "NAME"),
    reply_codec: str | None = _setting("reply_codec", "NAME"),
    pace: str | None = _setting("pace", "[steps|time]"),
    outer_momentum: str | None = _setting("outer_momentum", "X"),
    initial_peers: list[str] | None = INITIAL_PEERS,
    run_id: str | None = Option(None, help="The run to take figures from.", show_default="main", metavar="NAME"),
    invite: str | None = INVITE,
    png: Path | None = Option(None, help="Draw utilisation against bandwidth into this file, too.", metavar="FILE"),
    as_json: bool = Option(False, "--json", help="Print the figures as one JSON object (docs/planning.md)."),
    config: Path | None = CONFIG,
    logs: str = LOGS,
    debug: bool = DEBUG,
) -> None:
    """Forecast a run: does it pay on these machines and links, how long does it take, and which H?

    p2p-diloco plan --params 1B --peers 4 --bandwidth 50mbit --latency 60ms --step-time 1

    Nothing is sent. With --initial-peers or --invite, what no flag gives is read from the run's records.
    """
    set_up_logs(logs, debug=debug)
    from p2p_diloco.cli.plan.inputs import Asked
    from p2p_diloco.cli.plan.view import answer

    flags = {**ctx.params, "command": (ctx.obj or []) if measure or ctx.obj else None}
    asked = Asked(**{name: flags[name] for name in Asked.__dataclass_fields__})
    answer(asked, {**given(RunConfig, flags), **given(PeerConfig, flags)}, config, png, as_json=as_json)
