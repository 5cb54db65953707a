"""Running a user's command as ours: its environment, its signals, its exit status, and no orphan.

Law: knows processes and nothing of peers or runs.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from p2p_diloco.errors import UsageError

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1


def run_command(command: Sequence[str], environment: Mapping[str, str], *, by_kernel: bool | None = None) -> int:
    """Run a command to its end and give its exit status, 128 + n if signal n ended it.

    Signals that reach us are passed on to it, and it is killed if we are. `by_kernel` says who sees to the
    latter: the kernel (Linux has a call for it) or a small process that watches us; None picks by platform.

    Raises:
        UsageError: there is no such command.
    """
    if not command:
        raise UsageError("names no command", key="--", mend="write the command after it, or leave it out")
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]!r} is not a command that can be run", mend="check its name or path")
    by_kernel = sys.platform == "linux" if by_kernel is None else by_kernel
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        elif not (number in (signal.SIGINT, signal.SIGQUIT) and _typed_by_user()):
            child.send_signal(number)

    # What we were told to ignore (nohup, a shell's background jobs), the command ignores too.
    forwarded = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in forwarded}
    try:
        child = subprocess.Popen(command, env=dict(environment), preexec_fn=_die_with_us() if by_kernel else None)
        for number in early:
            child.send_signal(number)
        release = None if by_kernel else _watch(child.pid)
        status = _wait(child)
        if release is not None:
            release()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Its return code. Signals wake us through a pipe: one that comes just before a system call begins would not
    interrupt it, and would be passed on only once the command has ended by itself.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    before = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    pipe_before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        while (status := child.poll()) is None:
            os.read(woken, 4096)
    finally:
        signal.set_wakeup_fd(pipe_before)
        signal.signal(signal.SIGCHLD, before)
        os.close(woken)
        os.close(wake)
    return status


def _typed_by_user() -> bool:
    """Whether a ^C came from our terminal, which sends it to the command as well."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _die_with_us() -> Callable[[], None]:
    """For the child, between fork and exec: ask the kernel for a SIGKILL when the parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before we could ask
            os._exit(1)

    return ask


def _watch(pid: int) -> Callable[[], None]:
    """Start a process that kills `pid` when we end without having called what this returns."""
    gone, alive = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        for number in FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        os.close(alive)
        if os.read(gone, 1) == b"":
            os.kill(pid, signal.SIGKILL)
        os._exit(0)
    os.close(gone)

    def release() -> None:
        os.write(alive, b".")
        os.close(alive)
        os.waitpid(watcher, 0)

    return release
