"""Which positions of a data set are in a trainer's local progress, and which ones the trainer may still train on.

Law: pure. A position is pending exactly if its sample is in the trainer's local progress of the ledger and not in the
version that the trainer merged last. So a merge does with the pending positions what it does with the progress. A
position that leaves the progress without being counted is in the stock again at once, because the stock is computed as
the leased positions that are not pending.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import leases
from .leases import DataSet, Tables, Use
from .spans import Spans, minus, union, within


@dataclass(slots=True)
class DataUse:
    """One trainer's positions of one data set: those that are pending, and those in its last contribution (``sent``).
    ``wants``: how many positions the trainer wants to hold."""

    data: DataSet
    me: str
    life: int
    wants: int = 0
    pending: Spans = ()
    sent: Spans = ()

    def stepped(self, spans: Spans) -> None:
        """Record positions whose samples the trainer has trained on."""
        self.pending = union(self.pending, spans)

    def send(self) -> Use:
        """Return the `Use` for a contribution to the ledger, and record that this contribution is sent now."""
        self.sent = self.pending
        return Use(self.data, self.pending, self.wants)

    def count(self) -> None:
        """Record that the last contribution is counted in the version that is merged."""
        self.pending = minus(self.pending, self.sent)

    def keep_sent(self) -> None:
        """Record that only the last contribution's progress stays, because other progress is not known."""
        self.pending = self.sent

    def drop(self) -> None:
        """Record that all progress of the ledger is dropped."""
        self.pending = self.sent = ()

    def conflicts(self, tables: Tables) -> bool:
        """Whether no commit on these tables may count the pending positions, because one of them is used, or leased to
        another peer now. All local progress must then be dropped."""
        return not within(self.pending, leases.claimable(self.table(tables), self.me, self.life))

    def stock(self, tables: Tables) -> Spans:
        """Return the positions that the trainer may train on next."""
        return minus(leases.held(self.table(tables), self.me, self.life), self.pending)

    def table(self, tables: Tables) -> leases.Table | None:
        """Return the table of this data set; None if there is none of this name, or the one of this name is of a
        different data set."""
        table = leases.of(tables, self.data.name)
        return table if table is not None and table.data == self.data else None
