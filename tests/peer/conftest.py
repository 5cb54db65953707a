"""Swarms of real processes on loopback, for the tests of this folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

TRAINEE = Path(__file__).with_name("trainee.py")
START_S = 180.0
"""A process imports torch and hivemind twice, perhaps beside many others."""
GONE_S = 30.0
"""How long processes may take to go that nobody needs; a node gives itself 5 s, on a machine that runs."""

RUN = {
    "sync_every": 2,
    "outer_lr": 1.0,
    "outer_momentum": 0.9,
    "codec": "fp32",
    "heartbeat_interval": 0.5,
    "heartbeat_timeout": 30.0,  # a machine that stands still for a while is not dead
}


class Trainee:
    """One process of `trainee.py`."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.said: list[dict[str, Any]] = []
        self._news = threading.Condition()
        root = str(TRAINEE.parent.parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINEE), json.dumps({"name": name, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.family: set[psutil.Process] = set()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.said.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, what: str, timeout_s: float = START_S, **values: Any) -> dict[str, Any]:
        """The first line of a kind that has these values; all that were said, if it doesn't come in time."""

        def found() -> dict[str, Any] | None:
            return next((s for s in self.said if s["what"] == what and values.items() <= s.items()), None)

        with self._news:
            ended = lambda: not self._reader.is_alive() or self.process.poll() is not None  # noqa: E731
            give_up_at = time.monotonic() + timeout_s
            while (line := found()) is None and time.monotonic() < give_up_at and not ended():
                self._news.wait(0.1)
        self._reader.join(1.0 if line is None else 0.0)
        line = found()
        assert line is not None, f"{self.name} did not say {what} {values} in {timeout_s} s, but {self.said}"
        if what == "in":
            self.look_for_family()
        return line

    def look_for_family(self) -> None:
        """Remember the processes that belong to it, to see them end."""
        if self.process.poll() is None:
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))

    def node(self) -> psutil.Process:
        """Its node's process."""
        return next(p for p in self.family if "p2p_diloco.node" in " ".join(p.cmdline()))

    def hurry(self) -> None:
        """Have it make no pauses between steps any more."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self, how: int = signal.SIGKILL) -> None:
        """Send a signal to the training process alone."""
        self.look_for_family()
        self.process.send_signal(how)

    def status(self, timeout_s: float = 60.0) -> int:
        """The exit status, once it has ended."""
        return self.process.wait(timeout_s)

    def left_behind(self, within_s: float = GONE_S) -> list[str]:
        """Processes of it that still run after so long; killed now, so that no test harms another."""
        give_up_at = time.monotonic() + within_s
        while (running := list(filter(runs, self.family))) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        for process in running:
            process.kill()
        return [str(process) for process in running]


def runs(process: psutil.Process) -> bool:
    """Whether it does: one that has ended and that nobody asked for its status does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Swarm:
    """Processes of one run. Whoever is started first is whom the others join through."""

    def __init__(self) -> None:
        self.trainees: list[Trainee] = []
        self.addresses: list[str] = []

    def start(self, name: str, delta: float = 1.0, *, config: dict[str, Any] | None = None, **options: Any) -> Trainee:
        """Start a peer; the first one's addresses are waited for."""
        values = {"run_id": "test", "initial_peers": self.addresses, "config": RUN if config is None else config}
        trainee = Trainee(name, {**values, "delta": delta, **options})
        self.trainees.append(trainee)
        if not self.addresses:
            self.addresses = trainee.wait_for("in")["addresses"]
        return trainee


@pytest.fixture
def swarm() -> Iterator[Swarm]:
    """A swarm that leaves nothing behind, and says if it did."""
    made = Swarm()
    yield made
    for trainee in made.trainees:
        if trainee.process.poll() is None:
            trainee.end()
        trainee.process.wait(GONE_S)
    behind = [name for trainee in made.trainees for name in trainee.left_behind()]
    assert not behind, f"left behind: {behind}"


@pytest.fixture
def run_config() -> dict[str, Any]:
    """Settings of a quick run without rounding."""
    return dict(RUN)


@pytest.fixture(scope="module")
def short_merges() -> Iterator[None]:
    """Merges in pieces of a few elements, so that small parameters take several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("p2p_diloco.peer.local.MERGED_AT_ONCE", 3)
        yield
