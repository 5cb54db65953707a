"""A run that is kept at a fixed number of peers, however many die, and the cost of each death to the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm import Member, Swarm, agree, stall_s, until, usual_round_s

ROUNDS = 4
"""Rounds that must be complete before and after each death."""


class Kept:
    """A run of `size` peers started with these options, each with a pseudo-gradient of 1, 2 or 3."""

    def __init__(self, swarm: Swarm, size: int, training: Mapping[str, Any]) -> None:
        self.swarm, self.size, self.training = swarm, size, training
        self.peers: list[Member] = []
        self.born = 0
        swarm.bootstrap()

    def filled(self, **last: Any) -> list[Member]:
        """All peers, in rounds of all; the last one is newly started, with these additional options."""
        self.peers = [peer for peer in self.peers if peer.process.poll() is None]
        if len(self.peers) == self.size:
            self.peers.pop(0).die()
        while len(self.peers) < self.size:
            self.born += 1
            options = last if len(self.peers) == self.size - 1 else {}
            deltas = {"delta": 1.0 + self.born % 3}
            fresh = "sabotage" in options  # the saboteur needs its trainer as its parent
            peer = self.swarm.start(f"p{self.born}", fresh=fresh, **self.training, **deltas, **options)
            self.peers.append(peer)
        newest = self.peers[-1].wait_for("in")["epoch"]
        for peer in self.peers:
            peer.epoch(newest + ROUNDS)
        return self.peers


def after_death(survivors: list[Member], at: float, epoch: int) -> dict[str, float]:
    """Wait until the survivors have made some rounds since the death and agree. Returns, in seconds, how long the next
    commit took, how much longer than usual the longest of the next rounds was, and the usual length; the slowest peer
    counts."""
    for peer in survivors:
        until(
            lambda peer=peer: len([e for e in peer.lines("epoch", synced=True) if e["time"] > at]) >= ROUNDS,
            120.0,
            f"{ROUNDS} rounds of {peer.name} after the death in epoch {epoch}",
        )
    agree(survivors)
    return {
        "to_commit_s": max(min(e["time"] for e in peer.lines("epoch") if e["time"] > at) - at for peer in survivors),
        "stall_s": max(stall_s(peer, at, ROUNDS) for peer in survivors),
        "usual_round_s": usual_round_s(survivors[0], at),
    }
