"""Runs a coroutine in an event loop. After a signal the coroutine can close its resources before the process ends.

Law: it knows nothing of the coroutine's work. A signal handler that raises would interrupt the callback that runs at
that moment, even a library's. Instead the work is cancelled and closes its resources; then the signal has its usual
effect.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from p2p_diloco.interrupts import ENDING

T = TypeVar("T")
log = logging.getLogger(__name__)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a loop of its own and return its result. A signal cancels `work`. Once the loop has ended, the
    signal is raised again, for the handler that was set before.

    Call it only in the main thread, where signals arrive.
    """
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
    log.debug("%s", context["message"], exc_info=context.get("exception"))
