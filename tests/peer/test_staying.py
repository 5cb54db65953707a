"""A peer that leaves after it has trained alone: how long its node keeps the run's state. The node is scripted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_diloco.errors import NodeDied
from p2p_diloco.peer.leaving import LOOK_EVERY_S, stay


def stays(answers: Iterable[bool | BaseException], sleep: Callable[[float], None] | None = None) -> float:
    """Stay for 60 s beside a node that gives these answers; returns the seconds that passed."""
    clock, script = SimpleNamespace(now=0.0), iter(answers)

    def passes(seconds: float) -> None:
        clock.now += seconds

    def ask(kind: str, answer: str) -> dict[str, Any]:
        found = next(script, False)
        if isinstance(found, BaseException):
            raise found
        return {"shared": found}

    stay(SimpleNamespace(ask=ask), "main", 60.0, lambda: clock.now, sleep or passes)  # type: ignore[arg-type]
    return float(clock.now)


def test_a_peer_alone_stays_until_another_has_the_state(caplog: pytest.LogCaptureFixture) -> None:
    """It says first what it waits for and how to skip it, and leaves as soon as another peer has the state."""
    assert stays([False, False, True]) == 2 * LOOK_EVERY_S
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "trained the run main alone" in warning
    assert "exit_timeout=60 s" in warning
    assert "^C" in warning


def test_a_peer_alone_stays_for_a_limited_time(caplog: pytest.LogCaptureFixture) -> None:
    """If nobody comes, the second warning says so, and how a run waits for a second peer."""
    assert stays([]) == 60.0
    assert "start_peers=2" in caplog.messages[-1]


def test_an_interrupt_ends_the_stay_and_not_the_program() -> None:
    """^C skips it. A signal that ends programs still does."""

    def interrupted(number: int) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            raise KeyboardInterrupt(number)

        return sleep

    assert stays([], interrupted(signal.SIGINT)) == 0.0
    with pytest.raises(KeyboardInterrupt):
        stays([], interrupted(signal.SIGTERM))


def test_a_fault_of_the_node_does_not_keep_a_peer_from_leaving() -> None:
    """An error of the node ends the stay."""
    assert stays([False, NodeDied("it was killed")]) == LOOK_EVERY_S
