"""Peers of unlike speed: how soon a run reaches a held-out loss, synchronous and asynchronous, seed by seed.

Three processes as a user would write them train the built-in model, one `Peer` each. The second sleeps until its step
has taken twice as long as the first one's, the third five times as long: speeds 1 : 0.5 : 0.2, with any
other load on the machine. All runs of a seed start from one model and draw the same text. The first peer stores the
global parameters after its exchanges, and evaluates them when the run is over, so that evaluation costs the run no
time. The synchronous runs with one H for all have the H that the slowest makes while the fastest makes the H of the
other runs, so that all settings exchange equally often.

python examples/unlike.py --folder unlike                      # five settings, seeds 0, 1 and 2: 40 minutes
python examples/unlike.py --folder unlike --settings sync "async, DN, DyLU" --seeds 1 --seconds 60
python examples/unlike.py --folder unlike --table              # only the table and unlike/unlike.png

A run leaves one line of JSON in unlike/results.jsonl; a second call makes only the missing runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from parity import draw, end, said, say, starting_point
from torch import Tensor

from p2p_diloco import Peer, PeerConfig, RunConfig
from p2p_diloco.observe.plot import Curve, write_png
from p2p_diloco.trainer.blocks import load_text
from p2p_diloco.trainer.config import TrainerConfig
from p2p_diloco.trainer.gpt import GPT, GPTConfig
from p2p_diloco.trainer.schedule import learning_rate
from p2p_diloco.trainer.text import held_out_batches, training_part
from p2p_diloco.trainer.train import mean_loss, new_optimizer

SPEEDS = (1.0, 0.5, 0.2)
DELAYED = {"mode": "async", "dn_buffer_size": len(SPEEDS)}
SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, by time": {"pace": "time"},
    "async": {"mode": "async"},
    "async, DN": DELAYED,
    "async, DN, DyLU": {**DELAYED, "dylu": True},
}
WINDOWS = {"count": 16, "batch_size": 16}  # held-out: 256
START_S = 300.0
PLOTTED_MAX = 3.0
"""Losses above this are drawn at it, because a diverging run would make the others unreadable."""


# -- one peer's process


def peer(told: Mapping[str, Any]) -> None:
    """Train for the given seconds after the signal to begin; then print a line of JSON with the result."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    config = TrainerConfig(batch_size=told["batch_size"], seed=told["seed"])
    text, index = load_text(), told["index"]
    model = GPT(GPTConfig(seed=config.seed))
    model.load_state_dict(torch.load(told["start"], weights_only=True))
    batches = draw(training_part(text), config, f"peer{index}")
    optimizer = new_optimizer(model, config)
    local = PeerConfig(run_id=told["run_id"], initial_peers=tuple(told["initial_peers"]), name=f"peer{index}")
    kept: list[tuple[float, dict[str, Tensor]]] = []  # (seconds since the beginning, the global parameters)
    with Peer(model, optimizer, config=RunConfig(**told["config"]), local=local) as joined:
        say({"addresses": joined.addresses})
        while len(joined.peers) < len(SPEEDS):
            time.sleep(0.1)
        say({"ready": index})
        sys.stdin.readline()
        began, exchanges = time.monotonic(), 0
        while (at := time.monotonic()) < began + told["seconds"]:
            step(model, optimizer, joined, next(batches), config)
            if index == 0 and joined.metrics.sync_count > exchanges:
                exchanges = joined.metrics.sync_count
                kept.append((time.monotonic() - began, joined.global_state_dict()))
            if (left := at + told["period"] / SPEEDS[index] - time.monotonic()) > 0:
                time.sleep(left)
        metrics = joined.metrics
        figures = {"steps": metrics.local_step, "exchanges": metrics.sync_count, "every": metrics.sync_every}
        say({**figures, "waited_s": round(metrics.waiting_time_s, 2)})
        sys.stdin.readline()  # all peers leave together
    if index == 0:
        judged = list(held_out_batches(text, context=config.context, **WINDOWS))
        losses = []
        for at, state in thinned(kept, told["seconds"] / told["points"]):
            model.load_state_dict(state)
            losses.append([round(at, 2), round(mean_loss(model, judged), 4)])
        say({"curve": losses})


def step(model: GPT, optimizer: torch.optim.Optimizer, joined: Peer, batch: Any, config: TrainerConfig) -> None:
    """One inner step; the learning rate is constant after its warm-up, because the number of steps is not known
    beforehand."""
    rate = learning_rate(
        joined.global_step, horizon=None, peak=config.lr, warmup_steps=config.warmup_steps, min_ratio=1.0
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = model(*batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    joined.report(loss=loss.item(), samples=config.batch_size)
    optimizer.step()
    optimizer.zero_grad()


def thinned(kept: Sequence[tuple[float, Any]], apart_s: float) -> Iterator[tuple[float, Any]]:
    """Moments that are at least this far apart, and the last one."""
    last = -apart_s
    for number, (at, state) in enumerate(kept):
        if at >= last + apart_s or number == len(kept) - 1:
            last = at
            yield at, state


# -- one run


def measured(asked: argparse.Namespace, setting: str, seed: int) -> dict[str, Any]:
    """One run. Raises RuntimeError if a peer fails."""
    fixed = {key: getattr(asked, key) for key in ("outer_lr", "outer_momentum")}
    every = asked.async_every if SETTINGS[setting] else asked.sync_every
    fixed |= {"start_peers": len(SPEEDS), "sync_every": every}
    told = {"seed": seed, "start": str(starting_point(asked, seed)), "points": asked.points}
    told |= {key: getattr(asked, key) for key in ("batch_size", "seconds", "period")}
    told |= {"config": {**fixed, **SETTINGS[setting]}, "run_id": f"unlike-{os.getpid()}-{time.time_ns()}"}
    with (asked.folder / "log.txt").open("ab") as log:
        processes: list[subprocess.Popen[str]] = []
        lines: list[Iterator[Any]] = []
        watch = threading.Timer(START_S + 3 * asked.seconds, lambda: end(processes))
        watch.start()
        try:
            addresses: list[str] = []
            for index in range(len(SPEEDS)):
                values = json.dumps({**told, "index": index, "initial_peers": addresses})
                command = [sys.executable, __file__, "--peer", values]
                own = {"XDG_STATE_HOME": str(asked.folder.resolve() / "state"), "OMP_NUM_THREADS": "1"}
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                process = subprocess.Popen(command, **pipes, stderr=log, text=True, env={**os.environ, **own})
                processes.append(process)
                lines.append(said(process))
                addresses = addresses or next(lines[index])["addresses"]
            for line in lines[1:]:
                next(line)  # the founder's addresses
            for line in lines:
                next(line)  # the peer is ready
            together(processes)
            ends = [next(line) for line in lines]
            together(processes)
            curve = next(lines[0])["curve"]
        finally:
            watch.cancel()
            end(processes)
    return {**identity(asked, setting, seed), "peers": ends, "curve": curve}


def together(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Let all peers go on."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


# -- the series


def identity(asked: argparse.Namespace, setting: str, seed: int) -> dict[str, Any]:
    """The settings that identify a run."""
    keys = ("seconds", "period", "sync_every", "async_every", "outer_lr", "outer_momentum", "warm_start", "batch_size")
    return {"setting": setting, "seed": seed, **{key: getattr(asked, key) for key in keys}}


def found(asked: argparse.Namespace, setting: str) -> dict[int, dict[str, Any]]:
    """The finished runs of a setting, by seed."""
    path, runs = asked.folder / "results.jsonl", {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        line = json.loads(text) if text.endswith("}") else {}  # an incomplete line has no end
        if line and line == line | identity(asked, setting, line["seed"]):
            runs[line["seed"]] = line
    return runs


def series(asked: argparse.Namespace) -> int:
    """Make the missing runs, a seed at a time; return how many failed."""
    failed = 0
    for seed in range(asked.seeds):
        for setting in asked.settings:
            if seed in found(asked, setting):
                continue
            try:
                line = measured(asked, setting, seed)
            except (RuntimeError, StopIteration) as error:
                failed += 1
                sys.stderr.write(f"{setting}, seed {seed}: {error}\n")
                continue
            with (asked.folder / "results.jsonl").open("a", encoding="utf-8") as results:
                results.write("\n" + json.dumps(line, ensure_ascii=False))  # ends an incomplete line, too
    return failed


def reached(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """When a curve was first at or below a loss, in seconds."""
    return next((at for at, value in curve if value <= loss), None)


def setback(curve: Sequence[Sequence[float]]) -> float:
    """The largest rise of a loss above the lowest before it."""
    lowest, worst = float("inf"), 0.0
    for _, loss in curve:
        lowest = min(lowest, loss)
        worst = max(worst, loss - lowest)
    return worst


def table(asked: argparse.Namespace) -> Iterator[str]:
    """Rows of docs/results.md: the seconds to the loss by seed, their median and spread, and other figures."""
    seeds = " | ".join(f"seed {seed}" for seed in range(asked.seeds))
    ends = "loss at the end | largest setback | steps of each peer | time that each stands still"
    yield f"| setting | {seeds} | median, least to most | {ends} |"
    yield "|---" * (asked.seeds + 6) + "|"
    for setting in asked.settings:
        runs = found(asked, setting)
        if not runs:
            continue
        times = {seed: reached(run["curve"], asked.loss) for seed, run in runs.items()}
        cells = [_seconds(times[seed]) if seed in times else "" for seed in range(asked.seeds)]
        met = sorted(at if at is not None else float("inf") for at in times.values())
        spread = f"{_seconds(statistics.median_high(met))}, {_seconds(met[0])} to {_seconds(met[-1])}"
        last = statistics.median(run["curve"][-1][1] for run in runs.values())
        rose = max(setback(run["curve"]) for run in runs.values())
        steps, waited_s = (medians(runs.values(), key) for key in ("steps", "waited_s"))
        stood = ", ".join(f"{each / asked.seconds:.1%}" for each in waited_s)
        cells += [spread, f"{last:.3f}", f"{rose:.3f}", ", ".join(f"{each:.0f}" for each in steps), stood]
        yield f"| {setting} | {' | '.join(cells)} |"


def medians(runs: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """The median over the runs, for each peer."""
    return [statistics.median(found) for found in zip(*([p[key] for p in run["peers"]] for run in runs), strict=True)]


def _seconds(at: float | None) -> str:
    return "not reached" if at is None or at == float("inf") else f"{at:.0f} s"


def plot(asked: argparse.Namespace) -> None:
    """Draw each setting's run of the median time, as a PNG."""
    curves = []
    for setting, mark in zip(asked.settings, "*x+o.", strict=False):
        runs = sorted(found(asked, setting).values(), key=lambda run: reached(run["curve"], asked.loss) or float("inf"))
        if runs:
            points = tuple((at, min(loss, PLOTTED_MAX)) for at, loss in runs[len(runs) // 2]["curve"])
            curves.append(Curve(setting, mark, points))
    if not curves:
        return
    both = f"H = {asked.sync_every} and {asked.async_every}"
    title = f"Three peers, speeds 1 : 0.5 : 0.2, {both}: the runs of the median time"
    path = asked.folder / "unlike.png"
    write_png(path, curves, [], title=title, x_label="seconds of training", y_label="held-out loss, nats a byte")


def main() -> int:
    """The runs, then the table and the plot."""
    parser = argparse.ArgumentParser(description="How soon peers of unlike speed reach a held-out loss.")
    parser.add_argument("--folder", type=Path, default=Path("unlike"), help="for results, starting points and logs")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, metavar="SETTING")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of training in a run")
    parser.add_argument("--period", type=float, default=0.06, help="seconds of the fastest peer's step, sleep included")
    parser.add_argument("--sync-every", type=int, default=20, help="H of the synchronous runs with one for all")
    parser.add_argument("--async-every", type=int, default=100, help="H of the others, the fastest peer's")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--loss", type=float, default=2.15, help="the held-out loss to reach")
    parser.add_argument("--warm-start", type=int, default=100, help="data-parallel steps before the run")
    parser.add_argument("--batch-size", type=int, default=8, help="batch size of each peer")
    parser.add_argument("--points", type=int, default=60, help="evaluations of a run")
    parser.add_argument("--table", action="store_true", help="make no run")
    parser.add_argument("--peer", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer is not None:
        peer(asked.peer)
        return 0
    torch.set_num_threads(1)
    asked.folder.mkdir(parents=True, exist_ok=True)
    failed = 0 if asked.table else series(asked)
    sys.stdout.writelines(row + "\n" for row in table(asked))
    try:
        plot(asked)
    except ImportError:
        sys.stderr.write("no plot: matplotlib is missing (pip install p2p-diloco[plot])\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
