"""Feeds damaged bytes to all that reads what comes from outside: `python -m tests.fuzz.campaign --minutes 10`.

Prints one line of JSON for each reader: its cases, the slowest in processor seconds, and its faults. A fault is an
exception that the reader doesn't promise, a case that takes long, or one that makes this process much larger. The exit
code is 1 if there is one. `--seed` and a case's number make the same bytes again; `--only` names one reader.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.fuzz import dht
from tests.fuzz.mutations import mutated
from tests.fuzz.targets import Target, targets

SLOW_S = 5.0
"""Processor time for one case; a right one takes less than a tenth of a second."""
GROWTH_MB = 200.0
"""How much larger this process may become for one reader."""
FAULTS_SHOWN = 5
DHT, DHT_PART = "the DHT", 0.2
"""The reader that is asked over libp2p, and its part of the time."""
TURN_S = 0.5
"""For each reader in turn."""


@dataclass
class Outcome:
    """What became of a reader's cases."""

    cases: int = 0
    read: int = 0
    slowest_s: float = 0.0
    faults: list[str] = field(default_factory=list)


def peak_mb() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def feed(target: Target, seed: int, until: float, outcome: Outcome) -> None:
    """Feed cases to a reader until a time; the first ones are its seeds themselves."""
    while time.monotonic() < until and len(outcome.faults) < FAULTS_SHOWN:
        number, outcome.cases = outcome.cases, outcome.cases + 1
        given = target.seeds[number] if number < len(target.seeds) else None
        case = mutated(Random(f"{seed}/{target.name}/{number}"), target.seeds) if given is None else given
        before, began, fault = peak_mb(), time.process_time(), ""
        try:
            target.feed(case)
            outcome.read += 1
        except target.promised as refused:
            fault = "" if given is None else f"its own seed is refused: {refused}"
        except Exception as error:
            fault = repr(error)[:300]
        took_s, grew_mb = time.process_time() - began, peak_mb() - before
        outcome.slowest_s = max(outcome.slowest_s, took_s)
        if took_s > SLOW_S or grew_mb > GROWTH_MB:
            fault = f"{took_s:.1f} s, {grew_mb:.0f} MB more; {fault}"
        if fault:
            outcome.faults.append(f"case {number} of seed {seed} ({case[:60]!r}): {fault}")


def play(seconds: float, seed: int, only: str | None = None) -> dict[str, Outcome]:
    """Feed all readers in turn for so long, or until each has had two cases; returns what became of each."""
    with tempfile.TemporaryDirectory(prefix="p2p-diloco-fuzz-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = [target for target in targets(Path(folder)) if only in (None, target.name)]
        outcomes = {target.name: Outcome() for target in every}
        end, turn_s = time.monotonic() + seconds, min(TURN_S, seconds / len(every))
        while time.monotonic() < end or min(outcome.cases for outcome in outcomes.values()) < 2:
            for target in every:
                feed(target, seed, time.monotonic() + turn_s, outcomes[target.name])
    return outcomes


def play_dht(seconds: float, seed: int) -> Outcome:
    """Feed requests to a member of the DHT for so long."""
    before = peak_mb()
    count, faults = asyncio.run(dht.play(seconds, seed))
    if (grew_mb := peak_mb() - before) > GROWTH_MB:
        faults.append(f"{grew_mb:.0f} MB more")
    return Outcome(count, faults=faults)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only")
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="p2p-diloco-fuzz-state-")
    outcomes = {}
    if asked.only in (None, DHT):
        outcomes[DHT] = play_dht(asked.minutes * 60.0 * DHT_PART, asked.seed)
    if asked.only != DHT:
        outcomes |= play(asked.minutes * 60.0 * (1.0 - DHT_PART), asked.seed, asked.only)
    for name, outcome in outcomes.items():
        told = {"reader": name, "cases": outcome.cases, "read": outcome.read, "slowest_s": round(outcome.slowest_s, 2)}
        print(json.dumps({**told, "faults": outcome.faults}), flush=True)
    print(json.dumps({"peak_mb": round(peak_mb())}), flush=True)
    return 1 if any(outcome.faults for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
