"""Who plays: the script's numbers, and a process that trains, with what it has written so far.

Law: says how processes are started and reads what they write; when, and what follows, is for the play.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_diloco.cli.demo.facts import Row, row
from p2p_diloco.cli.demo.processes import Child, Children, Lines
from p2p_diloco.settings import flag

RUN_ID = "demo"
CODEC = "bf16"
LOSS_MEMORY = 0.95


@dataclass(frozen=True, slots=True)
class Script:
    """The demo's numbers. Most come from measuring: so many rounds of so many steps, with a warm start and the
    default outer optimizer, are what this model gains from; without a warm start the gain is lost in the noise.
    """

    epochs: int
    """Outer steps of the whole run."""
    kill_at: int
    """The outer step after which a peer is killed."""
    sync_every: int = 20
    warm_start: int = 100
    eval_every: int = 2
    pause_s: float = 0.03
    """Sleep in each step: on a fast machine the run would else be over before a newcomer has imported torch."""

    @property
    def steps(self) -> int:
        """Inner steps of a peer that is there from beginning to end."""
        return self.epochs * self.sync_every


FULL, QUICK = Script(epochs=60, kill_at=15), Script(epochs=20, kill_at=3, pause_s=0.04)


class Player:
    """A process that trains, and what it has written."""

    def __init__(self, name: str, child: Child, rows_path: Path) -> None:
        self.name, self.child = name, child
        self.killed = False
        self.rows: list[Row] = []
        self.val_loss: float | None = None
        self.loss: float | None = None
        """Running mean: single batches jump about too much to read."""
        self._written = Lines(rows_path)

    def look(self) -> bool:
        """Read what is new; whether anything was."""
        new = [row(entry) for entry in self._written.new()]
        for entry in new:
            if entry.val_loss is not None:
                self.val_loss = entry.val_loss
            if entry.loss is not None:
                past = entry.loss if self.loss is None else self.loss
                self.loss = LOSS_MEMORY * past + (1 - LOSS_MEMORY) * entry.loss
        self.rows += new
        return bool(new)

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
    def trains(self) -> bool:
        """Whether it neither has ended nor was killed."""
        return not self.killed and self.child.status is None

    def summary(self) -> dict[str, Any]:
        """What it printed in the end; empty if it didn't come to that."""
        lines = self.child.printed.new()
        return lines[-1] if lines else {}


def bootstrap(children: Children) -> Child:
    """The seed of the DHT, which prints its addresses as JSON."""
    return children.start("bootstrap", "p2p_diloco", "bootstrap", "--json", "--logs", "plain")


def observer(children: Children, address: str) -> Child:
    """Somebody who looks at the run once a second, and prints what is seen as JSON."""
    return children.start(
        "status", "p2p_diloco", "status", "--initial-peers", address, "--run-id", RUN_ID,
        "--json", "--interval", "1", "--logs", "plain",
    )  # fmt: skip


def founder(children: Children, script: Script, name: str, address: str, peers: int) -> Player:
    """The peer that brings the run's settings, and a model that has learnt a little."""
    run = {**_run(script), "start_peers": peers, "codec": CODEC}
    return _join(children, name, address, {**run, **_trainer(script), "warm_start": script.warm_start})


def joiner(children: Children, script: Script, name: str, address: str) -> Player:
    """A peer that knows an address and the run's name, and nothing else of the run."""
    return _join(children, name, address, _trainer(script))


def alone(children: Children, script: Script, name: str) -> Player:
    """The same trainer with the same settings and the same warm start, in no run. It doesn't pause."""
    rows = children.folder / f"{name}.jsonl"
    trainer = {**_trainer(script), "warm_start": script.warm_start, "pause_s": 0.0}
    trainer |= {"log_path": str(rows), "summary_json": True}
    child = children.start(name, "p2p_diloco.cli.demo.alone", json.dumps(_run(script)), json.dumps(trainer))
    return Player(name, child, rows)


def _join(children: Children, name: str, address: str, settings: dict[str, Any]) -> Player:
    flags = [part for key, value in settings.items() for part in (flag(key), str(value))]
    rows = children.folder / f"{name}.jsonl"
    child = children.start(
        name, "p2p_diloco", "join", "--initial-peers", address, "--run-id", RUN_ID, "--name", name,
        "--log-path", str(rows), "--summary-json", "--logs", "plain", *flags,
    )  # fmt: skip
    return Player(name, child, rows)


def _run(script: Script) -> dict[str, Any]:
    return {"sync_every": script.sync_every, "stop_after_epochs": script.epochs}


def _trainer(script: Script) -> dict[str, Any]:
    return {"threads": 1, "pause_s": script.pause_s, "eval_every_epochs": script.eval_every}
