"""A loop's clock that a test turns. A machine that stands still for a while then costs time, and never an outcome."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

GIVE_UP_S = 60.0
"""How long a test waits for what will not come: only one that fails waits so long."""


class ByHand:
    """The running loop's clock. No deadline passes before the test says so, however long the machine takes. Whoever
    takes the clock along must be made after this."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._real, self.now = self._loop.time, self._loop.time()
        self._ahead_s: float | None = None
        self._loop.time = self._time  # type: ignore[method-assign]

    def _time(self) -> float:
        return self.now if self._ahead_s is None else self._real() + self._ahead_s

    def let_go(self) -> None:
        """From here on it goes by itself again."""
        self._ahead_s = self.now - self._real()

    async def until(self, condition: Callable[[], object]) -> None:
        """Let go on what needs no time."""
        give_up_at = time.monotonic() + GIVE_UP_S
        while not condition():
            assert time.monotonic() < give_up_at, f"not within {GIVE_UP_S:g} s"
            await asyncio.sleep(0)

    async def passes(self, seconds: float) -> None:
        """Advance the clock at once, after all work that needs no time; timers that are due then fire, with their
        consequences."""
        for advance_s in (0.0, seconds):
            self.now += advance_s
            for _ in range(20):
                await asyncio.sleep(0)

    async def over(self, *tasks: asyncio.Future[Any], step_s: float) -> float:
        """Let time pass until these have ended; how much that took."""
        began, give_up_at = self.now, time.monotonic() + GIVE_UP_S
        while not all(task.done() for task in tasks):
            assert time.monotonic() < give_up_at, f"not within {self.now - began:g} s of its clock"
            await self.passes(step_s)
        return self.now - began


def timed(test: Callable[[ByHand], Awaitable[None]]) -> None:
    """Run a test on a clock that it turns; afterwards no task may be left."""

    async def alone() -> None:
        with by_hand() as clock:
            await test(clock)
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(alone())


@contextlib.contextmanager
def by_hand() -> Iterator[ByHand]:
    """Hold the running loop's clock."""
    clock = ByHand()
    try:
        yield clock
    finally:
        clock.let_go()
