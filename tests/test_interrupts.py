"""Signals that end a command: when they take effect, and that none is lost."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest

from p2p_diloco.interrupts import ENDING, Interrupts, run, unwound_by_signals

SIGNALLED = "import os\nos.kill(os.getpid(), {number})\n{then}\nwhole = True\n"
"""A module that receives a signal while it is loaded."""


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Each test restores handlers and hook."""
    before = [signal.getsignal(number) for number in ENDING], sys.unraisablehook
    yield
    assert ([signal.getsignal(number) for number in ENDING], sys.unraisablehook) == before


def struck(work: Callable[[], None]) -> list[int]:
    """The numbers of the signals that took effect while, or after, this function runs."""
    interrupts = Interrupts()

    def done() -> None:
        with interrupts:
            work()
            for _ in range(500):  # long enough for a repeated signal
                time.sleep(0.02)

    with pytest.raises(KeyboardInterrupt) as interrupt:
        done()
    assert interrupt.value.args == (interrupts.received[-1],)
    return interrupts.received


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_strikes_with_its_number(number: signal.Signals) -> None:
    assert struck(lambda: os.kill(os.getpid(), number)) == [number]


def test_a_signal_waits_until_a_module_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import system may take any exception for a missing module. Two signals of one kind take effect once."""
    again = "import time\ntime.sleep(0.2)\nos.kill(os.getpid(), 15)"
    (tmp_path / "signalled.py").write_text(SIGNALLED.format(number=15, then=again))
    monkeypatch.syspath_prepend(tmp_path)
    loaded = []
    assert struck(lambda: loaded.append(__import__("signalled"))) == [signal.SIGTERM]
    assert loaded[0].whole


def test_a_signal_waits_until_a_text_is_executed(tmp_path: Path) -> None:
    """Python would remember the signal, and end a module run as a program by SIGINT, with any exit status."""
    code = "from p2p_diloco.interrupts import Interrupts\nimport os, sys, time\ntry:\n    with Interrupts():\n        "
    code += "exec('os.kill(os.getpid(), 2)\\nmade = 1')\n        assert made\n        time.sleep(10)\n"
    code += "except KeyboardInterrupt:\n    sys.exit(77)\n"
    (tmp_path / "executing.py").write_text(code)
    command = [sys.executable, "-m", "executing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (77, "")


def test_a_signal_swallowed_by_a_finaliser_is_raised_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Python drops what a finaliser raises and prints it, though the signal has nothing to do with the finaliser."""

    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    def drop() -> None:
        Finalised()

    assert struck(drop) == [signal.SIGTERM]
    assert "KeyboardInterrupt" not in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_swallowed_exceptions_are_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: told.append(type(lost.exc_value)))

    class Finalised:
        def __del__(self) -> None:
            raise ValueError

    with Interrupts():
        Finalised()
    assert told == [ValueError]
    monkeypatch.undo()


@pytest.mark.parametrize("context", [Interrupts, unwound_by_signals])
def test_in_another_thread_nothing_changes(context: Callable[[], AbstractContextManager[object]]) -> None:
    """Only the main thread handles signals."""
    seen: list[object] = []

    def work() -> None:
        with context():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.parametrize(("number", "module"), [(signal.SIGINT, "typer.py"), (signal.SIGTERM, "hivemind/dht.py")])
def test_a_command_that_is_being_loaded_ends_at_once(number: signal.Signals, module: str, tmp_path: Path) -> None:
    """With 128 and the signal's number, without output: it holds no resources yet."""
    then = "import time\ntime.sleep(60)"
    file = tmp_path / module
    file.parent.mkdir(exist_ok=True)
    (file.parent / "__init__.py").touch()
    file.write_text(SIGNALLED.format(number=int(number), then=then))
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, root)))}
    done = subprocess.run(
        [sys.executable, "-m", "p2p_diloco", "bootstrap"],
        env=environment, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


UNWOUND = """
import multiprocessing, os, signal, sys, time
import p2p_diloco.interrupts
from p2p_diloco.interrupts import unwound_by_signals

ready, begun = multiprocessing.Pipe(duplex=False)

def worker():
    begun.send("begun")
    time.sleep(60)

with unwound_by_signals():
    child = multiprocessing.get_context("fork").Process(target=worker)
    child.start()
    ready.recv()
    child.terminate()
    child.join(20)
    print(child.exitcode, flush=True)
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(60)
    finally:
        print("left in order", flush=True)
        for signal_again in sys.argv[2:]:
            os.kill(os.getpid(), int(signal_again))
            print("went on", flush=True)
            p2p_diloco.interrupts.TWICE_S = 0.0
"""


@pytest.mark.parametrize(("number", "times", "status"), [(1, 1, 129), (15, 2, 143), (15, 3, -15)])
def test_a_signal_unwinds_a_program_once(number: int, times: int, status: int) -> None:
    """The program leaves its blocks, and ends with the status of the signal, also if it gets the signal twice, as from
    a terminal and from `join`. A later one ends it at once. A forked child ends by the signal."""
    command = [sys.executable, "-c", UNWOUND, *[str(number)] * times]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    went_on = ["went on"] * min(1, times - 1)
    assert done.stdout.split("\n")[:-1] == [str(-signal.SIGTERM), "left in order", *went_on]
    assert done.returncode == status


def test_who_handles_sigterm_goes_on_doing_so() -> None:
    """A handler that the program set before, or sets inside, stays; else all is as before afterwards."""
    mine: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: mine.append(number))
    try:
        with unwound_by_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        assert mine == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with unwound_by_signals():
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with unwound_by_signals():
            later = signal.signal(signal.SIGTERM, signal.SIG_IGN)
            assert callable(later)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


# -- event loops


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Handlers that note a signal and raise `KeyboardInterrupt`, as the command line's does."""
    numbers: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        numbers.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ENDING}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[object]:
    """The present handlers of the signals."""
    return [signal.getsignal(number) for number in ENDING]


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_breaks_no_callback_off(received: list[int], number: signal.Signals) -> None:
    """A signal leaves other tasks alone; the work closes its resources, then the signal takes effect."""
    done: list[str] = []
    before = handlers()

    async def bystander() -> None:
        signal.raise_signal(number)
        done.append("a callback of another")

    async def work() -> None:
        beside = asyncio.create_task(bystander())
        try:
            await asyncio.sleep(30)
            done.append("slept on")
        finally:
            await asyncio.sleep(0.01)
            done.append("closed")
            assert beside.exception() is None

    with pytest.raises(KeyboardInterrupt):
        run(work())
    assert done == ["a callback of another", "closed"]
    assert received == [number]
    assert handlers() == before


def test_what_fails_after_a_signal_is_not_told_with_a_traceback(
    received: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """^C in a terminal ends the daemon, too, from which tasks of the library read."""

    async def reads() -> None:
        raise ConnectionResetError("gone")

    async def work() -> None:
        try:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            await asyncio.sleep(30)
        finally:
            beside = asyncio.create_task(reads())
            await asyncio.sleep(0)
            del beside
            gc.collect()

    with pytest.raises(KeyboardInterrupt):
        run(work())
    assert [each for each in caplog.records if each.levelno > logging.DEBUG] == []


def test_a_second_signal_ends_the_closing_too(received: list[int]) -> None:
    """A close that takes long is broken off; the first signal is the one that counts."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        try:
            loop.call_soon(signal.raise_signal, signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            loop.call_soon(signal.raise_signal, signal.SIGINT)
            await asyncio.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        run(work())
    assert received == [signal.SIGTERM]


def test_what_is_ignored_stays_ignored() -> None:
    """A shell's background job has no SIGINT, `nohup` none of its own; neither the block nor the loop gives it one."""

    async def work() -> str:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0.01)
        return "went on"

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        assert interrupts.received == []
        assert run(work()) == "went on"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
