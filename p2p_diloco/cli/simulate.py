"""`simulate`: plays whole runs of the protocol in simulated worlds, and prints a report.

Law: the package `simulate` defines worlds and their invariants; this module distributes worlds over processes and
reports. The report goes to stdout, progress to stderr.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import typer

from p2p_diloco.errors import UsageError
from p2p_diloco.history.story import Story
from p2p_diloco.simulate.check import KINDS, Outcome, check, drawn, kind_of
from p2p_diloco.simulate.model import Violation
from p2p_diloco.simulate.world import World

STORY_WIDTH = 100
CHUNK = 10
"""Worlds that a process plays before it reports: about half a second of work."""
FAULTS = {
    "crash": "killed",
    "leave": "left",
    "restart": "started again",
    "cut": "network cut",
    "pair": "single link cut",
    "turn": "peer turned private or reachable",
    "relay": "bootstrap stopped or started",
    "heal": "healed",
    "freeze": "process frozen",
    "stall": "trainer stalled",
    "flip": "memory changed",
    "pause": "trainer paused",
}

NOTES = {
    "takeover": "takeovers",
    "fork": "forks joined",
    "mismatch": "wrong digests seen",
    "died": "peers found dead",
}


@dataclass(slots=True)
class Report:
    """What happened in all played worlds together."""

    kinds: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    events: int = 0
    broken: list[tuple[int, str, str]] = field(default_factory=list)
    """(seed, kind, reason) of each world in which an invariant did not hold."""

    def add(self, seed: int, kind: str, outcome: Outcome | str) -> None:
        """Add the outcome of a world, or a text that says why an invariant did not hold in it."""
        self.kinds[kind] += 1
        if isinstance(outcome, str):
            self.broken.append((seed, kind, outcome))
        else:
            self.happened.update(outcome.happened)
            self.steps.update(outcome.steps)
            self.events += outcome.events

    def lines(self, took_s: float, jobs: int) -> Iterator[str]:
        """The lines of the report."""
        worlds, broken = self.kinds.total(), len(self.broken)
        verdict = f"{broken} BROKEN" if broken else "every invariant held in each"
        yield f"{worlds} worlds in {took_s:.0f} s on {jobs} processes: {verdict}"
        for kind, count in sorted(self.kinds.items()):
            yield f"  {count:6} {kind}: {KINDS[kind]}"
        happened, steps = self.happened, self.steps
        faults = ", ".join(f"{happened[kind]} {text}" for kind, text in FAULTS.items() if happened[kind])
        yield f"  faults: {faults or 'none'}"
        sent = max(1, happened["sent"])
        lost, doubled = happened["lost"] / sent, happened["doubled"] / sent
        yield f"  messages: {happened['sent']} sent, {lost:.1%} lost or cut off, {doubled:.1%} doubled"
        notes = ", ".join(f"{happened[f'note {kind}']} {text}" for kind, text in NOTES.items())
        yield f"  protocol: {self.events} events, {happened['moved']} times a shard moved on, {notes}"
        yield f"  attendance: {happened['judged']} exchanges had to be counted, and were"
        taken = max(1, steps["taken"])  # broken worlds have no steps
        fates = ("counted", "pending", "died", "dropped")
        shares = ", ".join(f"{steps[fate] / taken:.2%} {fate}" for fate in fates)
        yield f"  inner steps: {steps['taken']} taken, {shares}"
        for seed, kind, why in sorted(self.broken):
            yield f"seed {seed} ({kind}): {why}"
            yield f"  look at it: p2p-diloco simulate --seed {seed} --kind {kind} --trace"


def simulate(
    seeds: int, first: int, seed: int | None, kind: str | None, jobs: int | None, *, trace: bool, story: bool = False
) -> int:
    """Play worlds and print a report. Returns the exit code: 1 if an invariant did not hold.

    Raises:
        UsageError: a flag can't be used.
    """
    if kind is not None and kind not in KINDS:
        raise UsageError("is not known", key="--kind", value=kind, mend=f"choose {', '.join(KINDS)}")
    for key, value, least in (("--seeds", seeds, 1), ("--first", first, 0), ("--seed", seed, 0), ("--jobs", jobs, 1)):
        if value is not None and value < least:
            raise UsageError(f"must be at least {least}", key=key, value=value, mend=f"choose e.g. {least}")
    for key in ("--trace",) * trace + ("--story",) * story:
        if seed is None:
            raise UsageError("needs a seed", key=key, value=True, mend=f"name the world: --seed 17 {key}")
    if seed is not None:
        return _one(seed, kind or kind_of(seed), trace, story)
    began, report = time.monotonic(), Report()
    jobs = min(jobs or os.cpu_count() or 1, -(-seeds // CHUNK))
    for count, (one, outcome) in enumerate(_played(range(first, first + seeds), kind, jobs), 1):
        report.add(one, kind or kind_of(one), outcome)
        if count % CHUNK == 0 or count == seeds:
            _progress(count, seeds, len(report.broken), time.monotonic() - began)
    typer.echo("\n".join(report.lines(time.monotonic() - began, jobs)))
    return 1 if report.broken else 0


def _one(seed: int, kind: str, trace: bool, story: bool) -> int:
    """Play one world, and print its trace, its story and the report. Returns the exit code."""
    world, report, began = World(seed, drawn(seed, kind), trace or story), Report(), time.monotonic()
    report.add(seed, kind, _outcome(world))
    told = [*(world.lines if trace else ()), f"seed {seed} ({kind}): {world.settings}"]
    if story:
        told[-1:-1] = Story(world.trace or (), world.rules.fragments).text(str, STORY_WIDTH)
    typer.echo("\n".join([*told, *report.lines(time.monotonic() - began, 1)]))
    return 1 if report.broken else 0


def _played(seeds: range, kind: str | None, jobs: int) -> Iterator[tuple[int, Outcome | str]]:
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    context = multiprocessing.get_context("spawn")  # a fork would copy locks held by other threads
    with ProcessPoolExecutor(jobs, context, initializer=_leave_interrupts_to_the_parent) as pool:
        try:
            for played in pool.map(_play, chunks, [kind] * len(chunks)):
                yield from played
        finally:
            pool.shutdown(cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _play(seeds: range, kind: str | None) -> list[tuple[int, Outcome | str]]:
    return [(seed, _outcome(World(seed, drawn(seed, kind or kind_of(seed))))) for seed in seeds]


def _outcome(world: World) -> Outcome | str:
    """Play a world. Returns its outcome, or the reason why an invariant did not hold."""
    try:
        return check(world)
    except Violation as broken:
        return str(broken)
    except Exception as broken:
        return repr(broken)


def _progress(count: int, total: int, broken: int, took_s: float) -> None:
    told, terminal = f"{count} of {total} worlds, {broken} broken, {took_s:.0f} s", sys.stderr.isatty()
    if terminal or count % 1000 == 0:
        typer.echo(f"\r{told}" if terminal else told, nl=not terminal or count == total, err=True)
