"""Where a trainer's time goes, by a clock that a test sets, and what is told of its GPU's memory."""

from __future__ import annotations

import time
from dataclasses import astuple
from types import SimpleNamespace

import pytest

from p2p_diloco.peer import hook as hook_module
from p2p_diloco.peer.hook import Hook
from tests.peer.scripted import hooked, step, taking


def every_time(hook: Hook) -> dict[str, float]:
    return hook.standing.metrics.totals()


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_where_the_time_goes(overlap_steps: int) -> None:
    """Every second of training is one part's: what the trainer does is its own, the wait for the others is told apart
    by the node, and what the node doesn't tell is the group's. The hidden parts come beside. Steps take 1 s, pauses 99.
    """
    clock = SimpleNamespace(now=1000.0)
    hook, node, model = hooked(clock=lambda: clock.now, overlap_steps=overlap_steps, merge="rebase")
    node.stood = {"codec": 0.25, "transfer": 1.0, "outer_step": 0.5, "group": 0.25}
    node.hidden = {"codec": 0.125, "transfer": 1.5, "outer_step": 0.0, "group": 0.375} if overlap_steps else {}
    hook._local.write_delta = taking(clock, 0.5, hook._local.write_delta)  # type: ignore[method-assign]
    hook._local.merge = taking(clock, 0.25, hook._local.merge)  # type: ignore[method-assign]
    node.wait_for = taking(clock, 4.0, node.wait_for)  # type: ignore[method-assign]
    began = clock.now
    for _ in range(8 + overlap_steps):
        clock.now += 1.0
        step(hook, model)
        with hook.beside():
            clock.now += 99.0
    times, merges = every_time(hook), 5  # at the first step, before and after each exchange
    assert times["inner_time_s"] == 8 + overlap_steps
    assert times["paused_time_s"] == 99.0 * (8 + overlap_steps)
    assert (times["pseudo_gradient_time_s"], times["merge_time_s"]) == (2 * 0.5, merges * 0.25)
    assert (times["codec_time_s"], times["transfer_time_s"], times["outer_step_time_s"]) == (0.5, 2.0, 1.0)
    assert times["group_time_s"] == 2 * (4.0 - 1.75)
    assert times["waiting_time_s"] == clock.now - began - times["inner_time_s"] - times["paused_time_s"]
    assert times["hidden_time_s"] == (4.0 if overlap_steps else 0.0)
    assert times["hidden_transfer_time_s"] == (3.0 if overlap_steps else 0.0)
    assert times["total_sync_time_s"] == times["waiting_time_s"] - 0.25 + times["hidden_time_s"]
    assert node.memory.last_round is not None
    *seconds, ended = astuple(node.memory.last_round)
    assert seconds == [4.0, 0.75, 2.25, 1.0, 0.5, 0.5, 2.0 if overlap_steps else 0.0]
    assert ended == pytest.approx(time.time(), abs=600.0)


def test_an_exchange_that_never_began_hides_nothing() -> None:
    """The wait for it is time that training stood still; what the node did meanwhile was no exchange."""
    clock = SimpleNamespace(now=0.0)
    hook, node, model = hooked(clock=lambda: clock.now)
    node.wait_for = taking(clock, 4.0, node.wait_for)  # type: ignore[method-assign]
    node.releases, node.stood = [False, True], {"codec": 1.0}
    step(hook, model, 4)
    assert every_time(hook)["hidden_time_s"] == 0.5  # of the second one
    assert (every_time(hook)["codec_time_s"], every_time(hook)["group_time_s"]) == (2.0, 6.0)
    assert every_time(hook)["total_sync_time_s"] == 4.5


def test_the_log_tells_now_and_then_where_the_time_went(caplog: pytest.LogCaptureFixture) -> None:
    """The first round, then one a minute at most."""
    clock = SimpleNamespace(now=0.0)
    hook, _, model = hooked(clock=lambda: clock.now, sync_every=1)
    with caplog.at_level("INFO", logger="p2p_diloco"):
        for _ in range(8):
            clock.now += 20.0
            step(hook, model)
    assert [message.split(":")[0] for message in caplog.messages] == [
        f"round {number} took 20.00 s" for number in (1, 4, 7)
    ]
    assert "inner 100.0%, encode 0.0%" in caplog.messages[0]


def test_the_node_is_told_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every step: the question takes some time."""
    told: list[tuple[int, int]] = []

    def reserved() -> tuple[int, int]:
        told.append((len(told) + 1, 80))
        return told[-1]

    monkeypatch.setattr(hook_module, "memory_reserved", reserved)
    hook, node, model = hooked()
    assert (node.memory.gpu_reserved, node.memory.gpu_total) == (0, 0)
    for steps in range(1, 13):
        step(hook, model)
        assert len(told) == steps // 4
    assert (node.memory.gpu_reserved, node.memory.gpu_total) == (3, 80)
