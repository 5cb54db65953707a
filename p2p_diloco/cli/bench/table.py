"""Results for people and for programs.

Law: draws what it is given; measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2p_diloco.cli.bench.measure import Memory, Result
from p2p_diloco.cli.bench.plan import WARM_UP, Plan

SCHEMA_VERSION = 1
NONE = "-"


def headline(plan: Plan) -> str:
    """What was measured."""
    link = "on loopback" if plan.link_mbit is None else f"on links of {plan.link_mbit:g} Mbit/s each"
    fragments = "" if plan.fragments == 1 else f", {plan.fragments} fragments"
    return f"{plan.peers} peers, {size(plan.parameters)} parameters, {plan.codec}{fragments}, {link}"


def drawn(plan: Plan, results: Sequence[Result]) -> RenderableType:
    """Two tables: what a round took, and where it went."""
    rounds = Table(title=headline(plan), title_justify="left", title_style="bold", pad_edge=False)
    for title, right in (
        ("", False), ("what it is", False), ("round, s", True), ("best", True), ("sent, MB", True),
        ("CPU s/GB", True), ("of it", False), ("memory, MB", True), ("stood still, s", True), ("hidden, s", True),
    ):  # fmt: skip
        rounds.add_column(title, justify="right" if right else "left", overflow="fold")
    parts = Table(title="where a round goes, s", title_justify="left", title_style="bold", pad_edge=False)
    names = list(dict.fromkeys(name for result in results for name in result.parts))
    for title in ("", *names):
        parts.add_column(title, justify="right" if title else "left")
    notes = []
    for result in results:
        if result.failed:
            rounds.add_row(result.name, result.what, *[NONE] * 8)
            notes.append(Text(f"{result.name} failed: {result.failed}", "red"))
            continue
        rounds.add_row(*_cells(result))
        parts.add_row(result.name, *(seconds(result.parts[n]) if n in result.parts else NONE for n in names))
    notes.append(
        Text(
            f"median and best of {plan.rounds} rounds in turns, after {WARM_UP} that don't count; the slowest peer of "
            "each round; memory: of a peer, over its idle processes",
            "dim",
        )
    )
    return Group(rounds, "", parts, "", *notes)


def _cells(result: Result) -> list[str]:
    per_gb = result.cpu_s_per_gb
    listed = ", ".join(f"{role} {value:.1f}" for role, value in per_gb.items())
    return [
        result.name,
        result.what,
        seconds(result.median_s),
        seconds(result.best_s),
        f"{result.sent_bytes / 1e6:.1f}",
        f"{sum(per_gb.values()):.1f}",
        listed if len(per_gb) > 1 else "",
        f"{result.over_idle / 1e6:.0f}",
        seconds(result.waiting_s),
        seconds(result.hidden_s),
    ]


def as_object(plan: Plan, results: Sequence[Result], machine: dict[str, Any]) -> dict[str, Any]:
    """Everything, for programs; described in docs/cli.md."""
    return {
        "schema_version": SCHEMA_VERSION,
        "peers": plan.peers,
        "parameters": plan.parameters,
        "codec": plan.codec,
        "fragments": plan.fragments,
        "rounds": plan.rounds,
        "warm_up": WARM_UP,
        "link_mbit": plan.link_mbit,
        "machine": machine,
        "results": [_result(result) for result in results],
    }


def _result(result: Result) -> dict[str, Any]:
    told: dict[str, Any] = {"name": result.name, "what": result.what, "failed": result.failed or None}
    if result.failed:
        return told
    return {
        **told,
        "rounds_s": [_rounded(one.took_s) for one in result.rounds],
        "median_s": _rounded(result.median_s),
        "best_s": _rounded(result.best_s),
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
