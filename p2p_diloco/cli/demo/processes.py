"""The processes of a command that needs many (`demo`, `bench`): started, read and ended, and none left behind.

Law: knows processes, their files and signals, and nothing of runs. What a process writes goes to files: its
data to NAME.out, its log to NAME.log; nothing here blocks, but for ending, which is bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from p2p_diloco.settings import without_ours

LEAVE_S = 6.0
"""How long processes that were asked to end may take: a peer says goodbye before."""
GONE_S = 5.0
"""How long the system may take to clear away what was killed."""
WARDEN = "p2p_diloco.cli.demo.warden"
"""What ends the others should we be killed ourselves."""


class Signals:
    """While this is entered, signals that ask us to end are noted, and strike nowhere: not between a process's
    start and our knowing of it.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, and a shell's background jobs
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)


class Lines:
    """A growing file of JSON objects, one a line, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> list[dict[str, Any]]:
        """The whole lines that have come since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:
            return []
        whole, newline, _ = content.rpartition(b"\n")
        self._read += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


class Child:
    """A process of ours. One that `listens` reads lines from us."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        *,
        listens: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log, self.out = folder / f"{name}.log", folder / f"{name}.out"
        self.printed = Lines(self.out)
        self.started_at = time.time()
        with self.out.open("wb") as out, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**without_ours(os.environ), "PYTHONUNBUFFERED": "1", **(environment or {})},
                start_new_session=True,  # the terminal's ^C is for us: we end them, and they leave the run in order
            )

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.process.poll()

    def tell(self, line: str) -> None:
        """A line to a process that listens; one that has ended hears nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def family(self) -> list[psutil.Process]:
        """It and all that it has started, while it runs."""
        return _family([self])

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def kill(self) -> float:
        """SIGKILL to it and to whatever it has started, as a power cut would; when (seconds since 1970)."""
        family = _family([self])
        when = time.time()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(GONE_S)
        return when


class Children:
    """All processes of a command; when this is left they are ended, whatever happened. `hurried` says whether there
    is no time for goodbyes.
    """

    def __init__(self, folder: Path, hurried: Callable[[], bool]) -> None:
        self.folder, self._hurried = folder, hurried
        self.all: list[Child] = []
        self._warden = subprocess.Popen(
            [sys.executable, "-m", WARDEN], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def start(
        self,
        name: str,
        module: str,
        *arguments: str,
        on: Sequence[str] = (),
        listens: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a Python module with our interpreter; `on` begins a command line that runs on another machine."""
        command = [*on, sys.executable, "-m", module, *arguments]
        child = Child(name, command, self.folder, listens=listens, environment=environment)
        self.all.append(child)
        self._tell_warden(f"{child.process.pid}")
        return child

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ask all that run to end, and kill what doesn't; the warden is told that this is done."""
        family = _family(self.all)
        for child in self.all:
            if child.status is None:
                child.process.terminate()
        give_up_at = time.monotonic() + LEAVE_S
        while _alive(family) and time.monotonic() < give_up_at and not self._hurried():
            for child in self.all:
                child.process.poll()
            time.sleep(0.05)
        for process in _alive([*family, *_family(self.all)]):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for child in self.all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(GONE_S)
            if child.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.process.stdin.close()
        self._tell_warden("done")
        assert self._warden.stdin is not None
        self._warden.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._warden.wait(GONE_S)

    def _tell_warden(self, line: str) -> None:
        assert self._warden.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._warden.stdin.write(f"{line}\n".encode())
            self._warden.stdin.flush()


def _family(children: Iterable[Child]) -> list[psutil.Process]:
    """Those of the children that run, and all that they have started."""
    found: list[psutil.Process] = []
    for child in children:
        if child.status is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(child.process.pid)
                found += [process, *process.children(recursive=True)]
    return found


def _alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    alive = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive
