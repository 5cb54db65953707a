"""`python -m tests.sim.worlds` (`make worlds`): whole runs of the protocol in simulated worlds, and a report.

Law: the other modules here define worlds and their invariants; this one distributes worlds over processes and
reports. The report goes to stdout, progress to stderr. The exit code is 1 if an invariant did not hold.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from p2p_diloco.history.story import Story

from .check import KINDS, Outcome, check, drawn, kind_of
from .model import Violation
from .world import World

STORY_WIDTH = 100
CHUNK = 10
"""Worlds that a process plays before it reports: about half a second of work."""
FAULTS = (
    "crash", "leave", "restart", "cut", "pair", "part", "mute", "turn", "relay", "heal", "freeze", "stall", "flip",
    "pause",
)  # fmt: skip
NOTES = ("takeover", "fork", "mismatch", "died")


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
            yield f"  {count:6} {kind}: {KINDS[kind].__doc__}"
        happened, steps = self.happened, self.steps
        faults = ", ".join(f"{happened[kind]} {kind}" for kind in FAULTS if happened[kind])
        yield f"  faults: {faults or 'none'}"
        sent = max(1, happened["sent"])
        lost, doubled = happened["lost"] / sent, happened["doubled"] / sent
        yield f"  messages: {happened['sent']} sent, {lost:.1%} lost or cut off, {doubled:.1%} doubled"
        notes = ", ".join(f"{happened[f'note {kind}']} {kind}" for kind in NOTES)
        yield f"  protocol: {self.events} events, {happened['moved']} times a unit moved on, {notes}"
        yield f"  attendance: {happened['judged']} exchanges had to be counted, and were"
        taken = max(1, steps["taken"])  # broken worlds have no steps
        fates = ("counted", "pending", "died", "dropped")
        shares = ", ".join(f"{steps[fate] / taken:.2%} {fate}" for fate in fates)
        yield f"  inner steps: {steps['taken']} taken, {shares}"
        for seed, kind, why in sorted(self.broken):
            yield f"seed {seed} ({kind}): {why}"
            yield f"  look at it: python -m tests.sim.worlds --seed {seed} --kind {kind} --trace"


def main(arguments: Sequence[str] | None = None) -> int:
    """Play worlds and print a report. Returns the exit code."""
    asked = _asked(arguments)
    if asked.seed is not None:
        return _one(asked.seed, asked.kind or kind_of(asked.seed), asked.trace, asked.story)
    began, report, seeds = time.monotonic(), Report(), asked.seeds
    jobs = min(asked.jobs, -(-seeds // CHUNK))
    played = _played(range(asked.first, asked.first + seeds), asked.kind, jobs)
    for count, (one, outcome) in enumerate(played, 1):
        report.add(one, asked.kind or kind_of(one), outcome)
        if count % CHUNK == 0 or count == seeds:
            _progress(count, seeds, len(report.broken), time.monotonic() - began)
    _write(report.lines(time.monotonic() - began, jobs))
    return 1 if report.broken else 0


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. If it is wrong, end the process with exit code 2 and a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="worlds", description="Play the protocol in simulated worlds under faults.")
    parser.add_argument("--seeds", type=_at_least(1), default=200, help="how many worlds to play (200)")
    parser.add_argument("--first", type=_at_least(0), default=0, help="seed of the first; the next ones have the next")
    parser.add_argument("--kind", choices=KINDS, metavar="KIND", help=f"{', '.join(KINDS)}; unset: a mix, by seed")
    parser.add_argument("--jobs", type=_at_least(1), default=os.cpu_count() or 1, help="processes; unset: one a core")
    parser.add_argument("--seed", type=_at_least(0), help="play this world alone")
    parser.add_argument("--trace", action="store_true", help="print all that happens in the world of --seed")
    parser.add_argument("--story", action="store_true", help="tell what happens in it, as `p2p-diloco replay` does")
    asked = parser.parse_args(arguments)
    if (asked.trace or asked.story) and asked.seed is None:
        parser.error("--trace and --story need a world: add --seed 17")
    return asked


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def _one(seed: int, kind: str, trace: bool, story: bool) -> int:
    """Play one world, and print its trace, its story and the report. Returns the exit code."""
    world, report, began = World(seed, drawn(seed, kind), trace or story), Report(), time.monotonic()
    report.add(seed, kind, _outcome(world))
    told = [*(world.lines if trace else ()), f"seed {seed} ({kind}): {world.settings}"]
    if story:
        told[-1:-1] = Story(world.trace or (), len(world.rules.fragments)).text(str, STORY_WIDTH)
    _write([*told, *report.lines(time.monotonic() - began, 1)])
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
    kinds = ((seed, kind or kind_of(seed)) for seed in seeds)
    return [(seed, _outcome(World(seed, drawn(seed, of)))) for seed, of in kinds]


def _outcome(world: World) -> Outcome | str:
    """Play a world. Returns its outcome, or the reason why an invariant did not hold."""
    try:
        return check(world)
    except Violation as broken:
        return str(broken)
    except Exception as broken:
        return repr(broken)


def _progress(count: int, total: int, broken: int, took_s: float) -> None:
    told = f"{count} of {total} worlds, {broken} broken, {took_s:.0f} s"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{told}" + "\n" * (count == total))
        sys.stderr.flush()
    elif count % 1000 == 0:
        sys.stderr.write(f"{told}\n")


def _write(lines: Iterable[str]) -> None:
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader of a trace may close the pipe: `| head`
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
