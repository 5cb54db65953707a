"""Starts child processes that are killed when this process ends, even if SIGKILL ends it.

Law: only starts processes. On Linux the kernel kills a tied process; elsewhere a small watcher process does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_WATCHER = "import psutil, sys; watched = psutil.Process(int(sys.argv[1])); sys.stdin.read(); watched.kill()"
"""The watcher's program. psutil compares start times, so it never kills a later process with the same id."""


def tied(command: Sequence[str], *, by_kernel: bool | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command. It is killed when this process ends. `options` are those of `subprocess.Popen`.

    `by_kernel`: True: the kernel kills the command; False: a watcher does; None: the kernel on Linux, else a watcher.
    """
    by_kernel = sys.platform == "linux" if by_kernel is None else by_kernel
    process = subprocess.Popen(command, preexec_fn=_die_with_parent() if by_kernel else None, **options)
    if not by_kernel:
        _watch(process.pid)
    return process


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


def _watch(pid: int) -> None:
    """Start a watcher process. Its stdin is a pipe that this process holds open, so it ends when this process ends.
    Then the watcher kills the process `pid`."""
    ours_ends, _held = os.pipe()
    subprocess.Popen(
        [sys.executable, "-c", _WATCHER, str(pid)],
        stdin=ours_ends,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(ours_ends)
