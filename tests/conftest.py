"""What all tests share.

Hypothesis judges properties here, not the speed of the machine: on a busy one neither a slow example nor
slow drawing of examples is a fault of the code."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
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


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    """A command sets up logging for its whole process; in a test that would be for all tests after it."""
    root, ours = logging.getLogger(), logging.getLogger("p2p_diloco")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
