"""The data set of a simulated run: which positions each inner step used, and what the table in the ledger says of them.

Law: it draws from a random source of its own, so a run without data is not changed by this module. The check that each
position is used once (invariant t) compares the inner steps in θ with the table, so it does not trust the table alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from p2p_diloco.core import leases
from p2p_diloco.core.leases import DataSet, DataUse, Tables, Use
from p2p_diloco.core.spans import Spans, length, taken
from p2p_diloco.core.version import life_of

from .model import Fate, Trainer, require
from .witness import bits

if TYPE_CHECKING:
    from .face import Merged
    from .process import Process
    from .world import World

PER_STEP = 3
"""The most positions that an inner step uses."""


@dataclass(slots=True)
class Supply:
    """What one trainer knows of its data. use: its pending positions, and those that it sent. stock: the positions that
    it may use next. complete: whether all positions are used. asks: whether it exchanges at once, to get data. waits:
    seconds between two exchanges that bring no data. until: when the next such exchange may be. seen: the tables after
    its last exchange."""

    use: DataUse
    stock: Spans = ()
    complete: bool = False
    asks: bool = False
    waits: float = 0.0
    until: float = 0.0
    seen: Tables = field(default=())


LEDGER = 0
"""The unit whose commits say which positions are used."""


class Data:
    """The data set of a simulated run, and each trainer's part in it."""

    def __init__(self, world: World) -> None:
        settings = world.settings
        self.world, self.rng = world, Random(f"data {world.seed}")
        self.set = DataSet("train", settings.samples, settings.data_epochs)
        self.positions: dict[int, Spans] = {}  # inner step → what it used
        self.supplies: dict[Trainer, Supply] = {}
        self.seen: dict[str, tuple[int, int]] = {}  # peer → inner steps of its last θ, and their positions as bits

    def of(self, process: Process) -> Supply:
        """Return the supply of a trainer."""
        life = life_of(process.replica.incarnation)
        wants = 2 * PER_STEP * process.interval * len(self.world.rules.fragments)
        made = Supply(DataUse(self.set, process.name, life, wants))
        return self.supplies.setdefault(process.trainer, made)

    # -- what a trainer does

    def ready(self, process: Process) -> bool:
        """Whether the trainer has data for an inner step. If it has none, let it exchange at once."""
        world, supply = self.world, self.of(process)
        if supply.stock:
            return True
        if supply.complete or world.now < supply.until:
            process.active = world.now
            if process.changed:
                world.trainers.merge(process)
            return bool(supply.stock)
        supply.asks = True
        world.trainers.merge(process)
        supply.asks = False
        return bool(supply.stock) and not process.blocked

    def stepped(self, process: Process, step: int) -> None:
        """Let an inner step use the first positions of the stock."""
        supply = self.of(process)
        self.positions[step], supply.stock = taken(supply.stock, self.rng.randint(1, PER_STEP))
        supply.use.stepped(self.positions[step])

    def uses(self, process: Process, due: int) -> tuple[Use, ...]:
        """Return what the contribution to this unit says of the data used."""
        use = self.of(process).use
        return (use.send() if due == LEDGER else Use(use.data, (), use.wants),)

    def loaded(self, process: Process, merged: Sequence[Merged]) -> None:
        """Record what a merge did with the trainer's progress. If the new state gives the trainer's data to other
        peers, drop all progress. Called after the merge."""
        if not process.replica.has_state:
            return
        supply, tables = self.of(process), process.replica.of(LEDGER).tables
        for one in merged:
            if one.unit == LEDGER and one.fate is not Fate.KEEP:
                supply.use.count() if one.fate is Fate.COUNTED else supply.use.drop()
        if supply.use.conflicts(tables):
            self.world.happened["conflict"] += 1
            supply.use.drop()
            process.trainer.afresh()
        supply.stock = supply.use.stock(tables)
        supply.complete = leases.complete(supply.use.table(tables))

    def landed(self, process: Process) -> None:
        """Record that an exchange of the trainer is over and merged. If it brought nothing new, wait before the next
        one."""
        supply, rules = self.of(process), self.world.rules
        tables = process.replica.of(LEDGER).tables
        if supply.stock or supply.seen != tables:
            supply.waits = supply.until = 0.0
        else:
            supply.waits = min(rules.heartbeat_timeout, 2 * supply.waits or rules.heartbeat_interval)
            supply.until = self.world.now + supply.waits
        supply.seen = tables

    def ended(self, process: Process) -> bool:
        """Whether a trainer knows that all positions are used, and so has stopped contributing."""
        return self.of(process).complete

    # -- laws

    def advanced(self, process: Process) -> None:
        """Check the ledger's new version. The inner steps in θ have used exactly the positions that the table lists as
        used, and no position twice (invariant t). The table is consistent (invariant u)."""
        tables = process.replica.of(LEDGER).tables
        require(not leases.fault(tables), "u", f"{process.name}: {leases.fault(tables)}")
        steps = process.replica.holds(LEDGER)
        known, seen = self.seen.get(process.name, (0, 0))
        known, seen = (known, seen) if known & steps == known else (0, 0)
        for step in bits(steps & ~known):
            mask = _mask(self.positions[step])
            require(not seen & mask, "t", f"{process.name}: step {step} has used {self.positions[step]} again")
            seen |= mask
        self.seen[process.name] = steps, seen
        table = leases.of(tables, self.set.name)
        said = () if table is None else leases.used(table)
        require(seen == _mask(said), "t", f"{process.name}: the table lists {said} as used, but not so θ")
        parts = 0 if table is None else length(e.span for e in (*table.leases, *table.freed))
        require(table is None or length(said) + parts == table.next, "u", f"{process.name}: a position is in two parts")

    def reach(self) -> int:
        """Return the first position that no peer has been given yet, by the newest state that a live peer holds."""
        return max((table.next for table in self._newest()), default=0)

    def used_up_to(self, position: int) -> bool:
        """Whether all positions below this one are used. With a limit of epochs, also whether each trainer knows that
        all are."""
        if any(process.replica.finished for process in self.world.alive.values()):
            return True  # the run has ended before
        lowest = min((leases.lowest(table) for table in self._newest()), default=0)
        ends = all(self.ended(process) for process in self.world.alive.values())
        return lowest >= position and (ends or not self.set.epochs)

    def _newest(self) -> Tables:
        replicas = [process.replica for process in self.world.alive.values()]
        held = [replica.of(LEDGER) for replica in replicas if replica.versions[LEDGER] is not None]
        return max(held, key=lambda state: state.version).tables if held else ()


def _mask(spans: Spans) -> int:
    """Return a number in which the bit of each of these positions is set."""
    return sum((1 << stop) - (1 << start) for start, stop in spans)
