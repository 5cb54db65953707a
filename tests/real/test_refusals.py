"""A peer that doesn't fit a run is refused with the reason, without harm to others; two runs in one swarm don't mix."""

from __future__ import annotations

import pytest
from swarm import Member, Swarm, agree

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

CONFIG = {"sync_every": 4, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "start_peers": 2}
CONFIG["heartbeat_timeout"] = 30.0  # a machine that stands still for a while does not count as dead


def test_two_runs_on_one_bootstrap_and_peers_that_fit_neither(swarm: Swarm) -> None:
    """Each run has its own peers, model and numbers; different settings are named with both values, different
    parameters with both shapes, each with its exit status, while the runs go on."""
    swarm.bootstrap()
    ones = [swarm.start(n, run_id="ones", config=CONFIG, step_s=0.02, delta=1.0) for n in "ab"]
    threes = [
        swarm.start(
            n, run_id="threes", config={**CONFIG, "sync_every": 2}, params={"v": [2, 5]}, step_s=0.02, delta=3.0
        )
        for n in "cd"
    ]
    ones[0].wait_for("in")
    settings = swarm.start("s", run_id="ones", config={"sync_every": 8, "codec": "bf16", "outer_momentum": 0.5})
    shapes = swarm.start("p", run_id="ones", params={"w": [2, 3], "more": [4]})
    told(settings, "ConfigMismatch", 5, "sync_every (the run's 4 / yours 8)", "codec (the run's fp32 / yours bf16)")
    assert "outer_momentum" not in settings.last("error")["sentence"]  # it may change while a run goes on
    told(shapes, "ModelMismatch", 6, "w: 3 in the run, 2x3 here", "more: not in the run, 4 here")
    for peers, delta, every in ((ones, 1.0, 4), (threes, 3.0, 2)):
        for peer in peers:
            line = peer.epoch(peer.reached() + 5)
            assert line["peers"] == 2
            assert line["value"] == pytest.approx(-delta * line["epoch"], rel=1e-5)
            assert line["step"] == every * line["epoch"]
        agree(peers)


def told(member: Member, kind: str, status: int, *texts: str) -> None:
    """The peer ended with this error and exit status, and its sentence contains these texts."""
    error = member.wait_for("error")
    assert error["kind"] == kind
    assert all(text in error["sentence"] for text in texts), error["sentence"]
    assert member.status() == status
