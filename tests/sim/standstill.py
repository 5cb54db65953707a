"""How long a trainer stands still while a hostile member acts (invariant r).

Law: this module only reads. A trainer stands still from its last inner step, or from the end of its last pause, until
its next inner step: it waits for a first state, for the end of an exchange, or for the answer to a Merge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .model import require

if TYPE_CHECKING:
    from .hostile import Hostile
    from .process import Process
    from .world import World

LOST_S = 4.0
"""Seconds until a lost message is sent again: 3 s until its loss is noticed, and a heartbeat."""
LOSSES = 3
"""The most messages lost one after another: a contribution, a claim or promise, a commit."""


def limit(world: World, hostile: Hostile) -> float:
    """Return the longest time, in seconds, that a hostile member may make a trainer stand still: its own delay, and the
    other peers' contributions that a quorum needs. They finish an interval of steps, or pause; in asynchronous mode a
    commit waits for the grace.
    """
    settings, rules = world.settings, world.rules
    others = settings.interval * settings.step_times[1] + rules.pause_timeout + rules.async_grace
    return hostile.delay + others + LOSSES * LOST_S


def stands_still(world: World, process: Process) -> None:
    """Check that this peer's trainer has not stood still for longer than a hostile member can cause."""
    if world.hostile is None or process.replica.finished or not world.trainers.training:
        return
    still, most = world.now - process.active, limit(world, world.hostile)
    require(still < most, "r", f"the trainer of {process.name} has stood still for {still:.1f} s, {most:g} s at most")
