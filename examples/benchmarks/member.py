"""Defines a measured process (`Member`) and the commands to it, and names the parts of a round.

Law: does not depend on the contenders. Each of them is a `Member` in a module of its own, named `Contender` there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from examples.benchmarks.plan import Plan

TRAINING = "training"
"""Inner steps, if they take time."""
PSEUDO_GRADIENT = "pseudo-gradient"
"""Computing base − local."""
CODEC = "codec"
"""Conversion to the wire's precision, and checks of received values."""
SEARCH = "search"
"""The search for a group to average with; only in Hivemind's averager."""
EXCHANGE = "exchange"
"""Transfers, and waiting for others; for gloo and Hivemind also their sums and codecs."""
OUTER_STEP = "outer step"
"""The outer step with its digests; in a run also the mean."""
MERGE = "merge"
"""Merging the result into the model."""
ORDER = (TRAINING, PSEUDO_GRADIENT, CODEC, SEARCH, EXCHANGE, OUTER_STEP, MERGE)

Line = dict[str, Any]
"""A command or an answer, as a JSON object."""


class Clock:
    """Measures the parts of a round, in seconds; a part may occur several times."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time that a `with` block takes to the part `name` of the round."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - began

    def round(self) -> Line:
        """Return the answer to the command `round`: the time of each part, and the sum of all parts. Then reset all
        times to 0."""
        parts, self._parts = self._parts, {}
        return {"took_s": sum(parts.values()), "parts": parts}


class Member(ABC):
    """One measured process. `asked`: this process's own options; `leaving`: an exit stack for its resources.

    The commands to it are `open`, `build`, and then `train` and `round` for each round. A command calls the method of
    its name, whose result is the answer.
    """

    def __init__(self, plan: Plan, asked: Line, leaving: ExitStack) -> None:
        self.plan, self.asked, self.leaving = plan, asked, leaving

    def open(self, first: Line) -> Line:
        """Start to listen; there is no model yet. The answer is what the other processes need to know of this one.
        `first`: the answer of the process that got this command first; empty for that process itself."""
        return {}

    @abstractmethod
    def build(self, everyone: list[Line], sent_bytes: int) -> Line:
        """Build the model and connect to the other processes. `everyone`: all processes' answers to `open`, by rank;
        `sent_bytes`: the bytes that a peer of the run sends in a round."""

    def train(self) -> Line:
        """Change the parameters by fixed numbers, in place of training."""
        return {}

    @abstractmethod
    def round(self) -> Line:
        """Make one whole round. The answer has `took_s` and `parts` in seconds, and perhaps more figures."""
