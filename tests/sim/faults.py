"""The faults of a simulated run: drawn from its seed one after the other until the healing time.

Law: only faults that can happen to a real peer. No more peers fail at a time than the settings allow.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from p2p_diloco.core.events import Depart

if TYPE_CHECKING:
    from .process import Process
    from .world import World

FREEZE_S = (0.5, 8.0)
"""How long a frozen process does nothing, in seconds: the shortest and the longest time."""
PAUSE_S = (0.5, 12.0)
"""How long a trainer pauses, in seconds: shorter or longer than other peers wait for it."""
MASKED = ("pair", "part", "mute", "turn", "relay", "heal")
"""The faults that relays may mask. `Ways.look` finds whether they do."""


class Faults:
    """Causes the faults of one simulated run, and ends them."""

    def __init__(self, world: World) -> None:
        self._world = world
        # when each recent failure will be repaired; at first no peer may fail, because only the founder holds a state
        self._weakened = [self.repair] * (world.settings.deaths_at_once or 0)

    def save(self, name: str) -> None:
        """Write the peer's state to its disk."""
        world = self._world
        process = world.alive[name]
        if process.replica.has_state:
            world.disks[name] = process.replica.saved()

    def chaos(self, until: float) -> None:
        """Schedule random faults, one after another, until the time ``until``."""
        world = self._world
        delay = world.rng.uniform(*world.settings.fault_every)
        if world.settings.faults and world.now + delay < until:
            world.at(delay, lambda: self._chaos(until))

    def _chaos(self, until: float) -> None:
        """Cause one fault, then schedule the next one."""
        self.fault()
        self.chaos(until)

    @property
    def repair(self) -> float:
        """Seconds until a death is noticed and other peers hold what the dead peer held."""
        world = self._world
        return 2 * world.rules.heartbeat_timeout + 4 + 3 * world.settings.state_lag

    def _spared(self, kind: str) -> bool:
        """Whether to skip this fault because as many peers as allowed have failed lately. A restarted peer counts as
        failed, because it holds little. A frozen peer counts as dead, and so does a peer with damaged memory until it
        is repaired."""
        world = self._world
        most = world.settings.deaths_at_once
        if most is None or kind not in ("crash", "flip", "freeze", "leave", "restart"):
            return False
        self._weakened = [until for until in self._weakened if until > world.now]
        able = [p for p in world.alive.values() if p.replica.has_state]
        damaged = sum(any(world.damaged(p, unit) for unit in world.units) for p in able)
        if len(self._weakened) + damaged >= most and kind != "restart":
            return True
        if kind != "flip":  # a bit flip is counted by `damaged` instead
            self._weakened.append(world.now + self.repair + (FREEZE_S[1] if kind == "freeze" else 0.0))
        return False

    def fault(self) -> None:
        """Cause one random fault, unless no peer may fail now."""
        world = self._world
        kind = world.rng.choice(world.settings.faults)
        if self._spared(kind):
            return
        world.happened[kind] += 1
        if kind not in ("pause", "restart", *(MASKED if world.ways.on else ())):
            world.membership.disturbed(world.now)
        holders, dead = world.holders(), sorted(set(world.names) - set(world.alive))
        someone = world.rng.choice(sorted(world.alive)) if world.alive else ""
        match kind:
            case "crash" if len(holders) > 1 or (someone and someone not in holders):
                if world.rng.random() < 0.5:
                    self.save(someone)
                world.crash(someone)
            case "restart" if dead:
                world.start(world.rng.choice(dead), from_disk=world.rng.random() < 0.5)
            case "cut" if len(world.names) > 1:
                side = set(world.rng.sample(world.names, world.rng.randint(1, len(world.names) - 1)))
                world.cut = {frozenset((a, b)) for a in side for b in world.names if b not in side}
                world.say("net", f"cut off {sorted(side)}")
            case "part" if len(world.names) > 1:
                pairs = [frozenset(pair) for pair in itertools.combinations(world.names, 2)]
                world.cut = {pair for pair in pairs if world.rng.random() < 0.4}
                world.say("net", f"cut {sorted(map(sorted, world.cut))}")
            case "mute" if len(world.names) > 1:
                world.mute.add(tuple(world.rng.sample(world.names, 2)))  # type: ignore[arg-type]
                world.say("net", f"mute {sorted(world.mute)}")
            case "pair" if len(world.names) > 1:
                world.cut = {frozenset(world.rng.sample(world.names, 2))}
                world.say("net", f"cut {sorted(map(sorted, world.cut))}")
            case "turn":
                world.ways.turn(world.rng.choice(world.names))
            case "relay" if world.settings.bootstrap:
                world.ways.switch()
            case "heal":
                world.cut, world.mute = set(), set()
                world.say("net", "healed")
            case "freeze" if someone:
                world.alive[someone].frozen_until = world.now + world.rng.uniform(*FREEZE_S)
                world.membership.disturbed(world.alive[someone].frozen_until)
                world.say(someone, "freezes")
                if world.ways.on:
                    world.at(world.alive[someone].frozen_until - world.now, world.ways.look)
            case "leave" if len(holders) > 1 and someone:
                world.say(someone, "leaves")
                leaving = world.alive[someone]
                world.feed(leaving, Depart())
                world.at(world.rng.uniform(0.1, 1.0), lambda: self._gone(leaving))
            case "flip" if someone and world.alive[someone].replica.has_state:
                world.flips += 1
                unit = world.rng.choice(world.units)
                world.alive[someone].replica.flip(unit, world.rng.randbytes(8))
                world.say(someone, f"has a bit flipped in unit {unit}")
            case "stall" if someone:
                world.alive[someone].stalled_until = world.now + world.rng.uniform(0.5, 15)
                world.membership.disturbed(world.alive[someone].stalled_until)
                world.say(someone, "stalls: its trainer stops, its node goes on")

            case "pause" if someone:
                world.say(someone, "pauses")
                world.trainers.pause(world.alive[someone], world.rng.uniform(*PAUSE_S))
        world.ways.look()

    def _gone(self, process: Process) -> None:
        """End the process of a peer that has left."""
        world = self._world
        if world.alive.get(process.name) is process:
            world.crash(process.name)

    def heal(self) -> None:
        """End all faults. Dead peers return if the settings say so."""
        world = self._world
        if world.torn or world.drop:
            world.membership.disturbed(world.now)
        world.cut, world.mute, world.drop, world.duplicate = set(), set(), 0.0, 0.0
        world.ways.heal()
        for name in world.names if world.settings.dead_return else ():
            if name in world.alive and world.alive[name].replica.departed:
                world.crash(name)
            if name not in world.alive:
                world.start(name)
        for process in world.alive.values():
            process.woke = min(process.frozen_until, world.now)
            process.frozen_until = process.stalled_until = 0.0
        world.ways.look()
        world.membership.healed()
