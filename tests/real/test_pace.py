"""Peers of unlike speed in one synchronous run, paced by time: real processes that sleep between their steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
from swarm import START_S, Member, Swarm, agree

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

H, STEP_S = 20, 0.1
SPEEDS = {"a": 1.0, "b": 0.5, "c": 0.2}
CHANGES = 10
"""From this epoch on the fastest peer is as slow as the second one."""
ROUNDS = 17
SETTLED = 3
"""Rounds until all know of each other's speeds."""
WAITING_MAX = 0.25
"""Of a peer's time, all exchanges included, on a machine that does other things too; with one H for all the fastest
stands still for 0.8 of it."""
CONFIG = {
    "sync_every": H,
    "pace": "time",
    "start_peers": len(SPEEDS),
    "heartbeat_interval": 0.25,
    "heartbeat_timeout": 30.0,
    "stop_after_epochs": ROUNDS,
}


def steps(member: Member, rounds: Sequence[int]) -> float:
    """The median of a member's inner steps in these rounds."""
    local = {line["epoch"]: line["local"] for line in member.lines("epoch")}
    return statistics.median(local[epoch + 1] - local[epoch] for epoch in rounds)


def waiting(member: Member, first: int, last: int) -> float:
    """The share of its time between two epochs for which a member's training stood still."""
    lines = {line["epoch"]: line for line in member.lines("epoch")}
    waited_s, took_s = (lines[last][key] - lines[first][key] for key in ("waiting_s", "time"))
    return float(waited_s / took_s)


def test_unlike_peers_share_rounds_by_time(swarm: Swarm) -> None:
    """Speeds 1 : 0.5 : 0.2: steps are in proportion, no trainer stands still for long, all hold the same model. When
    the fastest becomes half as fast, the others' rounds are twice as long from the third round on."""
    swarm.bootstrap()
    slower = {"epoch": CHANGES, "step_s": STEP_S / SPEEDS["b"]}
    members = [
        swarm.start(name, config=CONFIG, step_s=STEP_S / speed, **({"changes": slower} if name == "a" else {}))
        for name, speed in SPEEDS.items()
    ]
    for member in members:
        member.wait_for("finished", START_S)
    agree(members, epoch=1)
    before, after = range(SETTLED, CHANGES - 1), range(CHANGES + 2, ROUNDS - 1)
    a, b, c = (steps(member, before) for member in members)
    assert H * 0.8 <= a <= H
    assert 0.35 <= b / a <= 0.65
    assert 0.1 <= c / a <= 0.3
    a, b, c = (steps(member, after) for member in members)
    assert min(a, b) >= H * 0.75
    assert 0.3 <= c / a <= 0.5
    shares = {member.name: waiting(member, SETTLED, CHANGES) for member in members}
    assert max(shares.values()) <= WAITING_MAX, shares
    progress = [line["step"] for line in members[2].lines("epoch")]
    assert progress == sorted(progress)
    assert all(line["step"] >= H * line["epoch"] for line in members[2].lines("epoch"))
