"""A user's command run as ours: status, signals, and no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from p2p_diloco.cli import processes
from p2p_diloco.cli.processes import run_command
from p2p_diloco.errors import UsageError

pytestmark = pytest.mark.real

WRAPPER = """
import os, sys
from p2p_diloco.cli import processes
command = [sys.executable, "-c", sys.argv[1]]
sys.exit(processes.run_command(command, os.environ))
"""
SLEEPER = """
import os, signal, sys, time
def told(number, frame):
    os.write(1, f"got {number}\\n".encode())
    sys.exit(40 + number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, told)
print(os.getpid(), flush=True)
for _ in range(600):  # a signal that comes just before a long sleep would be handled after it
    time.sleep(0.1)
"""


def wrapped() -> tuple[subprocess.Popen[str], psutil.Process]:
    """A wrapper around a sleeping command, and the command, ready for signals."""
    wrapper = subprocess.Popen(
        [sys.executable, "-c", WRAPPER, SLEEPER], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert wrapper.stdout is not None
    return wrapper, psutil.Process(int(wrapper.stdout.readline()))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(77)", 77),
        ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
        ("os.kill(os.getpid(), 15)", 128 + signal.SIGTERM),
    ],
)
def test_the_status_is_the_commands(code: str, status: int) -> None:
    """Whatever the command exits with, so do we; a signal's end is 128 and its number, as a shell tells it."""
    assert run_command([sys.executable, "-c", f"import sys, os; {code}"], os.environ) == status


@pytest.mark.parametrize("command", [[], ["no-such-command-here"], ["/dev/null"]])
def test_what_cannot_be_run_is_the_users_mistake(command: list[str]) -> None:
    """A misspelt command is told as such, before anything is started."""
    with pytest.raises(UsageError):
        run_command(command, os.environ)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on(number: signal.Signals) -> None:
    """The command gets the signal and decides how to end."""
    wrapper, command = wrapped()
    wrapper.send_signal(number)
    out, _ = wrapper.communicate(timeout=50)
    assert out == f"got {int(number)}\n"
    assert wrapper.returncode == 40 + number
    assert not command.is_running()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's call")
def test_a_killed_wrapper_leaves_no_orphan() -> None:
    """kill -9 on us ends the command too."""
    wrapper, command = wrapped()
    wrapper.kill()
    wrapper.wait(timeout=20)
    psutil.wait_procs([command], timeout=30)
    assert not command.is_running() or command.status() == psutil.STATUS_ZOMBIE


def test_ignored_signals_stay_ignored() -> None:
    """Under nohup a hangup reaches neither us nor the command."""
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + WRAPPER
    asks = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    result = subprocess.run([sys.executable, "-c", code, asks], capture_output=True, text=True, timeout=60)
    assert result.stdout == "True\n", result.stderr


def test_a_signal_that_comes_before_the_command_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    start = processes.tied

    def late(*arguments: Any, **named: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return start(*arguments, **named)

    monkeypatch.setattr(processes, "tied", late)
    code = "import time; time.sleep(60)"
    assert run_command([sys.executable, "-c", code], dict(os.environ)) == 128 + signal.SIGTERM
