"""The protocol of a measured process (`Member`), and the names of the parts of a round.

Law: knows no contender; each of these is a `Member` in a module of its own, and is called `Contender` there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from p2p_diloco.cli.bench.plan import Plan

TRAINING = "training"
"""Inner steps, where they take time."""
PSEUDO_GRADIENT = "pseudo-gradient"
"""Base − local."""
CODEC = "codec"
"""To the wire's precision, and checking what has come."""
SEARCH = "search"
"""For a group to average with; Hivemind's alone."""
EXCHANGE = "exchange"
"""Everything on the wire, and waiting for others; with gloo and Hivemind the sums too, and their codecs."""
OUTER_STEP = "outer step"
"""With its digests, and in a run the mean."""
MERGE = "merge"
"""Into the model."""
ORDER = (TRAINING, PSEUDO_GRADIENT, CODEC, SEARCH, EXCHANGE, OUTER_STEP, MERGE)

Line = dict[str, Any]
"""A command or an answer."""


class Clock:
    """How long the parts of a round took, in seconds; a part may come several times."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The block is a part of this name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - began

    def round(self) -> Line:
        """The answer to `round`: the parts, which make the whole. The next round begins with none."""
        parts, self._parts = self._parts, {}
        return {"took_s": sum(parts.values()), "parts": parts}


class Member(ABC):
    """One measured process. `asked`: what it alone is told; `leaving`: takes what is to be closed in the end.

    It is told to `open`, to `build`, and then in each round to `train` and to make the `round`; what a method returns
    is its answer.
    """

    def __init__(self, plan: Plan, asked: Line, leaving: ExitStack) -> None:
        self.plan, self.asked, self.leaving = plan, asked, leaving

    def open(self, first: Line) -> Line:
        """Listen, still without a model; the answer is what others need to know. `first`: the answer of the process
        that was asked first, empty for itself.
        """
        return {}

    @abstractmethod
    def build(self, everyone: list[Line], sent_bytes: int) -> Line:
        """Build the model and meet the others. `everyone`: what all have answered to `open`, by rank; `sent_bytes`:
        what a peer of the run sends in a round.
        """

    def train(self) -> Line:
        """Move the parameters by a fixed pseudo-gradient."""
        return {}

    @abstractmethod
    def round(self) -> Line:
        """One whole round: `took_s` and `parts` in seconds, and what else is known of it."""
