"""The present state of the demo: its processes, their logs and published statuses, and the events so far.

Law: starts processes, reads their files and waits. A process that fails ends the demo with a sentence that names its
log.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from p2p_diloco.cli.demo.facts import Row, curve, held_out
from p2p_diloco.cli.demo.report import compared
from p2p_diloco.cli.processes import Child, Children, Lines, module
from p2p_diloco.core.election import assign
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.observe.plot import Curve, Moment
from p2p_diloco.settings import flag

RUN_ID = "demo"
T = TypeVar("T")
LOOK_EVERY_S = 0.1
LOSSES_SHOWN = 20
"""The loss that is shown is the mean of this many training losses, because single batches vary too much."""
PATIENCE_S = 180.0
"""Seconds after which the demo gives up if nothing happens: a slow machine imports torch in a minute."""


@dataclass(frozen=True, slots=True)
class Script:
    """The demo's numbers. They were chosen by measurement: with them the run ends at a lower loss than one peer alone.
    Both have a warm start; without it the difference would be lost in the noise."""

    epochs: int
    """Outer steps of the whole run."""
    kill_at: int
    """The outer step after which a peer is killed."""
    sync_every: int = 20
    warm_start: int = 100
    eval_every: int = 2
    pause_s: float = 0.03
    """Seconds to sleep in each inner step. Without this, a fast machine would finish the run before the newcomer has
    imported torch."""

    @property
    def steps(self) -> int:
        """The inner steps of a peer that takes part from beginning to end."""
        return self.epochs * self.sync_every

    @property
    def run(self) -> dict[str, Any]:
        return {"sync_every": self.sync_every, "stop_after_epochs": self.epochs}

    @property
    def trainer(self) -> dict[str, Any]:
        return {"threads": 1, "pause_s": self.pause_s, "eval_every_epochs": self.eval_every}


@dataclass(slots=True)
class Player:
    """A training process of the demo, with the rows of its log and the status that it published last."""

    child: Child
    written: Lines
    in_run: bool = True
    rows: list[Row] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    """The peer's last published status, as `p2p-diloco status --json` prints it; empty before the first."""

    def look(self) -> bool:
        """Read the new rows of the process's log. Returns whether there were any."""
        new = [Row(**entry) for entry in self.written.new()]
        self.rows += new
        return bool(new)

    @property
    def name(self) -> str:
        """The process's name, which is also the peer's name in the run."""
        return self.child.name

    @property
    def trains(self) -> bool:
        return not self.child.killed and self.child.status is None

    @property
    def state(self) -> str:
        if self.child.killed:
            return "killed"
        if self.child.status is not None:
            return "finished"
        return str(self.told.get("state") or "training") if self.rows else "starting"

    @property
    def epoch(self) -> int:
        """The number of outer steps that the peer has seen; -1 before its first inner step in the run."""
        return self.rows[-1].epoch if self.rows else -1

    @property
    def steps(self) -> int:
        return self.rows[-1].step if self.rows else 0

    @property
    def steps_since(self) -> int:
        """The number of the peer's own inner steps since the last commit."""
        return self.steps - next((entry.step for entry in self.rows if entry.epoch == self.epoch), 0)

    @property
    def loss(self) -> float | None:
        """The mean of the peer's last `LOSSES_SHOWN` training losses."""
        losses = [entry.loss for entry in self.rows[-LOSSES_SHOWN:] if entry.loss is not None]
        return fmean(losses) if losses else None

    @property
    def val_loss(self) -> float | None:
        """The last held-out loss that the peer has measured."""
        return next((entry.val_loss for entry in reversed(self.rows) if entry.val_loss is not None), None)


class Stage:
    """All processes of the demo and their state. `show` is called whenever something may have changed."""

    def __init__(self, script: Script, children: Children, show: Callable[[Stage], None]) -> None:
        self.script, self.children = script, children
        self.everyone: list[Player] = []
        """The peers of the run in the order of their start, then the one that trains alone."""
        self.moments: list[Moment] = []
        self.story: list[tuple[float, str]] = []
        """The events so far: (seconds since the demo's start, sentence)."""
        self._show = show
        self._started_at = self._news_at = time.monotonic()
        self._snapshots = Lines(children.folder / "status.out")

    # -- starting processes

    def start_service(self, name: str, *flags: str) -> Child:
        """Start another `p2p-diloco` command, which prints JSON."""
        return self.children.start(name, module("p2p_diloco", name, *flags, "--json", "--logs", "plain"))

    def start_peer(self, name: str, address: str, **settings: object) -> Player:
        """Start a peer of the run. `address`: its initial peer; `settings`: further settings, which only the founder
        gets."""
        told = {"name": name, "log_path": self._rows(name), **self.script.trainer, **settings}
        flags = [part for key, value in told.items() for part in (flag(key), str(value))]
        join = ("join", "--initial-peers", address, "--run-id", RUN_ID, "--summary-json", "--logs", "plain", *flags)
        player = Player(self.children.start(name, module("p2p_diloco", *join)), Lines(self._rows(name)))
        self.everyone.insert(len(self.peers), player)
        return player

    def start_alone(self, name: str) -> Player:
        """Start a trainer that takes part in no run, for comparison. It has the peers' settings and warm start, but
        doesn't sleep between steps."""
        own = {"warm_start": self.script.warm_start, "pause_s": 0.0, "log_path": str(self._rows(name))}
        trainer = json.dumps({**self.script.trainer, **own, "summary_json": True})
        alone = module("p2p_diloco.cli.demo.alone", json.dumps(self.script.run), trainer)
        child = self.children.start(name, alone)
        self.everyone.append(Player(child, Lines(self._rows(name)), in_run=False))
        return self.everyone[-1]

    def _rows(self, name: str) -> Path:
        return self.children.folder / f"{name}.jsonl"

    # -- what is known

    @property
    def peers(self) -> list[Player]:
        return [player for player in self.everyone if player.in_run]

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def epoch(self) -> int:
        """The highest number of outer steps that any peer has seen."""
        return max([0, *(player.epoch for player in self.peers)])

    def averages_next(self, epoch: int) -> str | None:
        """The name of the peer that is elected to average the round after `epoch`. None while some peer's id is
        unknown.

        The election is a pure function of facts that all peers know, so this process can compute it too.
        """
        ids = {player.told.get("peer_id"): player.name for player in self.peers if player.trains and player.rows}
        if None in ids or not ids:
            return None
        return ids[assign(RUN_ID, epoch, [0], {str(peer): 1.0 for peer in ids})[0][0]]

    def losses(self, *, in_run: bool = True) -> dict[int, float]:
        """The held-out losses so far, by outer step: with `in_run` the run's, otherwise those of the peer that trains
        alone."""
        return held_out(player.rows for player in self.everyone if player.in_run is in_run)

    def curves(self) -> tuple[Curve, Curve]:
        """The curves of the held-out losses so far: first the run's, then that of the peer that trains alone."""
        every = self.script.sync_every
        return compared(curve(self.losses(), every), curve(self.losses(in_run=False), every))

    # -- what goes on

    def tell(self, text: str) -> None:
        """Add a sentence to the events, and show it."""
        self.story.append((self.elapsed_s, text))
        self._show(self)

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        """Wait until `condition` returns something other than None and False, and return that. `what`: what is waited
        for, for an error's text.

        Raises:
            P2PDilocoError: a process failed, or nothing happened for `PATIENCE_S`.
        """
        self._news_at = time.monotonic()
        while True:
            self._look()
            found = condition()
            if found is not None and found is not False:
                return found
            if time.monotonic() - self._news_at > PATIENCE_S:
                mend = f"see the logs in {self.children.folder}"
                raise P2PDilocoError(f"nothing has happened for {PATIENCE_S:g} s while waiting for {what}", mend=mend)
            time.sleep(LOOK_EVERY_S)

    def _look(self) -> None:
        for child in self.children.all:
            if child.failed:
                raise _failure(child)
        for player in self.everyone:
            if player.look():
                self._news_at = time.monotonic()
        for snapshot in self._snapshots.new():
            told = {peer["name"]: peer for peer in snapshot["peers"]}
            for player in self.peers:
                player.told = told.get(player.name, player.told)
        self._show(self)


def _failure(child: Child) -> P2PDilocoError:
    status = child.status or 0
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return P2PDilocoError(f"{child.name} {how} ({child.last_words()})", mend=f"its log is {child.log}")
