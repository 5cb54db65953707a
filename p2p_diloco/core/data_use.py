"""Which positions of a data set are in a trainer's local progress, and which it may still train on.

Law: pure. A position is pending exactly if its sample is in the trainer's local progress of the ledger and not in the
version that the trainer merged last. So what becomes of the progress at a merge becomes of the positions, too; and a
position that leaves the progress without being counted comes again by itself, because the stock is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from . import leases
from .leases import DataSet, Tables, Use
from .spans import Spans, minus, union, within


class Fate(Enum):
    """What a merge does with a trainer's local progress of the ledger. Sent: in its last contribution."""

    KEEP = "keep"  # all stays
    COUNTED = "counted"  # what was sent is in the new version
    RESTORED = "restored"  # what was sent was in the base, but is not in the new version
    SENT = "sent"  # only what was sent is known
    COUNTED_ALONE = "counted alone"  # what was sent is in the new version, and all other progress is dropped
    DROPPED = "dropped"  # all progress is dropped


@dataclass(slots=True)
class DataUse:
    """The positions of one data set that one trainer has pending, and those in its last contribution."""

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
        """Return what a contribution to the ledger says that is sent now."""
        self.sent = self.pending
        return Use(self.data, self.pending, self.wants)

    def merge(self, fate: Fate) -> None:
        """Record what a merge has done with the local progress of the ledger."""
        match fate:
            case Fate.COUNTED:
                self.pending = minus(self.pending, self.sent)
            case Fate.RESTORED:
                self.pending = union(self.pending, self.sent)
            case Fate.SENT:
                self.pending = self.sent
            case Fate.COUNTED_ALONE:
                self.pending = ()
            case Fate.DROPPED:
                self.pending = self.sent = ()

    def conflicts(self, tables: Tables) -> bool:
        """Whether no commit on these tables may count what is pending: a position is used, or leased to another peer
        now. All local progress must then be dropped."""
        return not within(self.pending, leases.claimable(self.table(tables), self.me, self.life))

    def stock(self, tables: Tables) -> Spans:
        """Return the positions that the trainer may train on next."""
        return minus(leases.held(self.table(tables), self.me, self.life), self.pending)

    def table(self, tables: Tables) -> leases.Table | None:
        """Return the table of this data set; None if it is not opened, or belongs to a data set that differs."""
        table = leases.of(tables, self.data.name)
        return table if table is not None and table.data == self.data else None
