"""One incarnation of a simulated peer: node and trainer, with a clock of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2p_diloco.core.messages import Summary
from p2p_diloco.core.revision import FOUNDED
from p2p_diloco.core.version import SALT_BITS, ModelVersion, incarnation

from .model import Trainer

if TYPE_CHECKING:
    from p2p_diloco.core.state import State

    from .face import Face
    from .world import World


class Process:
    """One incarnation of a simulated peer: its replica, with the tensors, and its trainer."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.world, self.born = name, world, world.now
        self.skew = world.rng.uniform(-world.settings.clock_skew, world.settings.clock_skew)
        life = incarnation(int((1000 + world.now + self.skew) * 1e3), world.rng.getrandbits(SALT_BITS))
        self.replica: Face = world.face(
            name, world.rules, incarnation=life, now=self.clock(world.now), truth=world.truth
        )
        self.trainer = Trainer(len(world.units))
        self.step_time = world.rng.uniform(*self._step_times(world))
        self.stalled_until = self.frozen_until = 0.0
        self.paused: float | None = None  # since when the trainer pauses
        self.active = world.now  # when its trainer last made a step or paused
        self.training = self.changed = False
        # blocked: an exchange is not merged yet; released: that exchange is over, so its result can be merged
        self.blocked = self.released = False
        self.interval = world.settings.interval  # inner steps between contributions, as the merged state says
        self.flown = 0  # inner steps since the last contribution
        self.waiting_for: dict[str, float] = {}  # peer that can't contribute → since when a round here waits for it
        self.best = ModelVersion()  # the highest model version so far
        self.goes_over = False  # it has said that it goes over to another lineage, and has not done so yet
        self.woke = 0.0  # when healing ended its last freeze
        self.said: dict[object, str] = {}  # what it has signed, by what that is about
        self.buried = set[str]()  # peers that count as dead here
        self.summaries: dict[str, Summary] = {}  # the Summaries that it knew after the last event
        self.news: dict[str, float] = {}  # when it got each
        self.known = FOUNDED  # the highest revision that this process has known
        self.reached: dict[int, tuple[State, int]] = {}  # by unit: the last state, and its inner steps
        self.woken_for = float("inf")

    def _step_times(self, world: World) -> tuple[float, float]:
        """Return the range of this trainer's step times. In simulated runs with late peers, the first two peers are
        fast and the late ones slow. A round that does not wait for the late peers then leaves them behind."""
        quickest, slowest = world.settings.step_times
        if world.settings.late is None:
            return quickest, slowest
        return (quickest, 1.1 * quickest) if self.name in world.names[:2] else (0.9 * slowest, slowest)

    def clock(self, now: float) -> float:
        """Return this process's own clock at the simulated time ``now``."""
        return now + self.skew
