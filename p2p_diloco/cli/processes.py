"""Child processes that Linux kills when this process ends, even if SIGKILL ends it: a user's command, to which this
process's signals are passed on; and those of `demo` and of measurements, whose output is read.

Law: handles processes, signals and files; knows nothing of peers or runs. A process of `demo` writes its data to
NAME.out, one JSON object a line, and its log to NAME.log.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from p2p_diloco.errors import UsageError
from p2p_diloco.settings import without_ours

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
LOOK_EVERY_S = 0.05
"""Seconds between two checks whether the command has ended. With a blocking wait, a signal that comes just before the
system call would be handled only after the command's end."""
_PR_SET_PDEATHSIG = 1


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end and return its exit status. The status is 128 + n if signal n ended the command.

    Signals are passed on to the command, and it is killed if this process is killed.

    Raises:
        UsageError: there is no such command.
    """
    check_command(command)
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        elif not (number in (signal.SIGINT, signal.SIGQUIT) and _typed_by_user()):
            child.send_signal(number)

    # The command also ignores the signals that this process ignores (nohup, a shell's background jobs).
    forwarded = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in forwarded}
    try:
        child = tied(command, env=dict(environment))
        for number in early:
            child.send_signal(number)
        while (status := child.poll()) is None:
            time.sleep(LOOK_EVERY_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


def check_command(command: Sequence[str]) -> None:
    """Raise UsageError if there is no such command."""
    if not command:
        raise UsageError("names no command", key="--", mend="write the command after it, or leave it out")
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]!r} is not a command that can be run", mend="check its name or path")


def _typed_by_user() -> bool:
    """Whether ^C was typed at the terminal. The terminal then sends it to the command too."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


# -- tied processes


def tied(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command. On Linux the kernel kills it when this process ends. `options` are those of
    `subprocess.Popen`."""
    return subprocess.Popen(command, preexec_fn=_die_with_parent() if sys.platform == "linux" else None, **options)


def _die_with_parent() -> Callable[[], None]:
    """Make the function that the child calls between fork and exec. It asks the kernel to kill the child when the
    parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has ended before prctl was called
            os._exit(1)

    return ask


LEAVE_S = 6.0
"""Seconds that processes have to end when asked to: a peer first tells the others that it leaves."""


def module(name: str, *arguments: str) -> list[str]:
    """The command line that runs a Python module with this interpreter."""
    return [sys.executable, "-m", name, *arguments]


class Lines:
    """Reads a growing file of JSON objects, one a line."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> list[dict[str, Any]]:
        """The complete lines that were written since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


class Child:
    """A child process. `killed`: whether `kill` was called."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, stdin: int = subprocess.DEVNULL) -> None:
        self.name, self.log, self.started_at, self.killed = name, folder / f"{name}.log", time.time(), False
        self.printed = Lines(folder / f"{name}.out")
        with (folder / f"{name}.out").open("wb") as out, self.log.open("wb") as log:
            # of a session of its own: the terminal sends ^C to this process alone, which ends the child in order
            env = {**without_ours(os.environ), "PYTHONUNBUFFERED": "1"}
            self.process = tied(command, stdin=stdin, stdout=out, stderr=log, env=env, start_new_session=True)

    @property
    def status(self) -> int | None:
        """The process's exit status; None while it runs."""
        return self.process.poll()

    @property
    def family(self) -> list[psutil.Process]:
        """The process and all its descendants. Empty once the process has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self.status is None:
                process = psutil.Process(self.process.pid)
                return [process, *process.children(recursive=True)]
        return []

    def last_words(self) -> str:
        """The last line of the process's log that isn't empty."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").split("\n") if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def ask_to_end(self) -> None:
        """Ask the process to end."""
        self.process.terminate()

    def kill(self) -> float:
        """Send SIGKILL to the process and all its descendants at once, like a power cut. Returns the time in seconds
        since 1970."""
        family, when, self.killed = self.family, time.time(), True
        _kill(family)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_S)
        return when


class Children:
    """All child processes of a command. When the context ends, it asks them to end. Those that still run after
    `LEAVE_S`, or at a second interrupt, are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Child] = []

    def start(self, name: str, command: Sequence[str]) -> Child:
        """Start a process."""
        self.all.append(Child(name, command, self.folder))
        return self.all[-1]

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        family = [process for child in self.all for process in child.family]
        for child in self.all:
            child.ask_to_end()
        give_up_at = time.monotonic() + LEAVE_S
        try:
            for child in self.all:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, give_up_at - time.monotonic()))
        finally:
            _kill(family)
            for child in self.all:
                child.kill()


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
