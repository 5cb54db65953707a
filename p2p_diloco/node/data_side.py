"""The data sets of one trainer, as its node sees them: what is pending, and what may be trained on next.

Law: decides nothing about tensors. What becomes of the pending positions follows from the `Take` of the ledger, the
shard whose state has the tables of the data (`core.data_use`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2p_diloco.core import leases
from p2p_diloco.core.data_use import DataUse, Fate
from p2p_diloco.core.events import Carry
from p2p_diloco.core.leases import DataSet, Table, Tables, Use
from p2p_diloco.core.lives import life_of
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.spans import joined, length
from p2p_diloco.node.local_progress import Take


def tables_of(replica: Replica) -> Tables:
    """The tables of the data that a run's peers share, as far as a replica knows them."""
    state = replica.logs.look_at(replica.rules.ledger).state
    return () if state is None else state.tables


class DataSide:
    """The data sets of one trainer."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self._ledger = replica, replica.rules.ledger
        self._uses: dict[str, DataUse] = {}
        self._told: list[dict[str, Any]] = []

    def register(self, name: str, length: int, epochs: int, fingerprint: str) -> None:
        """Add a data set of `length` samples, each used `epochs` times (0: without end). Positions will be leased to
        this life of the peer. `fingerprint`: text that is equal if the samples are."""
        data, own = DataSet(name, length, epochs, fingerprint), self._replica.own
        self._uses[name] = DataUse(data, self._replica.me, life_of(own.incarnation))
        self._told = [self._tell(use, tables_of(self._replica)) for use in self._uses.values()]

    def told(self) -> list[dict[str, Any]]:
        """What the trainer is told of each data set at the end of a merge."""
        return self._told

    def stepped(self, said: Mapping[str, Any]) -> None:
        """Record what the trainer says with a merge request: by data set, the positions that it has trained on since
        the last request, and how many it wants to hold."""
        for name, (spans, wants) in said.items():
            self._uses[name].stepped(joined((start, stop) for start, stop in spans))
            self._uses[name].wants = wants

    def send(self, shards: tuple[int, ...]) -> tuple[Use, ...]:
        """What contributions to these shards say of the data. Positions are listed only if the ledger is among them."""
        if self._ledger in shards:
            return tuple(use.send() for use in self._uses.values())
        return tuple(Use(use.data, (), use.wants) for use in self._uses.values())

    def merge(self, carry: Carry | None, take: Take | None) -> int:
        """Record what a merge does with the ledger: the log's `carry` and the trainer's `take`, None if there is none.
        If a pending position can't be counted any more, because the new state has it as used or leased to another peer,
        all local progress must be dropped. Returns the number of pending positions in such data sets, else 0."""
        if not self._uses or self._replica.own.flight is not None or not self._replica.has_state:
            return 0
        tables = tables_of(self._replica)
        for use in self._uses.values():
            use.merge(fate(carry, take))
        lost = [use for use in self._uses.values() if use.conflicts(tables)]
        count = sum(length(use.pending) for use in lost)
        if lost:
            for use in self._uses.values():
                use.merge(Fate.DROPPED)
        self._told = [self._tell(use, tables) for use in self._uses.values()]
        return count

    def _tell(self, use: DataUse, tables: Tables) -> dict[str, Any]:
        theirs = leases.of(tables, use.data.name)
        table = use.table(tables) or Table(use.data)
        new, freed = leases.ungranted(table), leases.freed(table)
        return {
            "name": use.data.name,
            "stock": () if self._replica.finished else use.stock(tables),
            "complete": leases.complete(table),
            "next": table.next,
            "lowest": leases.lowest(table),
            "used": leases.used_count(table),
            "freed": freed,
            "left": None if new is None else new + freed,
            "theirs": None if theirs is None else [theirs.data.length, theirs.data.epochs, theirs.data.fingerprint],
            "full": [one.data.name for one in tables] if theirs is None and len(tables) >= leases.TABLES_MAX else [],
        }


def fate(carry: Carry | None, take: Take | None) -> Fate:
    """What a merge does with local progress. `carry`: what the log says of the progress; None: nothing. `take`: what
    the trainer does; None: it loads nothing."""
    match take:
        case None | Take.KEEP:
            return Fate.KEEP
        case Take.SUBTRACT | Take.MIX:
            return Fate.COUNTED
        case Take.RESTORE:
            return Fate.RESTORED
        case Take.SENT:
            return Fate.SENT
        case Take.DROP if carry is Carry.SUBTRACT:
            return Fate.COUNTED_ALONE
    return Fate.DROPPED
