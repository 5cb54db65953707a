"""`plan`: forecasts a run from the user's machines and links, and advises. The arithmetic is in `p2p_diloco.planning`.

Law: reads flags, files and a run's records; draws what `planning` computes. This file only declares the flags: the
modules that carry the command out are loaded only when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer import Option

from p2p_diloco.cli.flags import A_RUN, TOLD, with_settings

_MACHINES, _WORK = "Machines and links", "The work"


def _work(help_: str, metavar: str, default: Any = None, **more: Any) -> Any:
    return Option(default, help=help_, metavar=metavar, rich_help_panel=_WORK, **more)


def _machine(help_: str, metavar: str, **more: Any) -> Any:
    return Option(None, help=help_, metavar=metavar, rich_help_panel=_MACHINES, **more)


@with_settings(
    {
        "What all peers agree on": (
            "sync_every",
            "num_fragments",
            "overlap_steps",
            "codec",
            "reply_codec",
            "pace",
            "outer_momentum",
        ),
        "": A_RUN,
    },
    {**TOLD, "run_id": "The run to take figures from; unset: main."},
)
def plan(
    ctx: typer.Context,
    flags: dict[str, Any],
    config: Path | None,
    params: str | None = _work("Trained parameters of the model: 150M, 1B.", "N"),
    model: Path | None = _work("Instead of --params: a run's checkpoint, or a Transformers config.json.", "PATH"),
    tokens_per_step: str | None = _work("Tokens of an inner step of one peer: 16k.", "N"),
    tokens: str | None = _work("Tokens to train on, of all peers together: 10B.", "N"),
    utilisation: float = _work("The fraction of the time that should be training.", "X", 0.95, min=0.01, max=0.9999),
    peers: int | None = _machine("Number of peers; unset: as many as a list below has values.", "K", min=1, max=1000),
    bandwidth: str | None = _machine("Speed of a link's slower direction: 50mbit; or one for each.", "RATE[,...]"),
    latency: str | None = _machine("Round trip between two peers: 60ms; or one for each peer.", "TIME[,...]"),
    step_time: str | None = _machine("Time of an inner step: 0.5; or one for each peer.", "X[,...]"),
    measure: bool = Option(
        False, "--measure", help="Run the script after --, and time its steps.", rich_help_panel=_MACHINES
    ),
    measure_steps: int = Option(20, min=3, help="Steps to time.", metavar="N", rich_help_panel=_MACHINES),
    png: Path | None = Option(None, help="Draw utilisation against bandwidth into this file, too.", metavar="FILE"),
    as_json: bool = Option(False, "--json", help="Print the figures as one JSON object (docs/planning.md)."),
) -> None:
    """Forecast a run: does it pay on these machines and links, how long does it take, and which H?

    p2p-diloco plan --params 1B --peers 4 --bandwidth 50mbit --latency 60ms --step-time 1

    Nothing is sent. With --initial-peers or --invite, what no flag gives is read from the run's records.
    """
    from p2p_diloco.cli.plan.view import answer

    command = (ctx.obj or []) if measure or ctx.obj else None
    answer({**ctx.params, "command": command}, flags, config, png, as_json=as_json)
