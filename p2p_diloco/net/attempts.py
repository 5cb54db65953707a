"""Several attempts at one thing, each begun a moment after the one before: the first that succeeds counts.

Law: knows nothing of what is attempted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def first(
    attempts: Sequence[Callable[[], Coroutine[Any, Any, T]]],
    *,
    stagger_s: float,
    discard: Callable[[T], None],
    failed: Callable[[BaseException], None] = lambda error: None,
) -> T:
    """The result of the first attempt that succeeds. The next attempt begins when one has failed, or after `stagger_s`.

    `discard` gets the result of an attempt that succeeds too late, `failed` the error of each that fails.

    Raises:
        the error of the last attempt, if all fail; OSError without attempts.
    """
    waiting, running = list(attempts), set[asyncio.Task[T]]()
    last: BaseException = OSError("there is nothing to attempt")
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.create_task(waiting.pop(0)()))
            timeout_s = stagger_s if waiting else None
            done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            succeeded = [task for task in done if task.exception() is None]
            for late in succeeded[1:]:
                discard(late.result())
            if succeeded:
                return succeeded[0].result()
            for task in done:
                last = task.exception() or last
                failed(last)
        raise last
    finally:
        for task in running:
            task.cancel()
        for task, outcome in zip(running, await asyncio.gather(*running, return_exceptions=True), strict=True):
            if not isinstance(outcome, BaseException):
                discard(task.result())
