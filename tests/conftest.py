"""What all tests share.

Hypothesis judges properties here, not the speed of the machine: on a busy one neither a slow example nor
slow drawing of examples is a fault of the code."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="p2p-diloco-state-")  # no test remembers anything of another run
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
# One thread for torch, as in a node: two that wait for each other over short vectors take ten times the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# A shell that starts pytest in the background has it, and so every process it starts, ignore ^C and hang-ups.
for number, plain in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, plain)


COMMANDS = {
    "worlds": ["p2p_diloco", "simulate", "--seeds", "1800", "--first", "1000"],
    "types": ["mypy", "--strict"],
}
"""What runs beside all other tests, each for the one test that looks at what it says, by the name of its fixture."""
BESIDE = pytest.StashKey[dict[str, "subprocess.Popen[str]"]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin with them now, with whatever processor time the other tests leave: most of them wait. And have the garbage
    collector pass over all that is loaded by now: a test that asks what it leaves looks at its own."""
    gc.collect()
    gc.freeze()
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    started = session.config.stash[BESIDE] = {}
    for name, command in COMMANDS.items() if not session.config.option.collectonly else ():
        if name in wanted:
            started[name] = subprocess.Popen(
                ["nice", "-n", "19", sys.executable, "-m", *command],
                cwd=Path(__file__).parent.parent,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if name == "types" else subprocess.DEVNULL,  # worlds tell of their progress
                text=True,
            )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End those that nobody has waited for."""
    for process in session.config.stash.get(BESIDE, {}).values():
        process.terminate()
        process.communicate()


@pytest.fixture
def worlds(pytestconfig: pytest.Config) -> subprocess.Popen[str]:
    """The command that plays 1,800 simulated worlds."""
    return pytestconfig.stash[BESIDE]["worlds"]


@pytest.fixture
def types(pytestconfig: pytest.Config) -> subprocess.Popen[str]:
    """The command that looks at the types."""
    return pytestconfig.stash[BESIDE]["types"]


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    """A command sets up logging for its whole process; in a test that would be for all tests after it."""
    root, ours = logging.getLogger(), logging.getLogger("p2p_diloco")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
