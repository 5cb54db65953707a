"""Which peers are counted. Checked in every synchronous run: (l) no working peer goes uncounted for long; (m) each
outer step counts at least half of the working peers, and two if several work. In asynchronous runs: (l) each submission
gets an answer.

Law: this module sees what trainers send and merge and which outer steps are taken, and changes nothing. It judges only
what happens after a quiet time: no death, cut, frozen process, stuck trainer or lost message. Peers that start and
trainers that pause do not interrupt the quiet time, because the protocol must handle them without harm to the model. A
peer that changes its lineage is a newcomer in the new one.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2p_diloco.core.version import Version

from .model import require

if TYPE_CHECKING:
    from .face import Step
    from .process import Process
    from .world import World

QUIET_S = 15.0
"""Seconds within which the protocol must notice that faults are over."""
QUIET_ROUNDS = 2.0
"""This many rounds are added to `QUIET_S`, because rounds may be long."""
JOINS_S = 8.0
"""Seconds within which a peer must be counted in a world without any fault, in addition to rounds and transfers."""
ARRIVES_S = 2.0
"""Seconds within which a contribution arrives."""
KNOWN_S = 3.0
"""Seconds until all peers must know that a peer has begun to train."""


@dataclass(slots=True)
class Exchange:
    """One contribution of a trainer: when it was sent, for which unit, and its number among the trainer's contributions
    to this unit. first: when any trainer first sent a contribution on the same version."""

    sent: float
    unit: int
    number: int
    first: float


@dataclass(slots=True)
class Attended:
    """What is recorded of one incarnation of a peer."""

    since: float = math.inf  # when its trainer first merged
    exchanges: Counter[int] = field(default_factory=Counter)  # by unit
    open: Exchange | None = None
    excused_until: float = -math.inf  # until then a long pause is the reason why it was not counted
    joined: float = -math.inf  # when it left another lineage for this one
    counted_at: float = 0.0  # when it last merged a state that counts all of an exchange


@dataclass(slots=True)
class Membership:
    """Records which peers contribute and which are counted, and checks invariants (l) and (m)."""

    world: World
    quiet_from: float = -math.inf
    _lives: dict[Process, Attended] = field(default_factory=dict)
    _first: dict[tuple[int, Version | None], float] = field(default_factory=dict)  # by unit and version: the first send

    @property
    def patience(self) -> float:
        """How many seconds without faults must have passed before anything is judged."""
        settings = self.world.settings
        return QUIET_S + QUIET_ROUNDS * settings.interval * settings.step_times[1] + 2 * settings.state_lag

    # -- what happens

    def disturbed(self, until: float) -> None:
        """Record that a fault happens and lasts until the time ``until``, which may be now."""
        self.quiet_from = max(self.quiet_from, until)

    def healed(self) -> None:
        """Record that all lasting faults have ended."""
        self.quiet_from = min(self.quiet_from, self.world.now)

    def sends(self, process: Process, unit: int) -> None:
        """Record that a trainer sends a contribution to this unit."""
        life, now = self._life(process), self.world.now
        life.exchanges[unit] += 1
        first = self._first.setdefault((unit, process.replica.versions[unit]), now)
        life.open = Exchange(now, unit, life.exchanges[unit], first)

    def merges(self, process: Process) -> None:
        """Called when a trainer merges the result of an exchange. Check that the result counts the trainer's
        contribution, unless this was its first contribution to the unit, came after `round_timeout`, or a leader leaves
        it out, because it sent no slices of an earlier one (invariant l)."""
        life = self._life(process)
        life.since = min(life.since, self.world.now)
        judged = self._judged(self.world.now, life)
        if life.open is None or process.blocked:
            return
        exchange, life.open = life.open, None
        missed = process.trainer.delta[exchange.unit] & ~process.replica.holds(exchange.unit)
        # a trainer whose steps take longer than round_timeout is too late by the rule
        in_time = exchange.sent + ARRIVES_S < exchange.first + self.world.rules.round_timeout
        left_out = any(other.replica.leaves_out(exchange.unit, process.name) for other in self.world.alive.values())
        judged = judged and self._judged(exchange.sent, life) and exchange.number > 1 and in_time and not left_out
        self.world.happened["judged"] += judged
        if not missed:
            life.counted_at = self.world.now
        elif judged:
            which = f"exchange {exchange.number}, sent at {exchange.sent:.3f}"
            require(False, "l", f"{process.name}: unit {exchange.unit} does not count its {which}")

    def drafted(self, process: Process, step: Step) -> None:
        """Check that an outer step counts at least half of the working peers, and at least two peers if several work,
        unless the revision says that one is enough (invariant m). A peer that has missed several rounds in a row does
        not count as working."""
        if self.world.rules.asynchronous or not step.counted:
            return
        replica, unit = process.replica, step.unit
        came, alive = {one.peer for one in step.counted}, self.world.alive.items()
        works = {name for name, other in alive if self._works(other, unit, replica.versions[unit])}
        working = came | {name for name in works if not replica.misses_often(unit, name)}
        pair = 1 if step.revision.min_peers == 1 else 2
        least = min(len(working), max(pair, math.ceil(len(working) / 2)))
        text = f"{process.name}: unit {unit} takes a step with {sorted(came)} only, though {sorted(working)} work"
        require(len(came) >= least, "m", text)

    def joins_lineage(self, process: Process) -> None:
        """Record that a peer changes its lineage. The peer is a newcomer in the new lineage: no round of the new
        lineage could count it before."""
        life = self._life(process)
        life.exchanges.clear()
        life.open, life.joined = None, self.world.now

    def resumes(self, process: Process) -> None:
        """Record that a trainer's pause ends."""
        assert process.paused is not None
        if self.world.now - process.paused >= self.world.rules.pause_timeout - 0.5:
            self._life(process).excused_until = self.world.now

    def at_peace(self) -> None:
        """Check at the end that every peer that has been live for a long time, and does not pause, has had a
        contribution counted recently; in asynchronous mode, that its submission has had an answer (invariant l)."""
        world = self.world
        never = self.quiet_from == -math.inf
        limit = self.patience + world.settings.state_lag - (QUIET_S - JOINS_S if never else 0.0)
        if world.now - self.quiet_from < limit:
            return
        for name, process in world.alive.items():
            if world.rules.asynchronous:
                self._has_answer(name, process, limit)
                continue
            life = self._life(process)
            late = world.now - max(life.counted_at, life.excused_until, life.joined, process.born)
            done = world.data is not None and world.data.ended(process)
            counted = process.replica.finished or process.paused is not None or late < limit or done
            require(counted, "l", f"{name} was not counted in the last {late:.1f} s")

    # -- inside

    def _has_answer(self, name: str, process: Process, limit: float) -> None:
        """Check that the exchange of this peer's trainer, if one is under way, has not lasted for longer than
        ``limit`` seconds without faults (invariant l)."""
        exchange = self._life(process).open
        if exchange is not None and process.blocked and not process.released:
            lasts = self.world.now - max(exchange.sent, self.quiet_from)
            require(lasts < limit, "l", f"{name} has waited for an answer to its submission for {lasts:.1f} s")

    def _life(self, process: Process) -> Attended:
        """Return the record of this process."""
        return self._lives.setdefault(process, Attended())

    def _judged(self, since: float, life: Attended) -> bool:
        """Whether an event at time ``since`` is judged: there must have been no fault for long enough before it."""
        world = self.world
        lasting = [t for p in world.alive.values() for t in (p.frozen_until, p.stalled_until) if t > world.now]
        if lasting or world.drop or world.torn:
            self.disturbed(max([world.now, *lasting]))
        quiet = max(self.quiet_from, life.excused_until) + self.patience
        return not world.rules.asynchronous and world.trainers.training and since >= quiet

    def _works(self, process: Process, unit: int, version: object) -> bool:
        """Whether the peer works on this version of the unit, and has trained for so long that all peers know of it. A
        peer that knows that all data is used does not."""
        life, world = self._life(process), self.world
        done = world.data is not None and world.data.ended(process)
        if done or process.replica.finished or process.replica.departed:
            return False
        paused = process.paused is not None and world.now - process.paused >= world.rules.pause_timeout - 0.5
        on_it = process.replica.versions[unit] == version
        known = world.now - life.since >= KNOWN_S + self.patience - QUIET_S
        return on_it and not paused and known and self._judged(world.now, life)
