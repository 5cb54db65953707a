"""Any peer may die at any moment of a round: the others commit again soon, and stay equal to the bit.

One run of three goes on through all of these tests; whoever dies is replaced by a newcomer. The model has two shards,
so that a round has two aggregators and a peer that only contributes. `pytest -s` prints how long each death held the
survivors up; docs/measurements.md keeps the figures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swarm import Member, Swarm, agree, stall_s, until, usual_round_s

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

INTERVAL_S, TIMEOUT_S = 0.5, 5.0
CONFIG = {
    "sync_every": 4,
    "outer_lr": 0.5,
    "codec": "fp32",
    "shard_elements": 3_000_000,
    "start_peers": 3,
    "heartbeat_interval": INTERVAL_S,
    "heartbeat_timeout": TIMEOUT_S,
}
TRAINING = {"params": {"u": [3_000_000], "v": [3_000_000]}, "step_s": 0.04, "config": CONFIG}
ROUNDS = 4
"""Rounds before and after each death that must be there."""


class Trio:
    """A run that is kept at three peers."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm, self.peers, self.born = swarm, [], 0
        self.swarm.bootstrap()

    def filled(self, **last: Any) -> list[Member]:
        """Three peers in rounds of three; the last one started with these options."""
        self.peers = [peer for peer in self.peers if peer.process.poll() is None]
        if len(self.peers) > 2:
            self.peers.pop(0).die()
        for _ in range(3 - len(self.peers)):
            self.born += 1
            options = last if len(self.peers) == 2 else {}
            deltas = {"delta": 1.0 + self.born % 3}
            self.peers.append(self.swarm.start(f"p{self.born}", **TRAINING, **deltas, **options))
        newest = self.peers[-1].wait_for("in")["epoch"]
        for peer in self.peers:
            peer.epoch(newest + ROUNDS)
        return self.peers


@pytest.fixture(scope="module")
def trio(shared_swarm: Swarm) -> Iterator[Trio]:
    return Trio(shared_swarm)


def observe(survivors: list[Member], at: float, epoch: int, what: str) -> None:
    """The survivors commit again in time, and agree at every epoch since. Prints how long the next commit took, and
    by how much the longest of the next rounds was longer than usual."""
    for peer in survivors:
        until(
            lambda peer=peer: len([e for e in peer.lines("epoch", synced=True) if e["time"] > at]) >= ROUNDS,
            60.0,
            f"{ROUNDS} rounds of {peer.name} after the death in epoch {epoch}",
        )
    stalls = [stall_s(peer, at, ROUNDS) for peer in survivors]
    figures = {
        "to_commit_s": max(min(e["time"] for e in peer.lines("epoch") if e["time"] > at) - at for peer in survivors),
        "stall_s": max(stalls),
        "usual_round_s": usual_round_s(survivors[0], at),
    }
    print(json.dumps({"death": what, **{name: round(value, 2) for name, value in figures.items()}}))
    agree(survivors)
    assert max(stalls) <= TIMEOUT_S + 5 * INTERVAL_S


@pytest.mark.parametrize("role", ["aggregator", "contributor"])
@pytest.mark.parametrize("phase", ["training", "sending", "sent", "committing"])
def test_a_machine_dies(trio: Trio, tmp_path: Path, role: str, phase: str) -> None:
    """Trainer, node and p2pd of one peer are killed together, at a moment that the node itself recognises."""
    note = tmp_path / "note.json"
    plan = {"role": role, "phase": phase, "after": ROUNDS + 2, "victims": "machine", "note": str(note)}
    *survivors, victim = trio.filled(sabotage=plan)
    assert victim.status(60.0) == -9
    died = json.loads(note.read_text())
    assert died["role"] == role
    observe(survivors, died["time"], died["epoch"], f"machine, {role}, {phase}")


@pytest.mark.parametrize("victims", ["node", "trainer"])
def test_half_a_peer_dies(trio: Trio, tmp_path: Path, victims: str) -> None:
    """Of a peer whose node or trainer is killed the rest ends by itself; to the others it is one more death."""
    note = tmp_path / "note.json"
    plan = {"role": "aggregator", "phase": "sent", "after": ROUNDS + 2, "victims": victims, "note": str(note)}
    *survivors, victim = trio.filled(sabotage=plan)
    if victims == "node":
        assert "signal 9" in victim.wait_for("error", 60.0, kind="NodeDied")["sentence"]
    assert victim.status(60.0) == (1 if victims == "node" else -9)
    trio.swarm.gone()
    died = json.loads(note.read_text())
    observe(survivors, died["time"], died["epoch"], f"{victims} alone, aggregator, sent")


def test_a_frozen_machine_thaws(trio: Trio) -> None:
    """A peer that freezes, its connections open, is given up after the heartbeat timeout; thawed, it adopts what it
    missed and counts again."""
    *survivors, frozen = trio.filled()
    family = frozen.family()
    for process in family:
        process.suspend()
    frozen_at = time.time()
    try:
        observe(survivors, frozen_at, survivors[0].reached(), "machine frozen")
    finally:
        for process in family:
            process.resume()
    caught_up = frozen.epoch(survivors[0].reached())["epoch"]
    until(lambda: all(peer.last("epoch")["peers"] == 3 for peer in trio.peers), 60.0, "all three see each other")
    for peer in trio.peers:
        peer.epoch(caught_up + ROUNDS)
    agree(trio.peers, caught_up)
