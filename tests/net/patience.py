"""Waiting in tests: bounded, and with deadlines that no busy machine misses."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import psutil
import pytest


def run(test: Awaitable[None], within_s: float = 100.0) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test, within_s)

    asyncio.run(bounded())


def leaving_nothing(test: Coroutine[Any, Any, None]) -> None:
    """Run a test in a loop of its own; afterwards no task, thread or file may be left of it."""

    async def alone() -> None:
        await test
        await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(asyncio.sleep(0))  # uvloop's first loop opens files that stay
    threads, files = threading.active_count(), psutil.Process().num_fds()
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(alone())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
    gc.collect()
    assert threading.active_count() <= threads
    assert psutil.Process().num_fds() <= files


async def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    """Wait until the condition holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not condition():
        assert loop.time() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.005)


def be_patient(monkeypatch: pytest.MonkeyPatch, *, real: bool) -> None:
    """A payload waits for its direct connection, that for its handshake, and a joiner for its initial peers' answers,
    however busy this machine is."""
    monkeypatch.setattr("p2p_diloco.net.direct.PATIENCE_PART", 6.0)
    monkeypatch.setattr("p2p_diloco.net.direct.DIAL_S", 30.0)
    monkeypatch.setattr("p2p_diloco.net.listener.HANDSHAKE_S", 30.0)
    if real:
        monkeypatch.setattr("p2p_diloco.net.daemon.DIAL_S", 20.0)
        monkeypatch.setattr("p2p_diloco.net.dht.RPC_S", 14.0)


def awaited(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A decorator for a test that is a coroutine function: it gets a loop of its own."""
    return plays(lambda test: asyncio.run(test()), 0)(test)


def plays(
    player: Callable[..., None], given: int = 1
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """A decorator for a test that is a coroutine function and is played by `player`. That passes the first `given`
    arguments; the others are fixtures."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def played(**fixtures: Any) -> None:
            player(functools.partial(test, **fixtures))

        parameters = list(inspect.signature(test).parameters.values())[given:]
        played.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return played

    return decorate
