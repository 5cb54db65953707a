"""Starts child processes that Linux kills when this process ends, even if SIGKILL ends it; and runs a user's command in
one, to which it passes this process's signals on.

Law: handles processes and signals; knows nothing of peers or runs.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from p2p_diloco.errors import UsageError

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
