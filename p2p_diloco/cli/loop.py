"""An event loop that SIGINT and SIGTERM end in order.

Law: knows nothing of what it runs. A handler that raises in the middle of a loop breaks off whatever callback runs
then, which may be a library's; here the work is cancelled instead and closes what it holds, and then the signal does
what it did before.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, by a loop of its own. A signal that ends it is handled again afterwards, as it was before.

    Only from the main thread, where signals arrive.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    came: list[int] = []

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None

        def end(number: int) -> None:
            came.append(number)
            task.cancel()

        for number in heeded:
            asyncio.get_running_loop().add_signal_handler(number, end, number)
        return await work

    try:
        return asyncio.run(guarded())
    finally:
        for number in heeded:
            signal.signal(number, before[number])
        if came:
            signal.raise_signal(came[0])
