"""The first of several attempts that succeeds counts, and nothing is left of the others."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from p2p_diloco.net.attempts import first, within
from tests.net.clocks import ByHand, timed
from tests.net.patience import plays

STAGGER_S = 1.0


class Attempts:
    """Attempts that a test ends one by one."""

    def __init__(self, count: int) -> None:
        self.discarded: list[str] = []
        self.outcomes = [asyncio.get_running_loop().create_future() for _ in range(count)]

    async def attempt(self, number: int) -> str:
        return str(await self.outcomes[number])

    async def stubborn(self, number: int) -> str:
        """The same, with a result in spite of a cancellation."""
        try:
            return await self.attempt(number)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            return "in spite of it"


@pytest.mark.parametrize("in_time", [True, False])
@plays(timed)
async def test_a_cancelled_race_leaves_nothing(clock: ByHand, in_time: bool) -> None:
    """A result that comes at the moment of the cancellation, or in spite of it, is discarded."""
    attempts = Attempts(2)
    ways = [partial(attempts.attempt, 0), partial(attempts.stubborn, 1)]
    racing = asyncio.create_task(first(ways, stagger_s=STAGGER_S, discard=attempts.discarded.append))
    await clock.passes(1.1 * STAGGER_S)
    if in_time:
        attempts.outcomes[0].set_result("in time")
        await asyncio.sleep(0)  # the attempt has ended, and the race doesn't know yet
    racing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await racing
    await clock.passes(0.0)
    assert attempts.discarded == (["in time"] if in_time else []) + ["in spite of it"]


@pytest.mark.parametrize("late", [True, False])
@plays(timed)
async def test_a_result_at_the_moment_of_the_end_is_discarded(clock: ByHand, late: bool) -> None:
    """The caller is cancelled, or its deadline passes, as the attempt succeeds in spite of its own cancellation."""
    attempts = Attempts(1)
    waiting = asyncio.create_task(within(1.0, attempts.stubborn(0), discard=attempts.discarded.append))
    await clock.passes(0.9)
    await clock.passes(0.2) if late else waiting.cancel()
    with pytest.raises(asyncio.TimeoutError if late else asyncio.CancelledError):
        await waiting
    await clock.passes(0.0)
    assert attempts.discarded == ["in spite of it"]
