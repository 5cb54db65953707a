"""A peer that leaves: its last exchange, its warnings, the global parameters after that, and how long the node of a
peer that has trained alone keeps the run's state. The node is scripted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError, NodeDied
from p2p_diloco.peer.leaving import AT_ONCE_S, LOOK_EVERY_S, broken_off, leave, stay
from tests.peer.scripted import KEPT, ScriptedNode, hooked, step


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings on lost steps so far."""
    return [record.getMessage() for record in caplog.records if "in no commit" in record.getMessage()]


def leaves(hook: Any, why: str = "", **local: Any) -> None:
    leave(hook, PeerConfig(**local), why)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"overlap_steps": 1}, {"mode": "async"}])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_normal_end_exchanges_all_uncounted_steps(
    fragments: int, settings: dict[str, Any], steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After the last exchange every step is counted in every fragment, without a warning, and the model has the global
    parameters. So it is in both modes, with fragments, and while an exchange is under way."""
    hook, node, model = hooked(fragments=fragments, merge="rebase", **settings)
    if "mode" in settings:
        node.asynchronous = {"staleness": 0, "refused": 0}
    step(hook, model, steps)
    assert hook.uncounted
    leaves(hook)
    assert hook.uncounted == 0
    assert node.memory.theta.tolist() == [float(steps)] * 4
    assert model.u.tolist() == model.v.tolist() == [float(steps)] * 2
    assert warnings(caplog) == []


def test_the_last_exchange_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """No wait is longer than `exit_timeout`. Then a warning names the number of steps, the setting and the mend, and
    leaving goes on."""
    hook, node, model = hooked()
    step(hook, model, 3)
    node.releases = [None]
    leaves(hook, exit_timeout=7.0)
    (warning,) = warnings(caplog)
    assert warning.startswith("3 of this peer's inner steps")
    assert "exit_timeout=7 has passed" in warning
    assert "force_sync()" in warning
    assert 0 < node.waited_s[-1] <= 7.0


def test_progress_that_rounds_do_not_count_is_offered_again_and_then_named(caplog: pytest.LogCaptureFixture) -> None:
    """If the group closes its round without this peer, the peer tries again, a few times, and then warns."""
    hook, node, model = hooked()
    node.fate = KEPT
    step(hook, model, 3)
    leaves(hook)
    assert len(node.contributed()) == 3
    assert "no round has counted them" in warnings(caplog)[0]


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (KeyboardInterrupt(signal.SIGINT), "^C skipped"),
        (NodeDied("the node was killed"), "the node was killed"),
        (KeyboardInterrupt(signal.SIGTERM), None),
    ],
)
def test_a_last_exchange_that_is_interrupted_or_fails_is_skipped(
    raised: BaseException, told: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """^C skips the wait with a warning, as an error of the node ends it, and the program goes on. A signal that ends
    programs still does."""

    def fail(*_: object, **__: object) -> None:
        raise raised

    hook, _, model = hooked()
    step(hook, model, 3)
    monkeypatch.setattr(ScriptedNode, "wait_for", fail)
    with nullcontext() if told else pytest.raises(KeyboardInterrupt):
        leaves(hook)
    assert told is None or told in warnings(caplog)[0]


def test_lost_steps_are_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Also if the node has ended, as when an invitation expires."""

    def fail() -> None:
        raise NodeDied("invite=frank has expired")

    hook, _, model = hooked()
    step(hook, model, 3)
    monkeypatch.setattr(hook, "keep_values", fail)
    leaves(hook, "an error ended training")
    (warning,) = warnings(caplog)
    assert "an error ended training: invite=frank has expired" in warning


@pytest.mark.parametrize(
    ("why", "local", "warns"),
    [
        ("KeyError ended training", {}, True),
        ("KeyError ended training", {"on_exit": "drop"}, False),
        ("", {"on_exit": "warn"}, True),
        ("", {"on_exit": "drop"}, False),
    ],
)
def test_without_a_last_exchange_uncounted_steps_are_named(
    why: str, local: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """After an exception, or with `on_exit="warn"`, nothing is exchanged or waited for, and the warning has the number
    of steps. `on_exit="drop"` says nothing."""
    hook, node, model = hooked()
    step(hook, model, 3)
    leaves(hook, why, **local)
    assert node.contributed() == []
    assert [warning.split()[0] for warning in warnings(caplog)] == ["3"] * warns
    assert all((why or "on_exit=warn") in warning for warning in warnings(caplog))
    assert node.answer_s == (AT_ONCE_S if why else 60.0)  # a node that hangs is given up soon


def test_after_the_runs_end_there_is_nothing_to_count(caplog: pytest.LogCaptureFixture) -> None:
    """A run that has ended counts no more progress: no exchange, no warning, and the model gets the last state."""
    hook, node, model = hooked()
    step(hook, model, 4)
    node.memory.finished = 1
    with torch.no_grad():
        model.u.add_(9.0)
    node.memory.steps += 1
    leaves(hook)
    assert len(node.contributed()) == 1
    assert model.u.tolist() == node.memory.theta[:2].tolist()
    assert warnings(caplog) == []


def test_which_ends_are_normal() -> None:
    """The end of the block and `sys.exit()` are normal. Exceptions, signals and failing exits are not."""
    assert broken_off(None) == broken_off(SystemExit()) == broken_off(SystemExit(0)) == ""
    for error in (SystemExit(1), SystemExit("wrong"), KeyboardInterrupt(), ValueError(), ConfigError("is wrong")):
        assert "ended training" in broken_off(error)
    assert broken_off(SystemExit(143)) == "SIGTERM ended training"
    assert broken_off(SystemExit(129)) == "SIGHUP ended training"


# -- staying


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


def test_a_peer_alone_stays_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    # A peer alone stays until another has the state or for a limited time. It says first what it waits for and
    # how to skip it, and leaves as soon as another peer has the state. If nobody comes, the last warning says so,
    # and how a run waits for a second peer.
    assert stays([False, False, True]) == 2 * LOOK_EVERY_S
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all(part in warning for part in ("trained the run main alone", "exit_timeout=60 s", "^C"))
    assert stays([]) == 60.0
    assert "start_peers=2" in caplog.messages[-1]

    # An interrupt or a fault of the node ends the stay. ^C skips it, and the program goes on. A signal that ends
    # programs still does.
    def interrupted(number: int) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            raise KeyboardInterrupt(number)

        return sleep

    assert stays([False, NodeDied("it was killed")]) == LOOK_EVERY_S
    assert stays([], interrupted(signal.SIGINT)) == 0.0
    with pytest.raises(KeyboardInterrupt):
        stays([], interrupted(signal.SIGTERM))
