"""Waits for the result of an attempt with a deadline, or of the first of several attempts that succeeds. Results that
come too late are passed to `discard`, so none is lost.

Law: does not depend on what is attempted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def first(
    attempts: Sequence[Callable[[], Coroutine[Any, Any, T]]],
    *,
    stagger_s: float,
    discard: Callable[[T], None],
    failed: Callable[[BaseException], None] = lambda error: None,
) -> T:
    """Start attempts in order until one succeeds; returns its result. The next attempt starts when an earlier one has
    failed, or `stagger_s` after the last start.

    `discard` gets the result of an attempt that succeeds too late, perhaps after the return. `failed` gets the error of
    each attempt that fails; if `failed` raises, the other attempts are given up.

    Raises:
        if all attempts fail, the error of the one that failed last; OSError if there are no attempts.
    """
    waiting, running = list(attempts), list[asyncio.Task[T]]()
    last: BaseException = OSError("there is nothing to attempt")
    try:
        while waiting or running:
            if waiting:
                running.append(asyncio.create_task(waiting.pop(0)()))
            timeout_s = stagger_s if waiting else None
            await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            done = {task: task.exception() for task in running if task.done()}
            for task, error in done.items():
                if error is None:
                    running.remove(task)
                    return task.result()
            for task, error in done.items():
                running.remove(task)
                last = error or last
                failed(last)
        raise last
    finally:
        for task in running:
            _abandon(task, discard)


def _forget(result: object) -> None:
    """The `discard` for results that need not be closed."""


async def within(timeout_s: float, attempt: Awaitable[T], *, discard: Callable[[T], None] = _forget) -> T:
    """Wait for the result of an attempt, for at most `timeout_s`. A result that comes later goes to `discard`;
    `asyncio.wait_for` is not used, because it would lose a result that comes at the moment of a cancellation. Before
    Python 3.12 it might also lose the cancellation, and the cancelled task would go on.

    Raises:
        asyncio.TimeoutError: it took longer than `timeout_s`.
    """
    task = asyncio.ensure_future(attempt)
    ended = False
    try:
        ended = bool((await asyncio.wait({task}, timeout=timeout_s))[0])
        if not ended:
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not ended:
            _abandon(task, discard)


def _abandon(task: asyncio.Future[T], discard: Callable[[T], None]) -> None:
    """Cancel an attempt. If it has a result nevertheless, `discard` gets the result."""

    def over(task: asyncio.Future[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            discard(task.result())

    task.add_done_callback(over)
    task.cancel()
