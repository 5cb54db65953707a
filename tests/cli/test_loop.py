"""Signals and the event loops of commands."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import pytest

from p2p_diloco.cli.loop import run
from p2p_diloco.interrupts import ENDING


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Handlers that note a signal and raise `KeyboardInterrupt`, as the command line's does."""
    numbers: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        numbers.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ENDING}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[object]:
    """The present handlers of the signals."""
    return [signal.getsignal(number) for number in ENDING]


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_breaks_no_callback_off(received: list[int], number: signal.Signals) -> None:
    """A signal leaves other tasks alone; the work closes its resources, then the signal takes effect."""
    done: list[str] = []
    before = handlers()

    async def bystander() -> None:
        signal.raise_signal(number)
        done.append("a callback of another")

    async def work() -> None:
        beside = asyncio.create_task(bystander())
        try:
            await asyncio.sleep(30)
            done.append("slept on")
        finally:
            await asyncio.sleep(0.01)
            done.append("closed")
            assert beside.exception() is None

    with pytest.raises(KeyboardInterrupt):
        run(work())
    assert done == ["a callback of another", "closed"]
    assert received == [number]
    assert handlers() == before


def test_what_fails_after_a_signal_is_not_told_with_a_traceback(
    received: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """^C in a terminal ends the daemon, too, from which tasks of the library read."""

    async def reads() -> None:
        raise ConnectionResetError("gone")

    async def work() -> None:
        try:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            await asyncio.sleep(30)
        finally:
            beside = asyncio.create_task(reads())
            await asyncio.sleep(0)
            del beside
            gc.collect()

    with pytest.raises(KeyboardInterrupt):
        run(work())
    assert [each for each in caplog.records if each.levelno > logging.DEBUG] == []


def test_a_second_signal_ends_the_closing_too(received: list[int]) -> None:
    """A close that takes long is broken off; the first signal is the one that counts."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        try:
            loop.call_soon(signal.raise_signal, signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            loop.call_soon(signal.raise_signal, signal.SIGINT)
            await asyncio.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        run(work())
    assert received == [signal.SIGTERM]


def test_without_a_signal_it_returns_or_raises(received: list[int]) -> None:
    """As `asyncio.run` does, and signals do what they did."""
    before = handlers()

    async def work(number: int) -> int:
        await asyncio.sleep(0)
        return 7 // number

    assert run(work(1)) == 7
    with pytest.raises(ZeroDivisionError):
        run(work(0))
    assert handlers() == before
    assert received == []


def test_what_is_ignored_stays_ignored() -> None:
    """A shell's background job has no SIGINT, `nohup` none of its own; the loop gives it none."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:

        async def work() -> str:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0.01)
            return "went on"

        assert run(work()) == "went on"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
