"""A process that trains, as it is seen from outside: the rows that it writes, and what it tells the others.

Law: reads what is given to it; starts and ends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from p2p_diloco.cli.demo.facts import Row
from p2p_diloco.cli.processes import Child, Lines

LOSSES_SHOWN = 20
"""The mean of so many training losses is shown: single batches vary too much to read."""


@dataclass(slots=True)
class Player:
    """A process that trains."""

    child: Child
    written: Lines
    in_run: bool = True
    rows: list[Row] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    """What it last told the others, as `p2p-diloco status --json` prints it; empty before."""

    def look(self) -> bool:
        """Read the new rows; whether there were any."""
        new = [Row(**entry) for entry in self.written.new()]
        self.rows += new
        return bool(new)

    @property
    def name(self) -> str:
        """Its own, in the run too."""
        return self.child.name

    @property
    def trains(self) -> bool:
        """Whether it has neither ended nor been killed."""
        return not self.child.killed and self.child.status is None

    @property
    def state(self) -> str:
        """What it does, in a word."""
        if self.child.killed:
            return "killed"
        if self.child.status is not None:
            return "finished"
        return str(self.told.get("state") or "training") if self.rows else "starting"

    @property
    def epoch(self) -> int:
        """Outer steps that it has seen; -1 before its first inner step in the run."""
        return self.rows[-1].epoch if self.rows else -1

    @property
    def steps(self) -> int:
        """Its own inner steps."""
        return self.rows[-1].step if self.rows else 0

    @property
    def steps_since(self) -> int:
        """Its own inner steps since the last commit."""
        return self.steps - next((entry.step for entry in self.rows if entry.epoch == self.epoch), 0)

    @property
    def loss(self) -> float | None:
        """The mean of its last training losses."""
        losses = [entry.loss for entry in self.rows[-LOSSES_SHOWN:] if entry.loss is not None]
        return fmean(losses) if losses else None

    @property
    def val_loss(self) -> float | None:
        """The last held-out loss that it has measured."""
        return next((entry.val_loss for entry in reversed(self.rows) if entry.val_loss is not None), None)
