"""Any peer may die at any moment of a round: the others commit again soon, and stay equal to the bit.

One run of three peers goes through all of these tests; each dead peer is replaced by a newcomer. The model has two
slices, so that a round has a leader, and one or two owners. `pytest -s` prints how long each death
delayed the survivors; docs/reliability.md#kills has the figures.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from swarm import Member, Swarm, agree, stall_s, until, usual_round_s

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

INTERVAL_S, TIMEOUT_S = 0.5, 12.0
KILLED_S = 0.75 * TIMEOUT_S
"""The longest delay by a death: less than the heartbeat timeout, because a killed process's connections close."""
FROZEN_S = 1.75 * TIMEOUT_S
ROUNDS = 4
"""Rounds that must be complete before and after each death."""
CONFIG = {
    "sync_every": 4, "outer_lr": 0.5, "codec": "fp32", "start_peers": 3, "heartbeat_interval": INTERVAL_S,
    "heartbeat_timeout": TIMEOUT_S,
}  # fmt: skip
SMALL, LARGE = 300_000, 3_000_000
"""Parameters in each of the two slices: LARGE is for the published figures, and for every moment of a transfer."""


class Trio:
    """A run that is kept at three peers, however many die, each with a pseudo-gradient of 1, 2 or 3."""

    def __init__(self, swarm: Swarm, numel: int) -> None:
        self.swarm, self.born = swarm, 0
        self.training = {"params": {"u": [numel], "v": [numel]}, "step_s": 0.04}
        self.training["config"] = {**CONFIG, "slice_elements": numel}
        self.peers: list[Member] = []
        swarm.bootstrap()

    def filled(self, **last: Any) -> list[Member]:
        """All peers, in rounds of all; the last one is newly started, with these additional options."""
        self.peers = [peer for peer in self.peers if peer.process.poll() is None]
        if len(self.peers) == 3:
            self.peers.pop(0).die()
        while len(self.peers) < 3:
            self.born += 1
            options = last if len(self.peers) == 3 - 1 else {}
            deltas = {"delta": 1.0 + self.born % 3}
            fresh = "sabotage" in options  # the saboteur needs its trainer as its parent
            peer = self.swarm.start(f"p{self.born}", fresh=fresh, **self.training, **deltas, **options)
            self.peers.append(peer)
        newest = self.peers[-1].wait_for("in")["epoch"]
        for peer in self.peers:
            peer.epoch(newest + ROUNDS)
        return self.peers


@pytest.fixture(scope="module")
def trio(shared_swarm: Swarm, request: pytest.FixtureRequest) -> Trio:
    chaos = any(item.get_closest_marker("chaos") for item in request.session.items)
    return Trio(shared_swarm, LARGE if chaos else SMALL)


def observe(survivors: list[Member], at: float, epoch: int, what: str, bound_s: float = KILLED_S) -> None:
    """The survivors make some rounds in time after the death, and agree. Prints, in seconds, how long the next commit
    took, how much longer than usual the longest round was, and the usual length; the slowest peer counts."""
    for peer in survivors:
        rounds = lambda peer=peer: [e for e in peer.lines("epoch", synced=True) if e["time"] > at]  # noqa: E731
        until(lambda rounds=rounds: len(rounds()) >= ROUNDS, 120.0, f"rounds of {peer.name} after epoch {epoch}")
    agree(survivors)
    figures = {
        "to_commit_s": max(min(e["time"] for e in peer.lines("epoch") if e["time"] > at) - at for peer in survivors),
        "stall_s": max(stall_s(peer, at, ROUNDS) for peer in survivors),
        "usual_round_s": usual_round_s(survivors[0], at),
    }
    print(json.dumps({"death": what, **{name: round(value, 2) for name, value in figures.items()}}))
    assert figures["stall_s"] <= bound_s


EVERY_TIME = [("committing", "leader")]
NOW_AND_THEN = [
    ("sending", "contributor"),
    ("sent", "leader"),
    ("training", "leader"),
    ("training", "contributor"),
    ("sending", "leader"),
    ("sent", "contributor"),
    ("committing", "contributor"),
]


@pytest.mark.parametrize(
    ("phase", "role"), [*EVERY_TIME, *(pytest.param(*moment, marks=pytest.mark.chaos) for moment in NOW_AND_THEN)]
)
def test_the_others_go_on_when_a_machine_dies(trio: Trio, tmp_path: Path, phase: str, role: str) -> None:
    """Trainer, node and p2pd of one peer are killed together, at a moment that the node itself recognises."""
    note = tmp_path / "note.json"
    plan = {"role": role, "phase": phase, "after": ROUNDS + 2, "victims": "machine", "note": str(note)}
    *survivors, victim = trio.filled(sabotage=plan)
    assert victim.status(150.0) == -9
    died = json.loads(note.read_text())
    assert died["role"] == role
    observe(survivors, died["time"], died["epoch"], f"machine, {role}, {phase}")


@pytest.mark.parametrize("victims", ["node", pytest.param("trainer", marks=pytest.mark.chaos)])
def test_the_others_go_on_when_half_a_peer_dies(trio: Trio, tmp_path: Path, victims: str) -> None:
    """If a peer's node or trainer is killed, the rest of the peer ends by itself; for the others it is one more
    death, of what was killed."""
    note = tmp_path / "note.json"
    plan = {"role": "leader", "phase": "sent", "after": ROUNDS + 2, "victims": victims, "note": str(note)}
    *survivors, victim = trio.filled(sabotage=plan)
    if victims == "node":
        assert "signal 9" in victim.wait_for("error", 120.0, kind="NodeDied")["sentence"]
    assert victim.status(60.0) == (1 if victims == "node" else -9)
    trio.swarm.gone()
    died = json.loads(note.read_text())
    observe(survivors, died["time"], died["epoch"], f"{victims} alone, leader, sent")
    reason = "can't be reached any more" if victims == "node" else "lost its trainer"
    for survivor in survivors:
        survivor.wait_for_log(reason)


@pytest.mark.chaos
def test_a_frozen_machine_thaws(trio: Trio) -> None:
    """A peer that freezes with its connections open counts as dead after the heartbeat timeout; when it resumes after
    three of these, it adopts what it missed, is counted again, and drops none of its progress."""
    *survivors, frozen = trio.filled()
    family = frozen.family()
    for process in family:
        process.suspend()
    frozen_at = time.time()
    try:
        observe(survivors, frozen_at, survivors[0].reached(), "machine frozen", FROZEN_S)
        until(lambda: time.time() > frozen_at + 3 * TIMEOUT_S, 3 * TIMEOUT_S, "three timeouts")
    finally:
        for process in family:
            process.resume()
    caught_up = frozen.epoch(survivors[0].reached())["epoch"]
    until(lambda: all(peer.last("epoch")["peers"] == 3 for peer in trio.peers), 60.0, "all three see each other")
    for peer in trio.peers:
        peer.epoch(caught_up + ROUNDS)
    agree(trio.peers, caught_up)
    assert frozen.lines("epoch", synced=True)[-1]["epoch"] > caught_up
    assert frozen.last("epoch")["dropped"] == 0
