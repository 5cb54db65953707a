"""The loop over settings and seeds, and the table, JSON and plot of an experiment.

Each experiment is a file beside this one: a table of settings. `python examples/experiments/bits.py` makes its
missing runs and writes `results/bits.json` and `results/bits.png`; `python examples/experiments/all.py` does so for
all of them. `results/runs.jsonl` has a line for every run: a series can be interrupted, and experiments share runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from setting import Result, Setting
from task import Task
from virtual import simulated

DATA_PARALLEL = Setting({"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}, peers=1, batch=16)
"""AdamW on the windows of two peers: one peer alone, whose outer step takes over what it has trained."""
AVERAGING = {"outer_lr": 1.0, "outer_momentum": 0.0}
"""Outer steps to the mean of the peers' parameters."""
EDGE = 40
"""Percent: where higher losses are drawn, so that a run that diverges leaves room for the others."""
ROW_KEYS = ("loss", "time_s", "payload_bytes", "curve")


@dataclass(frozen=True, slots=True)
class Experiment:
    """Settings that are compared with one of them."""

    name: str
    title: str
    settings: Mapping[str, Setting]
    against: str
    """The setting that the others are compared with, seed by seed; in each group, if settings are named
    "group: setting"."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """The highest loss that a setting should have, as a quotient; below 1: the lowest quotient is not above it."""
    least: Mapping[str, float] = field(default_factory=dict)
    """The lowest quotient that a setting should have, where a loss is the claim."""
    tells: tuple[str, ...] = ()
    """Further columns: "time", "bytes"."""
    make: Callable[[Setting, int, Task], Result] = simulated
    task: Task = field(default_factory=Task)

    def base_of(self, name: str) -> str:
        """The setting that this one is compared with."""
        group, colon, _ = name.rpartition(": ")
        return group + colon + self.against


Runs = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Rows by setting and seed."""


def key_of(experiment: Experiment, setting: Setting, seed: int) -> dict[str, Any]:
    """What identifies a run."""
    task, how = asdict(experiment.task), asdict(setting)
    return json.loads(json.dumps({"make": experiment.make.__name__, "seed": seed, "task": task, "setting": how}))


def made(experiment: Experiment, folder: Path, seeds: int, names: Sequence[str], *, missing: bool) -> Runs:
    """The runs of an experiment, those of the first seed first; the `missing` ones are made."""
    path = folder / "runs.jsonl"
    known = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    runs: dict[str, dict[int, Mapping[str, Any]]] = {name: {} for name in names}
    for seed in range(seeds):
        for name in names:
            key = key_of(experiment, experiment.settings[name], seed)
            row = next((row for row in known if row["key"] == key), None)
            if row is None and missing:
                began, result = time.process_time(), experiment.make(experiment.settings[name], seed, experiment.task)
                row = {"key": key, **{name: getattr(result, name) for name in ROW_KEYS}}
                row["cpu_s"] = round(time.process_time() - began, 1)
                with path.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(row, ensure_ascii=False) + "\n")
                sys.stderr.write(f"{experiment.name}: {name}, seed {seed}: {row['loss']:.4f}, {row['cpu_s']} s\n")
            if row is not None:
                runs[name][seed] = row
    return runs


def quotients(experiment: Experiment, runs: Runs, name: str) -> list[float]:
    """A setting's losses relative to those of the setting that it is compared with, of the seeds that both have."""
    base = runs.get(experiment.base_of(name), {})
    return [row["loss"] / base[seed]["loss"] for seed, row in sorted(runs[name].items()) if seed in base]


def table(experiment: Experiment, runs: Runs, seeds: int) -> Iterator[str]:
    """A table in Markdown."""
    told = [*(f"seed {seed}" for seed in range(seeds)), "median", f"against {experiment.against}"]
    told += ["bound"] * bool(experiment.bounds or experiment.least)
    time_of = "virtual time" if experiment.make is simulated else "time"
    told += [{"time": time_of, "bytes": "bytes a parameter"}[column] for column in experiment.tells]
    yield f"| setting | {' | '.join(told)} |"
    yield "|---" * (len(told) + 1) + "|"
    for name, rows in runs.items():
        if not rows:
            continue
        cells = [_loss(rows[seed]["loss"]) if seed in rows else "" for seed in range(seeds)]
        cells.append(_loss(statistics.median(row["loss"] for row in rows.values())))
        found = sorted(quotients(experiment, runs, name))
        cells.append("" if name == experiment.base_of(name) else _spread([100 * (q - 1) for q in found]))
        if experiment.bounds or experiment.least:
            cells.append(_bound(experiment, name, found))
        first = experiment.settings[name]
        if "time" in experiment.tells:
            cells.append(f"{statistics.median(row['time_s'] for row in rows.values()):.0f} s")
        if "bytes" in experiment.tells:
            sent = statistics.median(row["payload_bytes"] for row in rows.values())
            cells.append(f"{sent / _parameters(experiment, first) / first.peers:.1f}")
        yield f"| {name} | {' | '.join(cells)} |"


def _loss(loss: float) -> str:
    return f"{loss:.4f}" if loss < 20 else f"{loss:.3g}" if math.isfinite(loss) else "diverged"


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    if not all(map(math.isfinite, values)):
        return "diverged" if not any(map(math.isfinite, values)) else f"{values[0]:+.2f} % to diverged"
    median = f"{statistics.median(values):+.2f} %"
    return median if len(values) == 1 else f"{median} ({values[0]:+.2f} to {values[-1]:+.2f})"


def _bound(experiment: Experiment, name: str, found: Sequence[float]) -> str:
    most, least = experiment.bounds.get(name), experiment.least.get(name)
    if not found or (most is None and least is None):
        return ""
    median = statistics.median(found)
    kept = (most is None or median <= most) and (least is None or median >= least)
    said = f"≤ {100 * (most - 1):+g} %" if most is not None else f"≥ {100 * ((least or 1.0) - 1):+g} %"
    return said + ("" if kept else ", **missed**")


def _parameters(experiment: Experiment, setting: Setting) -> float:
    """Parameters times the rounds of the whole model."""
    numel = sum(parameter.numel() for parameter in experiment.task.model(0).parameters())
    return numel * max(1, round(setting.steps * experiment.task.steps) // setting.config.sync_every)


def plot(experiment: Experiment, runs: Runs, path: Path) -> None:
    """A row for each setting: a dot for each seed, a line for the median, a cross for the bound."""
    from matplotlib.figure import Figure

    found_of = {name: quotients(experiment, runs, name) for name in runs}
    names = [name for name, found in found_of.items() if found and all(map(math.isfinite, found))]
    figure = Figure(figsize=(8, 1.2 + 0.32 * len(names)), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for row, name in enumerate(reversed(names)):
        found = [min(100 * (quotient - 1), EDGE) for quotient in found_of[name]]
        axes.plot(found, [row] * len(found), "o", color="#0b6e99", markersize=5, alpha=0.6)
        axes.plot([statistics.median(found)] * 2, [row - 0.3, row + 0.3], "-", color="#0b6e99", linewidth=2)
        bound = experiment.bounds.get(name, experiment.least.get(name))
        if bound is not None:
            axes.plot([100 * (bound - 1)], [row], "x", color="#d1663c", markersize=8)
    beyond = f"; {EDGE}: that or more" if any(100 * (max(found_of[name]) - 1) >= EDGE for name in names) else ""
    axes.axvline(0, color="#888888", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set(title=experiment.title, xlabel=f"held-out loss against {experiment.against}, %{beyond}")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def main(experiment: Experiment, arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs of an experiment; print its table, and write its JSON and its plot."""
    parser = argparse.ArgumentParser(description=experiment.title)
    parser.add_argument("--folder", type=Path, default=Path("results"))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0")
    names = list(experiment.settings)
    parser.add_argument("--settings", nargs="+", choices=names, default=names, metavar="SETTING")
    parser.add_argument("--table", action="store_true", help="make no run")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("p2p_diloco").setLevel(logging.ERROR)  # not a line for each mean that is cut
    asked.folder.mkdir(parents=True, exist_ok=True)
    runs = made(experiment, asked.folder, asked.seeds, asked.settings, missing=not asked.table)
    lines = list(table(experiment, runs, asked.seeds))
    sys.stdout.writelines(line + "\n" for line in [experiment.title, "", *lines])
    losses = {name: {seed: row["loss"] for seed, row in rows.items()} for name, rows in runs.items()}
    outcome = {"title": experiment.title, "against": experiment.against, "losses": losses, "table": lines}
    text = json.dumps(outcome, ensure_ascii=False, indent=1)
    (asked.folder / f"{experiment.name}.json").write_text(text, encoding="utf-8")
    try:
        plot(experiment, runs, asked.folder / f"{experiment.name}.png")
    except ImportError:
        sys.stderr.write("no plot: matplotlib is missing (pip install p2p-diloco[plot])\n")
