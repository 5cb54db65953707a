"""A hostile member of a simulated run: it sends anything well-formed to any peer, until it falls silent. In some runs
all others expel it instead; it then goes on sending, without any effect.

Law: it knows all that a member can know, and keeps to the limits that the node checks before a message reaches the
core. Which messages it sends is said by a subclass for each core.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random
from typing import TYPE_CHECKING, Any

from p2p_diloco.core.events import Closed, Delivered, Expelled, SendFailed

from .standstill import stands_still

if TYPE_CHECKING:
    from .process import Process
    from .world import World

NAME = "x0"


class Hostile(ABC):
    """The hostile member of one world. A subclass draws ``tactics`` and ``pause``, then calls `begin`."""

    tactics: list[str]  # what it may do
    pause: float  # mean seconds between two messages

    def __init__(self, world: World) -> None:
        self.world, self.name = world, NAME
        self.rng = Random(f"hostile {world.seed}")
        self.silent = False  # whether it has fallen silent or was expelled
        self.is_expelled = Random(f"expelled {world.seed}").random() < 0.4  # at the end; else it falls silent

    def begin(self) -> None:
        """Begin to send, some time later."""
        self.world.at(self.rng.uniform(1.0, 10.0), self._act)

    def fall_silent(self) -> None:
        """Stop sending, so that connections break, or be expelled by all other peers."""
        self.silent = True
        self.world.say(self.name, "is expelled" if self.is_expelled else "falls silent")
        self.world.membership.disturbed(self.world.now)
        for process in list(self.world.alive.values()):
            stands_still(self.world, process)
            if self.is_expelled:
                self.world.later(process, self.rng.uniform(0.01, 3.0), Expelled(self.name, "a lie"))
            else:
                self.world.later(process, self.rng.uniform(0.01, 0.3), Closed(self.name))

    def takes(self, sender: Process, to: str, message: Any) -> bool:
        """Take a message that is for this member, and let the member answer as it likes. Return False if the message is
        for another peer."""
        if to != self.name:
            return False
        if self.silent and not self.is_expelled:
            self.world.later(sender, 0.1, SendFailed(to, message, gone=True))
            return True
        self.world.later(sender, self.rng.uniform(0.01, 0.2), Delivered(to, message))
        self.answer(sender, message)
        return True

    def _act(self) -> None:
        """Send one message to one peer or to all, and schedule the next."""
        world, rng = self.world, self.rng
        if self.silent and not self.is_expelled:
            return
        if not self.silent:
            world.membership.disturbed(world.now)
        holders = world.holders()
        if holders:
            process = world.alive[rng.choice(holders)]
            message = self.message(process, rng.choice(world.units), rng.choice(self.tactics))
            if message is not None:
                for to in [process] if rng.random() < 0.5 else list(world.alive.values()):
                    self.tell(to, message)
        world.at(rng.expovariate(1 / self.pause), self._act)

    def tell(self, to: Process, message: Any) -> None:
        """Send a message to a peer."""
        self.world.at(self.rng.uniform(0.01, 0.2), lambda: self._arrives(to, message))

    def _arrives(self, to: Process, message: Any) -> None:
        """Feed a message to its receiver, if that still lives."""
        if self.world.alive.get(to.name) is to:
            self.arrives(to, message)

    # -- what depends on the core

    @property
    @abstractmethod
    def delay(self) -> float:
        """The longest time for which this member can hold up a trainer, besides lost messages and other trainers."""

    @abstractmethod
    def spoils(self, message: Any) -> None:
        """Check that all numbers in an honest peer's message fit into a real message. So nothing that this member has
        sent keeps the peer from sending (invariant q)."""

    @abstractmethod
    def answer(self, sender: Process, message: Any) -> None:
        """Answer an honest peer's message, or leave it."""

    @abstractmethod
    def message(self, process: Process, unit: int, tactic: str) -> Any | None:
        """Make up a message of this tactic from what ``process`` holds of a unit; None: send nothing now."""

    @abstractmethod
    def arrives(self, to: Process, message: Any) -> None:
        """Feed a message to its receiver, unless it is a lie that the receiver must believe, because it answers a
        question. A message that answers no question may neither replace a state nor pass as another peer's commit
        (invariant q)."""
