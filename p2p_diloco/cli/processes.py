"""The processes of a command that needs many (`demo`, `bench`): started, read and ended.

Law: knows processes and their files, and nothing of runs. A process writes its data to NAME.out, one JSON object a
line, and its log to NAME.log.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from p2p_diloco.cli.tied import tied
from p2p_diloco.settings import without_ours

LEAVE_S = 6.0
"""How long processes that are asked to end may take: a peer tells the others that it leaves."""
GONE_S = 5.0
"""How long the system may take to clear away a killed process."""
LOOK_EVERY_S = 0.05


def module(name: str, *arguments: str) -> list[str]:
    """The command line that runs a Python module with our interpreter."""
    return [sys.executable, "-m", name, *arguments]


class Lines:
    """A growing file of JSON objects, one a line, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> list[dict[str, Any]]:
        """The whole lines that have come since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


class Child:
    """A process of ours. One that `listens` takes lines from us, and ends when there are no more."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        *,
        listens: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.log, self.started_at = name, folder / f"{name}.log", time.time()
        self.killed = False
        """Whether we have killed it."""
        self.printed = Lines(folder / f"{name}.out")
        with (folder / f"{name}.out").open("wb") as out, self.log.open("wb") as log:
            self.process = tied(
                command,
                stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**without_ours(os.environ), "PYTHONUNBUFFERED": "1", **(environment or {})},
                start_new_session=True,  # the terminal sends ^C to us alone: we end it in order
            )

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.process.poll()

    @property
    def family(self) -> list[psutil.Process]:
        """The process and all that it has started; nothing once it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.status is None:
                process = psutil.Process(self.process.pid)
                return [process, *process.children(recursive=True)]
        return []

    def tell(self, line: str) -> None:
        """A line to a process that listens; nothing happens if it has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    @property
    def failed(self) -> bool:
        """Whether it has ended by a fault, or by a signal that wasn't ours."""
        return bool(self.status) and not self.killed

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def ask_to_end(self) -> None:
        """Close its input if it listens, else send SIGTERM."""
        if self.process.stdin is None:
            self.process.terminate()
        else:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def kill(self) -> float:
        """SIGKILL to it and to all that it has started, as a power cut would; when (seconds since 1970)."""
        family, when, self.killed = self.family, time.time(), True
        _kill(family)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GONE_S)
        return when


class Children:
    """All processes of a command. Leaving this asks them to end and kills those that don't within `LEAVE_S`, or all
    that are left when a second interrupt comes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Child] = []

    def start(self, name: str, command: Sequence[str], **options: Any) -> Child:
        """Start a process; `options` are those of `Child`."""
        self.all.append(Child(name, command, self.folder, **options))
        return self.all[-1]

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        family = [process for child in self.all for process in child.family]
        for child in self.all:
            child.ask_to_end()
        give_up_at = time.monotonic() + LEAVE_S
        try:
            while any(map(_runs, family)) and time.monotonic() < give_up_at:
                time.sleep(LOOK_EVERY_S)
        finally:
            _kill(family)
            for child in self.all:
                child.kill()


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
