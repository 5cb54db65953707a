"""Whole runs: processes of their own, real streams on loopback, numbers known beforehand."""

from __future__ import annotations

import itertools
import math
import signal
import time
from typing import Any

import pytest
from swarm import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


def test_fragments_in_bf16_follow_the_schedule(swarm: Any, run_config: dict[str, Any]) -> None:
    """Two fragments are sent in turn, each with the progress since its own last exchange; powers of two stay exact.

    μ=0, η=1: each exchange subtracts the mean pseudo-gradient, 2 (1 and 3), of the fragment that is due.
    """
    config = {
        **run_config, "codec": "bf16", "num_fragments": 2, "outer_momentum": 0.0, "start_peers": 2,
        "stop_after_epochs": 3,
    }  # fmt: skip
    options = {"params": {"u": 4, "v": 4}, "dtype": "bfloat16"}
    peers = [swarm.start("a", 1.0, config=config, **options), swarm.start("b", 3.0, config={}, **options)]
    ends = [peer.wait_for("finished") for peer in peers]
    assert ends[0]["digest"] == ends[1]["digest"]
    for peer in peers:
        lines = {line["epoch"]: line for line in peer.said if line["what"] == "epoch"}
        # Fragment 0 is sent after 1, 3 and 5 inner steps, with 1, 2 and 2 steps of progress, in the mean 1 each.
        assert [lines[e]["theta"]["v"][0] for e in (1, 2, 3)] == [-2.0, -4.0, -6.0]
        assert [lines[e]["theta"]["u"][0] for e in (1, 2, 3)] == [-1.0, -3.0, -5.0]


def test_the_default_device_is_the_scripts_own(swarm: Any, run_config: dict[str, Any]) -> None:
    """A script that calls `torch.set_default_device("cuda")` before it enters exchanges as any other. Here the default
    device is one whose tensors have no values, so a tensor that the peer makes there by mistake is an error.
    """
    config = {**run_config, "codec": "bf16", "num_fragments": 2, "start_peers": 2, "stop_after_epochs": 3}
    options = {"kind": "tied", "default_device": "meta"}
    peers = [swarm.start("a", 1.0, config=config, **options), swarm.start("b", 3.0, config={}, **options)]
    ends = [peer.wait_for("after") for peer in peers]
    assert [peer.status() for peer in peers] == [0, 0]
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["theta"] == ends[1]["theta"]


def test_an_aggregator_without_a_model(swarm: Any, run_config: dict[str, Any]) -> None:
    """`Peer(None, None)` learns the model's layout from the run, follows it to its end, and agrees to the bit."""
    a = swarm.start("a", 1.0, config={**run_config, "stop_after_epochs": 80}, step_s=1.0)
    helper = swarm.start("helper", aggregator=True, config={})
    assert helper.wait_for("in")["epoch"] < 80
    a.tell("")
    ends = [peer.wait_for("finished") for peer in (a, helper)]
    assert ends[0]["digest"] == ends[1]["digest"]
    assert [peer.status() for peer in (a, helper)] == [0, 0]


def test_a_joiner_with_another_base_and_the_same_data_is_warned(swarm: Any, run_config: dict[str, Any]) -> None:
    """Frozen values that differ from the founder's, and contributions that are the same bytes, are told in the log; the
    run goes on."""
    config = {**run_config, "start_peers": 2, "stop_after_epochs": 2}
    a = swarm.start("a", 1.0, config=config, frozen=1.0)
    b = swarm.start("b", 1.0, config={}, frozen=2.0)
    for peer in (a, b):
        peer.wait_for("finished")
        assert peer.status() == 0
    assert a.wait_for("in")["seed"] != b.wait_for("in")["seed"]
    said = a.log() + b.log()
    assert said.count("this model's frozen parameters or buffers differ from the founder's") == 1
    assert "contribute the same bytes, so one of them is useless" in said


def test_force_sync_brings_everyone(swarm: Any, run_config: dict[str, Any]) -> None:
    """`force_sync` makes an exchange of the whole model at once, though nothing would be due for long."""
    config = {**run_config, "sync_every": 1000, "num_fragments": 2, "start_peers": 2}
    params = {"u": 2, "v": 2}
    a = swarm.start("a", 1000.0, config=config, step_s=0.02, params=params, force_at=50)
    b = swarm.start("b", 1000.0, config={}, step_s=0.02, params=params)
    assert a.wait_for("forced")["epoch"] == 1
    lines = [peer.wait_for("epoch", epoch=1) for peer in (a, b)]
    assert lines[0]["digest"] == lines[1]["digest"]


@pytest.mark.parametrize("after_s", [0.2, pytest.param(0.7, marks=pytest.mark.chaos), 1.2])
def test_nothing_is_left_behind_by_a_trainer_killed_early(
    swarm: Any, run_config: dict[str, Any], after_s: float
) -> None:
    """Whenever during its start a trainer is killed with SIGKILL, its node and the libp2p daemon end with it."""
    swarm.addresses = ["unused"]  # it is not waited for
    trainee = swarm.start("a", config=run_config, initial_peers=[], fresh=True)
    until(lambda: len(trainee.family()) > 1, 180.0, "a node that was started")
    time.sleep(after_s)
    assert len(trainee.family()) > 1
    trainee.signal(signal.SIGKILL)
    trainee.status()
    swarm.gone()


def test_a_peer_that_diverges_once_harms_no_other(swarm: Any, run_config: dict[str, Any]) -> None:
    """A NaN in one trainer is that peer's loss alone: the others go on at their pace, and it takes part again."""
    config = {**run_config, "start_peers": 3, "round_timeout": 60.0, "heartbeat_timeout": 40.0}
    a = swarm.start("a", 1.0, config=config, step_s=0.05)
    b = swarm.start("b", 1.0, config={}, step_s=0.05)
    c = swarm.start("c", 1.0, config={}, step_s=0.05, nan_at=21)
    for peer in (b, c):
        assert peer.wait_for("epoch", epoch=40)["digest"] == a.wait_for("epoch", epoch=40)["digest"]
    for peer in (a, b):
        times = [line["time"] for line in peer.said if line["what"] == "epoch" and line["epoch"] <= 40]
        rounds_s = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert max(rounds_s) < 20.0  # no timeout was waited for
    assert all(math.isfinite(value) for line in c.said if line["what"] == "epoch" for value in line["values"])


@pytest.mark.chaos
def test_a_frozen_trainer_is_not_waited_for(swarm: Any, run_config: dict[str, Any]) -> None:
    """A trainer that stops making steps is idle after the heartbeat timeout; once back, it takes part again."""
    config = {**run_config, "heartbeat_timeout": 2.0}
    a = swarm.start("a", 1.0, config=config, step_s=0.02)
    b = swarm.start("b", 1.0, config={}, step_s=0.02)
    b.wait_for("epoch")
    b.signal(signal.SIGSTOP)
    reached = max(line["epoch"] for line in a.said if line["what"] == "epoch")
    a.wait_for("epoch", 60.0, epoch=reached + 10)
    b.signal(signal.SIGCONT)
    reached = max(line["epoch"] for line in a.said if line["what"] == "epoch")

    def told(peer: Any) -> set[tuple[int, str]]:
        lines = [line for line in peer.said if line["what"] == "epoch"]
        return {(line["epoch"], line["digest"]) for line in lines if line["epoch"] > reached}

    give_up_at = time.monotonic() + 60.0
    while len(told(a) & told(b)) < 10:  # before it is one of the group again, its node may be ahead of what it tells
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
