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

import pytest
from hypothesis import HealthCheck, settings

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="p2p-diloco-state-")  # no test remembers anything of another run
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# A shell that starts pytest in the background has it, and so every process it starts, ignore ^C and hang-ups.
for number, plain in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, plain)


WORLDS = pytest.StashKey["subprocess.Popen[str]"]()
"""The command that plays 1,800 simulated worlds, for the one test that looks at what it says."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Play the worlds from now on, with whatever processor time the other tests leave: most of them wait. And have
    the garbage collector pass over all that is loaded by now: a test that asks what it leaves looks at its own."""
    gc.collect()
    gc.freeze()
    wanted = any("worlds" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly:
        command = [sys.executable, "-m", "p2p_diloco", "simulate", "--seeds", "1800", "--first", "1000"]
        session.config.stash[WORLDS] = subprocess.Popen(
            ["nice", "-n", "19", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End it, should nobody have waited for it."""
    if (worlds := session.config.stash.get(WORLDS, None)) is not None:
        worlds.terminate()
        worlds.communicate()


@pytest.fixture
def worlds(pytestconfig: pytest.Config) -> subprocess.Popen[str]:
    """The command that plays 1,800 simulated worlds."""
    return pytestconfig.stash[WORLDS]


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    """A command sets up logging for its whole process; in a test that would be for all tests after it."""
    root, ours = logging.getLogger(), logging.getLogger("p2p_diloco")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
