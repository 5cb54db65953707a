"""Makes a forecast's inputs from flags, files, the timed steps of the user's script, and a run's records.

Law: flags come first, then the run's records; what is still missing is an error that names the flag. What was assumed
or taken from elsewhere is noted for the user. A script is not changed and joins no run: it gets none of this package's
variables.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from p2p_diloco.cli.processes import check_command, tied
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.interrupts import run as run_in_loop
from p2p_diloco.observe.figures import RATES, TIMES, count_of, number
from p2p_diloco.planning.advice import Advice, advise
from p2p_diloco.planning.exchange import Machine
from p2p_diloco.planning.forecast import Forecast
from p2p_diloco.settings import read_settings, without_ours

COUNT_MAX = 1e15
LONE_LINK = 1e9
"""The bandwidth assumed for a peer that is alone, in bytes a second; it sends nothing."""
_SECONDS = {"": 1.0, **TIMES}
MEASURE_S = 600.0
WARM_UP = 3
"""Steps that are made before those that are timed: they compile, and use memory for the first time."""
LOOK_EVERY_S = 0.05
END_S = 10.0


Asked = Mapping[str, Any]
"""The values of the flags, by name; None: not given. `command`: the command after --; None: no script's steps are to be
timed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the records of a run in progress say; empty if the user named no run. `links`: bytes a second, by peer;
    `steps_s`: seconds of an inner step, by peer; 0 in either: not measured."""

    params: int = 0
    config: Mapping[str, object] = field(default_factory=dict)
    links: tuple[float, ...] = ()
    steps_s: tuple[float, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A forecast and its advice. `tokens`: how many to train on (None: unknown); `names`: of the peers; `notes`: for
    the user, what was assumed or taken from elsewhere."""

    forecast: Forecast
    advice: Advice
    tokens: int | None
    names: tuple[str, ...]
    notes: tuple[str, ...]


def question(asked: Asked, settings: Mapping[str, object], config_file: Path | None) -> Question:
    """Read all inputs. `settings`: the settings that flags gave, by key.

    Raises:
        UsageError, ConfigError: a value is missing or can't be used. NoBootstrapReached: no peer of the run answers.
    """
    run, _ = read_settings(settings, os.environ, config_file)
    tokens_per_step = _count(asked["tokens_per_step"], "--tokens-per-step", "tokens")
    tokens = _count(asked["tokens"], "--tokens", "tokens")
    if tokens is not None and tokens_per_step is None:
        mend = "add the tokens of one peer's inner step: batch size × context length"
        raise UsageError("needs --tokens-per-step", key="--tokens", value=asked["tokens"], mend=mend)
    seen = _seen(settings, config_file) if {"initial_peers", "invite"} & settings.keys() else Seen()
    if seen.config:
        run = RunConfig(**{**seen.config, **run.given})
    if run.mode == "async":
        mend = "leave it out: plan computes synchronous rounds"
        raise UsageError("is not computed", key="mode", value="async", mend=mend)
    notes: list[str] = []
    params = _params(asked, seen)
    forecast = Forecast(params, _machines(asked, seen, notes), run, tokens_per_step)
    if run.num_fragments > params:
        mend = f"use at most {params}"
        wrong = "are more than the model has parameters"
        raise ConfigError(wrong, key="num_fragments", value=run.num_fragments, mend=mend)
    numbered = tuple(f"peer {number + 1}" for number in range(forecast.peers))
    names = seen.names if len(seen.names) == forecast.peers else numbered
    return Question(forecast, advise(forecast, asked["utilisation"], tokens), tokens, names, tuple(notes))


def _machines(asked: Asked, seen: Seen, notes: list[str]) -> list[Machine]:
    links = [each * 1e6 / 8 for each in _values(asked["bandwidth"], "--bandwidth", RATES, "50mbit")]
    delays = _values(asked["latency"], "--latency", TIMES, "60ms")
    steps = _values(asked["step_time"], "--step-time", _SECONDS, "0.5")
    if asked["command"] is not None:
        if steps:
            mend = "leave it out, or leave out --measure"
            raise UsageError("is measured already", key="--step-time", value=asked["step_time"], mend=mend)
        steps = [step_time(asked["command"], asked["measure_steps"])]
        notes.append(f"a step took {steps[0]:.3g} s on this machine, by median of {asked['measure_steps']}")
    peers = asked["peers"] or max(len(links), len(delays), len(steps), len(seen.names))
    if asked["peers"] is None and peers < 2:
        raise UsageError("is missing", key="--peers", mend="say how many peers, e.g. --peers 4")
    links = links or _recorded("links", seen.links, peers, min, notes) or [LONE_LINK] * (peers == 1)
    steps = steps or _recorded("step times", seen.steps_s, peers, max, notes)
    if not delays and peers > 1:
        notes.append("latency: taken as 0; --latency 60ms gives the round trip between two peers")
    columns = []
    for key, values, example in (
        ("--bandwidth", links, "--bandwidth 50mbit"),
        ("--latency", delays or [0.0], ""),
        ("--step-time", steps, "--step-time 0.5, or --measure -- python train.py"),
    ):
        if not values:
            wrong = "is missing" + (", and the run's peers have not measured it" if seen.names else "")
            raise UsageError(wrong, key=key, mend=f"give e.g. {example}")
        if len(values) not in (1, peers):
            mend = f"give one for all, or {peers} with commas"
            raise UsageError(f"has {len(values)} values for {peers} peers", key=key, mend=mend)
        columns.append(values * (peers // len(values)))
    return [Machine(*each) for each in zip(*columns, strict=True)]


def _recorded(
    what: str, values: Sequence[float], peers: int, worst: Callable[[Sequence[float]], float], notes: list[str]
) -> list[float]:
    """The values that a run's peers have measured, one for each peer; a peer that has measured none gets the `worst` of
    the others. If the forecast is for another number of peers, the list has only the median. Empty if no peer has
    measured one."""
    known = [each for each in values if each]
    if known and len(values) != peers:
        notes.append(f"{what}: the median of what the run's {len(values)} peers have measured")
        return [statistics.median(known)]
    if known:
        unknown = f" ({len(values) - len(known)} unknown: the worst)" if len(known) < len(values) else ""
        notes.append(f"{what}: as the run's peers have measured{unknown}")
    return [each or worst(known) for each in values] if known else []


def _values(text: str | None, key: str, units: Mapping[str, float], example: str) -> list[float]:
    """The numbers in a flag's `text`; empty if it is None. They must be positive; a latency may also be 0."""
    found = [] if text is None else [number(each, units) for each in text.split(",")]
    values = [value for value in found if value or (value == 0 and key == "--latency")]
    if len(values) != len(found):
        mend = f"write e.g. {example}, or one for each peer with commas"
        raise UsageError("has a value that can't be read", key=key, value=text, mend=mend)
    return values


def _count(text: str | None, key: str, what: str) -> int | None:
    return None if text is None else count_of(text, key=key, what=what, most=COUNT_MAX)


# -- timed steps


def step_time(command: Sequence[str], steps: int) -> float:
    """The median time of `steps` steps of the command's optimizer, in seconds. Of several processes the slowest counts.

    Raises:
        UsageError: there is no such command, or it makes too few steps.
    """
    check_command(command)
    typer.echo(
        f"running {' '.join(command)} until {steps + WARM_UP} steps are made, {MEASURE_S:.0f} s at most", err=True
    )
    with tempfile.TemporaryDirectory(prefix="p2p-diloco-plan-") as folder:
        times = Path(folder) / "times"
        found, status = _run(command, times, steps + WARM_UP + 1)
    if not found:
        ended = (
            "made too few steps of a torch optimizer within" if status is None else f"ended (exit code {status}) before"
        )
        wrong = f"{ended} {MEASURE_S:.0f} s" if status is None else f"{ended} it made {WARM_UP + 3} steps"
        raise UsageError(wrong, key="--measure", value=" ".join(command), mend="mend it, or give --step-time")
    return max(statistics.median(later - earlier for earlier, later in pairwise(each[WARM_UP:])) for each in found)


def _run(command: Sequence[str], times: Path, wanted: int) -> tuple[list[list[float]], int | None]:
    """Run the command until a process has made `wanted` steps. Returns the times at which each process made its steps,
    for processes that made enough, and the command's exit code; None if this process ended the command."""
    here = os.pathsep.join([str(Path(__file__).parent / "timing"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**without_ours(os.environ), "PYTHONPATH": here, "PLAN_TIMES_FILE": str(times)}
    until = time.monotonic() + MEASURE_S
    child = tied(command, env=environment, stdout=sys.stderr.fileno(), stdin=subprocess.DEVNULL)
    try:
        while (status := child.poll()) is None and time.monotonic() < until:
            if any(len(each) >= wanted for each in _read(times)):
                break
            time.sleep(LOOK_EVERY_S)
    finally:
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    return [each[:wanted] for each in _read(times) if len(each) >= WARM_UP + 3], status


def _read(times: Path) -> list[list[float]]:
    return [[float(line) for line in file.read_text().split("\n")[:-1]] for file in times.parent.glob("times.*")]


# -- the model's size


def _params(asked: Asked, seen: Seen) -> int:
    if asked["params"] is not None and asked["model"] is not None:
        raise UsageError(
            "names the model's size as well", key="--model", value=asked["model"], mend="leave out --params"
        )
    if asked["params"] is not None:
        return count_of(asked["params"], key="--params", most=COUNT_MAX)
    if asked["model"] is not None:
        return size_of(asked["model"])
    if not seen.params:
        raise UsageError("is missing", key="--params", mend="give the number of trained parameters, e.g. --params 1B")
    return seen.params


def size_of(path: Path) -> int:
    """The number of parameters of a checkpoint of ours (or of the newest in a folder of them), or of the model that a
    config.json of Transformers describes.

    Raises:
        ConfigError: the path is neither, or can't be read.
    """
    newest = sorted(path.glob("checkpoint-*/manifest.json"), key=lambda file: file.stat().st_mtime)[-1:]
    for manifest in (each for each in [path / "manifest.json", *newest] if each.is_file()):
        try:
            return sum(math.prod(shape) for _, shape, _ in json.loads(manifest.read_text())["layout"]["params"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            wrong, mend = f"can't be read ({type(error).__name__})", "name another checkpoint, or give --params"
            raise ConfigError(wrong, key="--model", value=manifest, mend=mend) from None
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        wrong = "is neither a checkpoint nor a config.json"
        raise ConfigError(wrong, key="--model", value=path, mend="check the path, or give --params")
    from p2p_diloco.integrations.sizes import parameters_of

    return parameters_of(config)


# -- a run in progress


def _seen(settings: Mapping[str, object], config_file: Path | None) -> Seen:
    from p2p_diloco.cli.join import settings_of
    from p2p_diloco.cli.reach import check_initial_peers

    _, peer = settings_of(settings, config_file)
    check_initial_peers(peer.initial_peers)
    return run_in_loop(_look(peer))


async def _look(peer: PeerConfig) -> Seen:
    from p2p_diloco.net.invited import read_invitation
    from p2p_diloco.observe.snapshot import look, observer, run_record

    async with observer(peer.initial_peers, None if peer.invite is None else read_invitation(peer)) as dht:
        snapshot, record = await look(dht, peer.run_id), await run_record(dht, peer.run_id)
    workers = [each for each in snapshot.peers if each.role == "worker" and not (each.gone or each.state == "finished")]
    if record is None or not workers:
        mend = "check the name, the invitation, and whether peers live (p2p-diloco status)"
        raise ConfigError("has no record or no live peer", key="run_id", value=peer.run_id, mend=mend)
    return Seen(
        record.numel,
        {**(snapshot.run.config or {}), **snapshot.run.changed},
        tuple(float(each.bandwidth or 0) for each in workers),
        tuple(1 / each.steps_per_second if each.steps_per_second else 0.0 for each in workers),
        tuple(each.name or each.peer_id[-6:] for each in workers),
    )
