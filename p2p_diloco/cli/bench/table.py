"""Results for people and for programs.

Law: draws what it is given; measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2p_diloco.cli.bench.measure import Memory, Result
from p2p_diloco.cli.bench.parts import ORDER, TRAINING
from p2p_diloco.cli.bench.plan import WARM_UP, Plan

SCHEMA_VERSION = 1
NONE = "-"


def headline(plan: Plan) -> str:
    """What was measured."""
    speeds = [f"{each:g}" for each in sorted(set(plan.links_mbit), reverse=True)]
    counts = [f"{plan.links_mbit.count(float(each))} of {each}" for each in speeds]
    link = f"on links of {speeds[0]} Mbit/s each" if len(speeds) == 1 else f"on links: {', '.join(counts)} Mbit/s"
    link = link if plan.links_mbit else "on loopback"
    fragments = "" if plan.fragments == 1 else f", {plan.fragments} fragments"
    steps = f", {plan.steps} steps of {plan.step_s:g} s" if plan.steps else ""
    overlap = f", overlap {plan.overlap}" if plan.overlap else ""
    link += "" if plan.direct else ", over libp2p alone"
    return f"{plan.peers} peers, {size(plan.parameters)} parameters, {plan.codec}{fragments}{steps}{overlap}, {link}"


def drawn(plan: Plan, results: Sequence[Result]) -> RenderableType:
    """Three tables: what a round took, where it went, and whose processor time it was."""
    sound = [result for result in results if not result.failed]
    rounds = _table(TITLES, {result.name: _cells(result) for result in sound})
    parts = _by_name({result.name: result.parts for result in sound}, seconds)
    cpu = _by_name({result.name: result.cpu_s_per_gb for result in sound}, lambda value: f"{value:.1f}")
    how = f"median and best of {plan.rounds} rounds in turns, after {WARM_UP} more; of each the slowest peer"
    notes = [
        Text(how, "dim"),
        Text("memory: a peer's, over that of its processes without a model", "dim"),
        Text("wait, hidden: how long training stands still in a round, or goes on meanwhile", "dim"),
    ]
    failures = [Text(f"{result.name} failed: {result.failed}", "red") for result in results if result.failed]
    tables = [(headline(plan), rounds)]
    if plan.links_mbit:
        beside = {result.name: _beside_optimum(plan, result) for result in sound}
        tables.append(("what the links allow", _table(("at best, s", "round, s", "ratio"), beside)))
    if plan.step_s:
        beside = {result.name: _beside_training(result) for result in sound}
        shares = _table(("steps, s", "round, s", "share"), beside)
        tables.append(("of a round that is inner steps, as all is of who never exchanges", shares))
    tables += [("where a round goes, s", parts), ("processor seconds for each GB sent, by process", cpu)]
    told = [part for title, table in tables for part in (Text(title, "bold"), table, "")]
    return Group(*told, *notes, *failures)


TITLES = ("round, s", "best", "sent, MB", "CPU s/GB", "mem., MB", "wait, s", "hidden")


def _cells(result: Result) -> list[str]:
    return [
        seconds(result.median_s),
        seconds(result.best_s),
        f"{result.sent_bytes / 1e6:.1f}",
        f"{sum(result.cpu_s_per_gb.values()):.1f}",
        f"{result.over_idle / 1e6:.0f}",
        seconds(result.waiting_s),
        seconds(result.hidden_s),
    ]


def _beside_optimum(plan: Plan, result: Result) -> list[str]:
    least_s = plan.optimum_s(result.sent_bytes)
    assert least_s is not None
    return [seconds(least_s), seconds(result.median_s), f"{result.median_s / least_s:.2f}"]


def _beside_training(result: Result) -> list[str]:
    return [seconds(result.parts[TRAINING]), seconds(result.median_s), f"{result.training_share or 0.0:.1%}"]


def _by_name(figures: Mapping[str, Mapping[str, float]], shown: Callable[[float], str]) -> Table:
    """A column for each name that any row has; the parts of a round in their order."""
    found = dict.fromkeys(name for row in figures.values() for name in row)
    names = sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    cells = {
        row: [shown(values[name]) if name in values else NONE for name in names] for row, values in figures.items()
    }
    return _table(names, cells)


def _table(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    table = Table(pad_edge=False, padding=(0, 1, 0, 0), box=SIMPLE_HEAD, show_edge=False)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def as_object(plan: Plan, results: Sequence[Result], machine: dict[str, Any]) -> dict[str, Any]:
    """Everything, for programs; described in docs/cli.md."""
    return {
        "schema_version": SCHEMA_VERSION,
        "peers": plan.peers,
        "parameters": plan.parameters,
        "codec": plan.codec,
        "fragments": plan.fragments,
        "rounds": plan.rounds,
        "steps": plan.steps or plan.fragments,
        "step_s": plan.step_s,
        "overlap": plan.overlap,
        "direct": plan.direct,
        "warm_up": WARM_UP,
        "link_mbit": min(plan.links_mbit, default=None),
        "links_mbit": list(plan.links_mbit),
        "machine": machine,
        "results": [_result(plan, result) for result in results],
    }


def _result(plan: Plan, result: Result) -> dict[str, Any]:
    told: dict[str, Any] = {"name": result.name, "failed": result.failed or None}
    if result.failed:
        return told
    least_s = plan.optimum_s(result.sent_bytes)
    return {
        **told,
        "rounds_s": [_rounded(one.took_s) for one in result.rounds],
        "median_s": _rounded(result.median_s),
        "best_s": _rounded(result.best_s),
        "link_s": None if least_s is None else _rounded(least_s),
        "ratio": None if least_s is None else _rounded(result.median_s / least_s),
        "training_share": None if result.training_share is None else _rounded(result.training_share),
        "parts_s": {name: _rounded(value) for name, value in result.parts.items()},
        "sent_bytes_per_peer": result.sent_bytes,
        "cpu_s_per_gb": {role: _rounded(value) for role, value in result.cpu_s_per_gb.items()},
        "memory_idle_bytes": _memory(result.idle),
        "memory_peak_bytes": _memory(result.peak),
        "memory_over_idle_bytes": result.over_idle,
        "waiting_s": _rounded(result.waiting_s),
        "hidden_s": _rounded(result.hidden_s),
    }


def _memory(memory: Memory) -> dict[str, int]:
    return {**memory.by_role, "shared": memory.shared, "total": memory.total}


def _rounded(value: float) -> float:
    return round(value, 4)


def seconds(value: float) -> str:
    """Seconds, to the millisecond where that is worth something."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def size(count: int) -> str:
    """A number of parameters as people write it."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:g}{name}"
    return str(count)
