"""Fixtures and settings for all tests.

Hypothesis checks properties here, not the speed of the machine: on a busy one neither a slow example nor slow drawing
of examples is a fault of the code.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import warm
from hypothesis import HealthCheck, settings

# no test uses the remembered addresses of another run
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="p2p-diloco-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
# One thread for torch, as in a node: two threads on short vectors mostly wait for each other, at ten times the
# processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# A shell that starts pytest in the background makes it, and every process that it starts, ignore ^C and hang-ups.
for number, plain in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, plain)


COMMANDS = {"worlds": ["tests.sim.worlds", "--seeds", "60", "--first", "1076"], "types": ["mypy", "--strict"]}
"""Commands that run in parallel to all tests, by the name of the fixture that reads their result."""


class Beside:
    """These commands, in a folder known to all test processes: the first process starts one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, name: str) -> None:
        """Start the commands that no process has started yet."""
        place = self.folder / name
        with contextlib.suppress(FileExistsError):
            place.mkdir()
            script = '"$@" > "$0/told" 2> "$0/noise"; echo $? > "$0/new"; mv "$0/new" "$0/status"'
            command = ["nice", "-n", "19", sys.executable, "-m", *COMMANDS[name]]
            root = Path(__file__).parent.parent
            process = subprocess.Popen(["sh", "-c", script, str(place), *command], cwd=root, start_new_session=True)
            (place / "group").write_text(str(process.pid))

    def outcome(self, name: str, within_s: float) -> tuple[int, str]:
        """The exit status, and stdout; after a failure also stderr."""
        self.start(name)
        place, give_up_at = self.folder / name, time.monotonic() + within_s
        while not (place / "status").exists():
            assert time.monotonic() < give_up_at, f"{COMMANDS[name]} takes longer than {within_s} s"
            time.sleep(0.1)
        status, told = int((place / "status").read_text()), (place / "told").read_text()
        return status, told + (place / "noise").read_text() if status else told

    def end(self) -> None:
        """End the commands: their results are no longer needed."""
        for group in self.folder.glob("*/group"):
            if not group.with_name("status").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(group.read_text()), signal.SIGTERM)
        shutil.rmtree(self.folder, ignore_errors=True)


BESIDE = pytest.StashKey[Beside]()


def pytest_configure(config: pytest.Config) -> None:
    """One folder for all processes that share the tests among them."""
    told = getattr(config, "workerinput", {}).get("beside")
    config.stash[BESIDE] = Beside(Path(told or tempfile.mkdtemp(prefix="p2p-diloco-beside-")))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell another test process the folder."""
    node.workerinput["beside"] = str(node.config.stash[BESIDE].folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no process is left alone with one at the end; but not those that wait
    for a command that runs beside the tests."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    waiting = {item.path for item in items if not COMMANDS.keys().isdisjoint(getattr(item, "fixturenames", ()))}
    items.sort(key=lambda item: item.path not in slow - waiting)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the commands now, so that they use the processor time that the other tests leave: most of them wait. And
    exclude all loaded objects from garbage collection, so that a test on leaked objects sees only its own."""
    gc.collect()
    gc.freeze()
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    for name in COMMANDS.keys() & wanted if not session.config.option.collectonly else ():
        session.config.stash[BESIDE].start(name)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the commands that no test has waited for."""
    if not hasattr(config, "workerinput"):
        config.stash[BESIDE].end()


@pytest.fixture
def worlds(pytestconfig: pytest.Config) -> Callable[[float], tuple[int, str]]:
    """The result of 60 simulated worlds; waits for it this many seconds."""
    return partial(pytestconfig.stash[BESIDE].outcome, "worlds")


@pytest.fixture
def types(pytestconfig: pytest.Config) -> Callable[[float], tuple[int, str]]:
    """The result of the type check."""
    return partial(pytestconfig.stash[BESIDE].outcome, "types")


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """Restore the loggers: a command sets up logging for its whole process, which would affect all later tests."""
    root, names = logging.getLogger(), ("", "p2p_diloco", "p2p_diloco.observe.baseline")
    handlers, levels = root.handlers[:], {name: logging.getLogger(name).level for name in names}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[warm.Nursery | None]:
    """The process that the peers of real runs are forked from; None where that is not possible."""
    if not warm.AVAILABLE:
        yield None
        return
    made = warm.Nursery.start(tmp_path_factory.mktemp("nursery") / "log")
    yield made
    made.end()
