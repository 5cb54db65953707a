"""Turns signals that end a program into `KeyboardInterrupt`, without losing any of them; and runs coroutines that can
close their resources before a signal ends the process.

Law: handles only signals and processes. A signal handler may raise anywhere, but in three places its exception would be
lost or do harm. During an import, the module's code may treat the exception as a failed import, so the signal is sent
again until the import is done. During an `exec`, an interrupt makes the interpreter end by SIGINT, even if the
exception is caught later, so the signal is sent again until the `exec` is done. In a finaliser, Python drops the
exception, so the signal is sent again.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals of ^C, of `kill` and of a closed terminal."""
UNWINDING = (signal.SIGTERM, signal.SIGHUP)
"""Those that Python itself makes no exception of."""
TWICE_S = 1.0
"""A signal that comes again within this many seconds is the same one: a terminal and a service manager send it to all
processes of a program, and `join` passes on what it gets."""
EXECUTED = "<string>", "<module>"
"""File name and function name of a frame of code that `exec` runs."""
AGAIN_S = 0.05
"""Seconds after which a signal that had to wait is sent again."""

T = TypeVar("T")


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """The exit status after an interrupt: 128 + the signal's number. For an interrupt that `Interrupts` didn't raise,
    SIGINT's number is used."""
    return 128 + int(next(iter(interrupt.args), signal.SIGINT))


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """A context in which each signal of `UNWINDING` ends the program by `SystemExit`, with the status that it would
    have had, 143 or 129. So `with` blocks and `finally` are left in order, where the signal would end the process at
    once. One that comes `TWICE_S` after the first does.

    A handler that somebody else has set stays, and is not replaced; so does a signal that is ignored, as SIGHUP under
    `nohup`. A context that is entered in another thread than the main thread has no effect.
    """
    here, first_at = os.getpid(), math.inf

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal first_at
        forked = os.getpid() != here  # such a process, for instance a loader's worker, has nothing to leave
        if forked or time.monotonic() - first_at >= TWICE_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if math.isinf(first_at):
            first_at = time.monotonic()
            sys.exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in UNWINDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, handle)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number in UNWINDING:
                if signal.getsignal(number) is handle:
                    signal.signal(number, signal.SIG_DFL)


class Interrupts:
    """A context in which each signal of `ENDING` raises `KeyboardInterrupt` in the main thread. The exception's
    argument is the signal's number. Signals that were ignored before stay ignored. A context that is entered in another
    thread than the main thread has no effect.

    `holds_nothing`: the program holds nothing to clean up, so a signal that comes during an import or an `exec` ends
    the process at once, with status 128 + the signal's number.
    """

    def __init__(self, *, holds_nothing: bool = False) -> None:
        self.received: list[int] = []
        """The numbers of the signals that were raised as exceptions."""
        self._holds_nothing = holds_nothing
        self._before: dict[int, Any] = {}
        self._waiting: set[int] = set()
        self._base: FrameType | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._base = sys._getframe(1)
        self._hook_before, sys.unraisablehook = sys.unraisablehook, self._unraisable
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._base is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._hook_before
        self._base = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_loading(frame):
            if self._holds_nothing:
                os._exit(128 + number)
            self._send_again(number)
        else:
            self.received.append(number)
            raise KeyboardInterrupt(number)

    def _is_loading(self, frame: FrameType | None) -> bool:
        """Whether the frame is inside an import, or inside an `exec`, that began after this context was entered."""
        while frame is not None and frame is not self._base:
            code = frame.f_code
            if code.co_filename.startswith("<frozen importlib") or (code.co_filename, code.co_name) == EXECUTED:
                return True
            frame = frame.f_back
        return False

    def _unraisable(self, lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt) and self.received:
            self._send_again(self.received.pop())
        else:
            self._hook_before(lost)

    def _send_again(self, number: int) -> None:
        """Send a signal again after `AGAIN_S`, unless the same signal already waits to be sent."""
        if number not in self._waiting:
            self._waiting.add(number)
            timer = threading.Timer(AGAIN_S, self._send, (number,))
            timer.daemon = True
            timer.start()

    def _send(self, number: int) -> None:
        self._waiting.discard(number)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, number)  # interrupts a blocking call of the main thread


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a loop of its own and return its result. A signal cancels `work`. Once the loop has ended, the
    signal is raised again, for the handler that was set before. (A handler that raises would interrupt the callback
    that runs at that moment, even a library's.)

    Call it only in the main thread, where signals arrive.
    """
    import asyncio  # takes 40 ms, in which a program's start would handle no signal

    before = {number: signal.getsignal(number) for number in ENDING}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    came: list[int] = []

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None

        loop = asyncio.get_running_loop()

        def end(number: int) -> None:
            came.append(number)
            loop.set_exception_handler(_tell_quietly)
            task.cancel()

        for number in handled:
            loop.add_signal_handler(number, end, number)
        return await work

    try:
        return asyncio.run(guarded())
    finally:
        for number in handled:
            signal.signal(number, before[number])
        if came:
            signal.raise_signal(came[0])


def _tell_quietly(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """^C in a terminal also ends libp2p's daemon, so the library's tasks that read from it fail while all ends."""
    import logging

    logging.getLogger(__name__).debug("%s", context["message"], exc_info=context.get("exception"))
