"""Peers that leave before an exchange is due, in processes of their own: what becomes of their steps.

H is far above the number of steps, so that only the last exchange counts them. With delta = H each step takes 1 off.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

LONG = {"sync_every": 1000, "outer_momentum": 0.0}
"""η=1, μ=0: an exchange subtracts the mean pseudo-gradient."""


def after(trainee: Any) -> dict[str, Any]:
    """What the script reads from its peer after the `with` block; it must end without an error."""
    line: dict[str, Any] = trainee.wait_for("after")
    assert trainee.status() == 0
    return line


@pytest.mark.parametrize("settings", [{}, {"overlap_steps": 3}, {"num_fragments": 2}, {"mode": "async"}])
def test_a_script_shorter_than_h_trains_the_global_model(
    swarm: Any, run_config: dict[str, Any], settings: dict[str, Any]
) -> None:
    """A peer alone makes 5 of 1000 steps and leaves: the run has them, and `global_state_dict()` has them after the
    block."""
    config = {**run_config, **LONG, **settings}
    line = after(swarm.start("a", 1000.0, config=config, steps=5, params={"u": 4, "v": 4}))
    assert line["theta"] == {"u": [-5.0] * 4, "v": [-5.0] * 4}
    assert line["epoch"] == 1


def test_peers_that_end_at_the_same_time_leave_with_one_state(swarm: Any, run_config: dict[str, Any]) -> None:
    """Two peers make 40 steps each and leave. All steps are counted, and the last to leave has the result of both."""
    config = {**run_config, **LONG, "start_peers": 2}
    peers = [swarm.start("a", 1000.0, config=config, steps=40), swarm.start("b", 3000.0, config={}, steps=40)]
    ends = [after(peer) for peer in peers]
    assert {line["steps"] for line in ends} == {40}
    assert min(line["theta"]["w"][0] for line in ends) == -80.0  # the mean of 40 and 120


def test_those_who_stay_go_on_with_the_steps_of_the_one_that_left(swarm: Any, run_config: dict[str, Any]) -> None:
    """A peer that leaves in the middle of a round has the others exchange at their next step."""
    config = {**run_config, **LONG, "start_peers": 2}
    a = swarm.start("a", 1000.0, config=config, step_s=0.02)
    b = swarm.start("b", 1000.0, config={}, step_s=0.02, steps=30)
    line = after(b)
    assert line["epoch"] == 1
    assert a.wait_for("epoch", epoch=1)["digest"] == line["digest"]


def test_a_last_exchange_that_cannot_be_made_is_given_up(swarm: Any, run_config: dict[str, Any]) -> None:
    """A run that lacks its peers commits nothing. Leaving waits for `exit_timeout`, names the lost steps, and the
    script ends normally. After an exception the peer leaves at once."""
    config = {**run_config, **LONG, "min_peers": 2}
    a = swarm.start("a", 1000.0, config=config, steps=5, local={"exit_timeout": 2.0})
    assert after(a)["epoch"] == 0
    assert "5 of this peer's inner steps are in no commit" in a.log()
    assert "exit_timeout=2 has passed" in a.log()
    assert "global_state_dict() at epoch 0" in a.log()
    options = {"config": {**run_config, **LONG}, "initial_peers": [], "run_id": "other", "fails": "an own error"}
    b = swarm.start("b", 1000.0, steps=7, **options)
    assert b.status() == 1
    assert "7 of this peer's inner steps are in no commit, so the run goes on without them: RuntimeError" in b.log()


def test_a_peer_that_trained_alone_leaves_its_state_to_the_next(swarm: Any, run_config: dict[str, Any]) -> None:
    """The script of the first peer is over before the second one starts. The node of the first keeps the state and says
    so; the second goes on from it. Both end normally, and neither result is from a model begun twice."""
    swarm.bootstrap()
    first = swarm.start("first", config=run_config, steps=6, local={"exit_timeout": 200.0})
    first.wait_for_log("has trained the run")
    second = swarm.start("second", config=run_config, steps=6)
    ends = [after(peer) for peer in (first, second)]
    assert [line["epoch"] for line in ends] == [3, 6]
    assert "founded the run" not in second.log()
    assert "has trained the run" not in second.log()


def test_a_peer_does_not_stay_where_nobody_can_come(swarm: Any, run_config: dict[str, Any]) -> None:
    """A peer that began a swarm of its own takes the swarm with it, so it leaves at once."""
    alone = swarm.start("alone", config=run_config, steps=4)
    after(alone)
    assert "has trained the run" not in alone.log()
