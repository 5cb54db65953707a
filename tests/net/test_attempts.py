"""The first of several attempts that succeeds counts, and nothing is left of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

import pytest

from p2p_diloco.net.attempts import first, within
from p2p_diloco.net.dht import DhtPeer
from tests.net.clocks import ByHand, timed
from tests.net.patience import plays

STAGGER_S = 1.0


class Attempts:
    """Attempts that a test ends one by one."""

    def __init__(self, count: int) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.discarded: list[str] = []
        self.failures: list[str] = []
        self.outcomes = [asyncio.get_running_loop().create_future() for _ in range(count)]

    async def attempt(self, number: int) -> str:
        self.begun.append(number)
        try:
            return str(await self.outcomes[number])
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise

    async def stubborn(self, number: int) -> str:
        """The same, with a result in spite of a cancellation."""
        try:
            return await self.attempt(number)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            return "in spite of it"

    def first(self) -> Coroutine[Any, Any, str]:
        return first(
            [partial(self.attempt, number) for number in range(len(self.outcomes))],
            stagger_s=STAGGER_S,
            discard=self.discarded.append,
            failed=lambda error: self.failures.append(str(error)),
        )


@plays(timed)
async def test_of_two_that_succeed_at_once_the_earlier_counts(clock: ByHand) -> None:
    """The result of the other one is discarded; a failure at the same moment doesn't matter."""
    for _ in range(20):  # the order of a set may vary
        attempts = Attempts(4)
        racing = asyncio.create_task(attempts.first())
        for _ in range(3):
            await clock.passes(1.1 * STAGGER_S)
        assert attempts.begun == [0, 1, 2, 3]
        attempts.outcomes[1].set_exception(OSError("no"))
        for number in (0, 2, 3):
            attempts.outcomes[number].set_result(str(number))
        assert await racing == "0"
        await clock.passes(0.0)
        assert attempts.discarded == ["2", "3"]
        assert attempts.failures == []


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


@pytest.mark.parametrize("how", ["cancelled", "late"])
@plays(timed)
async def test_a_result_at_the_moment_of_the_end_is_discarded(clock: ByHand, how: str) -> None:
    """The caller is cancelled, or its deadline passes, as the attempt succeeds in spite of its own cancellation."""
    attempts = Attempts(1)
    waiting = asyncio.create_task(within(1.0, attempts.stubborn(0), discard=attempts.discarded.append))
    await clock.passes(0.9)
    if how == "cancelled":
        waiting.cancel()
    else:
        await clock.passes(0.2)
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else asyncio.TimeoutError):
        await waiting
    await clock.passes(0.0)
    assert attempts.discarded == ["in spite of it"]


@pytest.mark.parametrize("outcome", ["a result", "an error"])
@plays(timed)
async def test_a_cancellation_at_the_moment_of_the_outcome_is_not_lost(clock: ByHand, outcome: str) -> None:
    """The attempt has ended, and its caller is cancelled before it goes on: the caller ends, whatever the outcome."""
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def asked() -> str:
        return await answer

    waiting = [asyncio.create_task(within(1.0, each)) for each in (asked(), answer)]
    await clock.passes(0.5)
    if outcome == "a result":
        answer.set_result("it")
    else:
        answer.set_exception(ValueError("it"))
    await asyncio.sleep(0)  # the attempt itself goes on
    for task in waiting:
        task.cancel()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in ended] == [asyncio.CancelledError] * 2


@plays(timed)
async def test_a_peer_that_reads_or_stores_a_record_can_be_cancelled_at_any_moment(clock: ByHand) -> None:
    """Also as the DHT's answer comes: a peer that is to end would go on otherwise."""
    loop = asyncio.get_running_loop()
    for what in ("fetch", "store"):
        answer: asyncio.Future[object] = loop.create_future()
        dht = DhtPeer.__new__(DhtPeer)
        dht._node = AnswersLater(answer)
        dht._anchors = AnswersLater(answer)
        dht._records = AnswersLater(answer)
        calling = dht.fetch("key") if what == "fetch" else dht.store("key", "name", b"value", 9.0, owned=False)
        task = asyncio.create_task(calling)
        await clock.passes(0.5)
        answer.set_result(None)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class AnswersLater:
    """A node of Hivemind's DHT whose calls return what a future gets."""

    local_public_key = b""

    def __init__(self, answer: asyncio.Future[object]) -> None:
        self._answer = answer

    async def get(self, *_: object, **__: object) -> object:
        return await self._answer

    store = fetch = get
