"""The ways that messages take in a simulated run with relays: a direct link, or a relay where two peers have none.

Law: two private peers have no direct link, and a link that is cut in one direction carries nothing. A relay is a live
reachable peer, or the bootstrap node, with a direct link to both ends. In a run without relays nothing is drawn here,
and each message takes the direct link.
"""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import TYPE_CHECKING

from p2p_diloco.core.events import Broke, Reachable

if TYPE_CHECKING:
    from .process import Process
    from .world import World

DIRECT = ""
"""The way of a message that needs no relay."""
BOOTSTRAP = "bootstrap"
"""The name of the bootstrap node as a relay: no cut separates it from any peer."""
RELAYED_S = (0.05, 0.4)
"""How much longer a message through a relay takes, in seconds."""
FOUND_S = (0.2, 1.0)
"""How long it takes to find that the last way no longer works and to find another, in seconds."""
NOTICED_S = (0.3, 4.0)
"""How long a peer takes to notice whether others can dial it, in seconds."""


class Ways:
    """Which peers are private, which way each message takes, and which peers have had a way to each other."""

    def __init__(self, world: World) -> None:
        settings = world.settings
        self._world, self.on = world, settings.relays
        self.rng = Random(f"ways {world.seed}")
        self.private: set[str] = set(self.rng.sample(world.names, settings.private))
        self.bootstrap = settings.bootstrap  # whether the bootstrap node lives
        self._taken: dict[tuple[str, str], str] = {}  # (from, to) → the relay of the last message; absent: none needed
        self.apart: set[frozenset[str]] = set()  # pairs of live peers without any way now
        self._apart_at: dict[frozenset[str], float] = {}  # when a pair last had no way

    # -- questions

    def direct(self, a: str, b: str) -> bool:
        """Whether the two peers have a direct link."""
        whole = self._world.connected(a, b) and not {(a, b), (b, a)} & self._world.mute
        return whole and not {a, b} <= self.private

    def relays(self, a: str, b: str) -> list[str]:
        """Return the relays that both peers can reach, sorted."""
        world = self._world
        able = [n for n, p in world.alive.items() if n not in (a, b) and p.frozen_until <= world.now]
        peers = [n for n in able if n not in self.private and self.direct(a, n) and self.direct(n, b)]
        return sorted([*peers, BOOTSTRAP] if self.bootstrap else peers)

    def joined(self, a: str, b: str) -> bool:
        """Whether the two peers have any way to each other."""
        return self.direct(a, b) or bool(self.relays(a, b))

    def apart_at(self, a: str, b: str) -> float:
        """Return the time at which the two peers last had no way to each other; -inf if they always had one."""
        pair = frozenset((a, b))
        return self._world.now if pair in self.apart else self._apart_at.get(pair, -math.inf)

    @property
    def never_apart(self) -> bool:
        """Whether every pair of live peers always had a way to each other."""
        return not self.apart and not self._apart_at

    # -- messages

    def delay(self, sender: str, to: str) -> float | None:
        """Choose the way of a message. Returns how many seconds longer it takes than on a direct link; None if the
        message has no way at all."""
        before = self._taken.get((sender, to), DIRECT)
        if self.direct(sender, to):
            self._taken.pop((sender, to), None)
            return 0.0
        relays = self.relays(sender, to)
        if not relays:
            return None
        self._world.happened["relayed"] += 1
        if before in relays:
            return self.rng.uniform(*RELAYED_S)
        self._taken[sender, to] = self.rng.choice(relays)
        return self.rng.uniform(*RELAYED_S) + self.rng.uniform(*FOUND_S)

    def refused(self, sender: str, to: str) -> bool:
        """Whether a dial to the dead peer `to` is refused: always if the sender reaches its machine directly, or if no
        relays are simulated; else in half of the cases, those in which a relay knows of the death."""
        if not self.on or (self.direct(sender, to) and to not in self.private):
            return True
        return self.joined(sender, to) and self.rng.random() < 0.5

    # -- what happens

    def starts(self, process: Process) -> None:
        """Let a peer that starts find out, at once or later, whether other peers can dial it."""
        if not self.on:
            return
        if self.rng.random() < 0.5:
            process.replica.roster.says(eligible=process.name not in self.private)
        else:
            self._notice(process)
        self.look()

    def turn(self, name: str) -> None:
        """Make a reachable peer private, or a private one reachable. The peer notices this some time later."""
        self.private ^= {name}
        self._world.say(name, "is private" if name in self.private else "is reachable")
        if name in self._world.alive:
            self._notice(self._world.alive[name])
        self.look()

    def _notice(self, process: Process) -> None:
        """Let a peer find out, some time later, whether other peers can dial it."""
        world = self._world
        world.at(
            self.rng.uniform(*NOTICED_S),
            lambda: world.feed_alive(process, Reachable(process.name not in self.private)),
        )

    def lost(self, relay: str) -> None:
        """Handle the death of a relay: some connections through it are found broken at once."""
        world = self._world
        for pair in sorted(pair for pair, taken in self._taken.items() if taken == relay):
            del self._taken[pair]
            holder = world.alive.get(pair[0])
            if holder is not None and holder.replica.roster.live(pair[1]) and self.rng.random() < 0.5:
                world.later(holder, self.rng.uniform(0.01, 0.3), Broke(pair[1]))

    def switch(self) -> None:
        """Stop the bootstrap node, or start it again."""
        self.bootstrap = not self.bootstrap
        self._world.say("net", f"the bootstrap node {'starts' if self.bootstrap else 'stops'}")
        if not self.bootstrap:
            self.lost(BOOTSTRAP)
        self.look()

    def heal(self) -> None:
        """End the faults of relays: from now on at least one relay works."""
        self.bootstrap = self._world.settings.bootstrap
        if self.on and not self.bootstrap and self.private.issuperset(self._world.names):
            self.turn(self._world.names[0])

    def look(self) -> None:
        """Record which pairs of live peers have no way to each other now. Called after any change."""
        if not self.on:
            return
        world, before = self._world, self.apart
        pairs = itertools.combinations(sorted(world.alive), 2)
        self.apart = {frozenset(pair) for pair in pairs if not self.joined(*pair)}
        self._apart_at |= dict.fromkeys(self.apart | before, world.now)
        if self.apart or before:
            world.membership.disturbed(world.now)
