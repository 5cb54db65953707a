"""Shows the figures of a measurement: as JSON for programs, and as tables for people.

Law: only computes and draws; measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from examples.benchmarks.measure import Memory, Result, Round
from examples.benchmarks.member import ORDER, TRAINING
from examples.benchmarks.plan import CPU, WARM_UP, Plan

SCHEMA_VERSION = 2
NONE = "-"
Figures = dict[str, Any]
"""What `bench --json` prints of one group; examples/README.md describes every field."""


def as_object(plan: Plan, results: Sequence[Result], machine: dict[str, Any]) -> dict[str, Any]:
    """The whole measurement as one JSON object, for programs."""
    return {
        "schema_version": SCHEMA_VERSION,
        **asdict(plan),
        "steps": plan.steps or plan.fragments,
        "warm_up": WARM_UP,
        "link_mbit": min(plan.links_mbit, default=None),
        "machine": machine,
        "results": json.loads(json.dumps([figures(plan, result) for result in results]), parse_float=_rounded),
    }


def _rounded(digits: str) -> float:
    return round(float(digits), 4)


def figures(plan: Plan, result: Result) -> Figures:
    """The figures of a group. For a failed group, its name and the reason of the failure."""
    if result.failed:
        return {"name": result.name, "failed": result.failed}
    rounds, least_s = result.rounds, plan.optimum_s(result.sent_bytes)
    usual_s = median(one.took_s for one in rounds)
    sent_gb = len(rounds) * result.peers * result.sent_bytes / 1e9
    return {
        "name": result.name,
        "failed": None,
        "rounds_s": [one.took_s for one in rounds],
        "median_s": usual_s,
        "best_s": min(one.took_s for one in rounds),
        "link_s": least_s,
        "ratio": None if least_s is None else usual_s / least_s,
        "training_alone_s": median(one.alone_s for one in rounds) if plan.step_s else None,
        "training_share": median(one.alone_s / one.took_s for one in rounds) if plan.step_s else None,
        "parts_s": _by_name(rounds, lambda one: one.parts, median),
        "sent_bytes_per_peer": result.sent_bytes,
        # over all rounds together, because the system counts processor time in steps of 10 ms
        "cpu_s_per_gb": _by_name(rounds, lambda one: one.cpu_s, lambda spent: sum(spent) / sent_gb),
        "memory_idle_bytes": _memory(result.idle),
        "memory_peak_bytes": _memory(result.peak),
        "memory_over_idle_bytes": result.peak.total - result.idle.total,
        "waiting_s": median(one.waiting_s for one in rounds),
        "hidden_s": median(one.hidden_s for one in rounds),
    }


def _by_name(
    rounds: Sequence[Round], of: Callable[[Round], Mapping[str, float]], to_one: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    """For each name, combine the values of all rounds into one figure. A round without the name counts as 0."""
    names = dict.fromkeys(name for one in rounds for name in of(one))
    return {name: to_one([of(one).get(name, 0.0) for one in rounds]) for name in names}


def _memory(memory: Memory) -> dict[str, int]:
    return {**memory.by_role, "shared": memory.shared, "total": memory.total}


# -- for people


def headline(plan: Plan) -> str:
    """A line that says what was measured."""
    speeds = [f"{each:g}" for each in sorted(set(plan.links_mbit), reverse=True)]
    counts = [f"{plan.links_mbit.count(float(each))} of {each}" for each in speeds]
    distance = f", {1e3 * plan.rtt_s:g} ms round trip" if plan.rtt_s else ""
    loss = f", {100 * plan.loss:g} % of the packets lost" if plan.loss else ""
    link = f"on links of {speeds[0]} Mbit/s each" if len(speeds) == 1 else f"on links: {', '.join(counts)} Mbit/s"
    parts = [
        f"{plan.peers} peers",
        f"{size(plan.parameters)} parameters in {plan.tensors} tensors",
        plan.codec,
        "" if plan.fragments == 1 else f"{plan.fragments} fragments",
        f"{plan.steps} steps of {plan.step_s:g} s" if plan.steps else "",
        f"overlap {plan.overlap}" if plan.overlap else "",
        link + distance + loss if plan.links_mbit else "on loopback",
        "" if plan.direct else "over libp2p alone",
        "" if plan.device == CPU else f"models on {plan.device}",
    ]
    return ", ".join(part for part in parts if part)


def drawn(plan: Plan, results: Sequence[Result]) -> RenderableType:
    """Draw tables that show how long a round took, where its time went, and which processes used the processor."""
    sound = [figures(plan, result) for result in results if not result.failed]
    tables = [_table(headline(plan), sound, ROUND)]
    if plan.links_mbit:
        tables.append(_table("what the links allow", sound, {**ALLOWED, "RTT, s": lambda _: seconds(plan.rtt_s)}))
    if plan.step_s:
        tables.append(
            _table("training share: a round's inner steps without exchanges, against the round", sound, STEPS)
        )
    tables.append(_table("where a round goes, s", sound, _columns(sound, "parts_s", seconds)))
    cpu = _columns(sound, "cpu_s_per_gb", lambda value: f"{value:.1f}")
    tables.append(_table("processor seconds for each GB sent, by process", sound, cpu))
    notes = [
        f"median and best of {plan.rounds} rounds, after {WARM_UP} for warm-up; a round ends with its slowest peer",
        "memory: what a peer's processes take beyond what they take without a model",
        "wait: how long exchanges stop training in a round; hidden: how long training goes on during them",
    ]
    failures = [Text(f"{result.name} failed: {result.failed}", "red") for result in results if result.failed]
    return Group(*(part for table in tables for part in table), *(Text(note, "dim") for note in notes), *failures)


Columns = Mapping[str, Callable[[Figures], str]]
"""Column title -> function for the text of a group's cell."""

ROUND: Columns = {
    "round, s": lambda told: seconds(told["median_s"]),
    "best": lambda told: seconds(told["best_s"]),
    "sent, MB": lambda told: f"{told['sent_bytes_per_peer'] / 1e6:.1f}",
    "CPU s/GB": lambda told: f"{sum(told['cpu_s_per_gb'].values()):.1f}",
    "mem., MB": lambda told: f"{told['memory_over_idle_bytes'] / 1e6:.0f}",
    "wait, s": lambda told: seconds(told["waiting_s"]),
    "hidden": lambda told: seconds(told["hidden_s"]),
}
ALLOWED: Columns = {
    "at best, s": lambda told: seconds(told["link_s"]),
    "round, s": lambda told: seconds(told["median_s"]),
    "ratio": lambda told: f"{told['ratio']:.2f}",
}
STEPS: Columns = {
    "alone, s": lambda told: seconds(told["training_alone_s"]),
    "steps, s": lambda told: seconds(told["parts_s"][TRAINING]),
    "round, s": lambda told: seconds(told["median_s"]),
    "share": lambda told: f"{told['training_share']:.1%}",
}


def _columns(sound: Sequence[Figures], key: str, shown: Callable[[float], str]) -> Columns:
    """Make the columns for a figure that is a mapping by name, such as the seconds by part of a round: one for each
    name that occurs in any group. Parts of a round come first, in the order of `ORDER`. A group without the name shows
    `NONE`."""

    def cell(name: str, told: Figures) -> str:
        return shown(told[key][name]) if name in told[key] else NONE

    found = dict.fromkeys(name for told in sound for name in told[key])
    names = sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    return {name: partial(cell, name) for name in names}


def _table(title: str, sound: Sequence[Figures], columns: Columns) -> tuple[RenderableType, ...]:
    """A title, a table with a row for each group, and an empty line."""
    table = Table(pad_edge=False, padding=(0, 1, 0, 0), box=SIMPLE_HEAD, show_edge=False)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for told in sound:
        table.add_row(told["name"], *(cell(told) for cell in columns.values()))
    return Text(title, "bold"), table, ""


def seconds(value: float) -> str:
    """A time in seconds as text. Below ten seconds it has milliseconds."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def size(count: int) -> str:
    """A number of parameters as text with its unit."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:g}{name}"
    return str(count)
