"""The founder of a simulated run: it asks for revisions (other rates, another H, more or fewer peers for an outer step,
an end of the run), and records them in the DHT."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from p2p_diloco.core.events import Revised
from p2p_diloco.core.revision import FOUNDED, Revision

if TYPE_CHECKING:
    from .world import World

STOPS = 0.3
"""The share of founders whose revisions also end the run, after 1 to 12 epochs or at the next commit."""
RECORDED_S = 20.0
"""Seconds for which the DHT keeps the record of a revision, unless a peer renews it."""


class Founder:
    """Asks for revisions, and holds the record of the latest one as the DHT would."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.recorded, self.recorded_until = FOUNDED, 0.0  # the revision in the DHT, and when its record expires

    def ask(self, within: float) -> None:
        """Schedule requests for revisions at random times in the next ``within`` seconds."""
        asks, settings = Random(f"revisions {self.world.seed}"), self.world.settings
        others = Random(f"other revisions {self.world.seed}")
        stop = others.randint(1, 12) if others.random() < STOPS else None  # the same in all: none may move it away
        for number in range(1, settings.revisions + 1):
            # now and then two revisions have the same number, as if the asker had not seen the first one
            number -= number > 1 and asks.random() < 0.2
            steps = settings.fragments * others.randint(1, settings.interval)
            if number > 2 and steps > settings.fragments and not self.world.rules.asynchronous:
                steps -= number % settings.fragments  # now and then a number that fragments can't share evenly
            revision = Revision(
                number,
                asks.choice([0.3, 0.5, 0.7]),
                asks.choice([0.0, 0.8, 0.9]),
                sync_every=others.choice([None, steps]),
                min_peers=others.choice([None, *range(1, settings.revised_min_peers + 1)]),
                stop_after_epochs=stop,
            )
            dies = asks.random() < 0.5
            self.world.at(asks.uniform(0.0, within), lambda r=revision, d=dies: self._asked(asks, r, d))  # type: ignore[misc]

    def _asked(self, asks: Random, revision: Revision, dies: bool) -> None:
        """Publish a revision in the DHT. If the founder ``dies``, only tell one peer of the revision."""
        self.world.say("founder", f"asks for {revision}{' and dies' if dies else ''}")
        if not dies:
            self.record(revision)
        elif self.world.alive:
            told = self.world.alive[asks.choice(sorted(self.world.alive))]
            self.world.feed_alive(told, Revised(revision))

    def record(self, revision: Revision) -> None:
        """Store the revision in the DHT, unless it holds a higher one."""
        if revision >= self.present:
            self.recorded, self.recorded_until = revision, self.world.now + RECORDED_S

    @property
    def present(self) -> Revision:
        """The revision that the DHT holds; revision 0 if its record has expired."""
        return self.recorded if self.world.now < self.recorded_until else FOUNDED

    def highest(self) -> Revision:
        """Return the highest revision known to any live peer or to the DHT."""
        known = (p.replica.roster.mine.revision for p in self.world.alive.values() if not p.replica.departed)
        return max([self.present, *known])
