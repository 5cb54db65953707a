"""SIGINT and SIGTERM as `KeyboardInterrupt`, none of which is lost.

Law: knows processes alone. A handler may raise anywhere, and not everywhere is what it raises passed on. A module that
is half loaded takes it for its own mistake, or goes on without; so a signal waits until what is being loaded is there.
Of a text that is executed the interpreter remembers, whatever becomes of the exception, that SIGINT is what it is to
end by; so a signal waits there, too. A finaliser passes nothing on; so a signal that came there comes again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)
EXECUTED = "<string>", "<module>"
AGAIN_S = 0.05
"""After so long a signal comes again."""


class Interrupts:
    """While this is entered a signal that asks us to end raises `KeyboardInterrupt`, with its number as the argument,
    in the main thread. What is ignored stays ignored. Entered in another thread it changes nothing.

    `holds_nothing`: a signal that comes while a module is loaded ends the process at once, with 128 and its number.
    """

    def __init__(self, *, holds_nothing: bool = False) -> None:
        self.received: list[int] = []
        """The numbers of those that were raised."""
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
                self._before[number] = signal.signal(number, self._strike)
        return self

    def __exit__(self, *_: object) -> None:
        if self._base is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        sys.unraisablehook = self._hook_before
        self._base = None

    def _strike(self, number: int, frame: FrameType | None) -> None:
        if self._loads(frame):
            if self._holds_nothing:
                os._exit(128 + number)
            self._again(number)
        else:
            self.received.append(number)
            raise KeyboardInterrupt(number)

    def _loads(self, frame: FrameType | None) -> bool:
        """Whether a module is being loaded there, or a text executed; that we may have been called by one doesn't
        count.
        """
        while frame is not None and frame is not self._base:
            code = frame.f_code
            if code.co_filename.startswith("<frozen importlib") or (code.co_filename, code.co_name) == EXECUTED:
                return True
            frame = frame.f_back
        return False

    def _unraisable(self, lost: Any) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt) and self.received:
            self._again(self.received.pop())
        else:
            self._hook_before(lost)

    def _again(self, number: int) -> None:
        """Have it come again soon; of two that wait one is enough."""
        if number not in self._waiting:
            self._waiting.add(number)
            timer = threading.Timer(AGAIN_S, self._send, (number,))
            timer.daemon = True
            timer.start()

    def _send(self, number: int) -> None:
        self._waiting.discard(number)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, number)  # wakes it from whatever it waits in
