"""An event loop whose work closes what it holds when a signal ends it.

Law: knows nothing of what it runs. A handler that raises would break off whichever callback runs at that moment, also a
library's. Here the work is cancelled instead, and closes what it holds; then the signal has the effect that it had
before.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from p2p_diloco.interrupts import ENDING

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, in a loop of its own. A signal cancels it, and is then handled as before the loop.

    Only from the main thread, where signals arrive.
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    came: list[int] = []

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            came.append(number)
            task.cancel()

        for number in handled:
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        return await work

    try:
        return asyncio.run(guarded())
    finally:
        for number in handled:
            signal.signal(number, before[number])
        if came:
            signal.raise_signal(came[0])
