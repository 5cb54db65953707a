"""The data of one trainer: which positions are in its local progress, and what a new state leaves it to train on.

Law: on the training thread. What becomes of the positions follows from what a merge does with the progress of the
first fragment, whose state has the tables of the data (`core.data_use`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from p2p_diloco.core import leases
from p2p_diloco.core.data_use import DataUse
from p2p_diloco.core.leases import Table, Tables, Use
from p2p_diloco.errors import ConfigError
from p2p_diloco.peer.progress import Blend
from p2p_diloco.peer.shard import Shard


class Supply:
    """The shards of one trainer, by the names of the data sets."""

    def __init__(self, share: float) -> None:
        """`share`: the part of local values that stays where they are mixed with the global ones."""
        self.shards: dict[str, Shard] = {}
        self._uses: dict[str, DataUse] = {}
        self._share = share

    def add(self, shard: Shard, told: dict[str, Any]) -> None:
        """Add a shard. `told`: the node's answer: positions are leased to the life `life` of the peer `me`; `tables`:
        those of the data, as far as they are known; `ended`: whether the run has ended.

        Raises:
            ConfigError: the run's data set of this name is another one, or it has too many.
        """
        use, tables = DataUse(shard.data, told["me"], told["life"]), tables_of(told["tables"])
        shard.hear(_known(use, tables), () if told["ended"] else use.stock(tables))
        self.shards[use.data.name], self._uses[use.data.name] = shard, use

    def stepped(self) -> None:
        """An inner step was made."""
        for shard in self.shards.values():
            shard.stepped()

    def gather(self, sync_every: int) -> bool:
        """Before a merge, find out what the steps since the last one have used. Returns whether there is any data
        set."""
        for name, use in self._uses.items():
            spans, use.wants = self.shards[name].say(sync_every)
            use.stepped(spans)
        return bool(self._uses)

    def merge(self, blend: Blend | None) -> None:
        """Record what a merge does with the progress of the first fragment."""
        for use in self._uses.values():
            if blend is Blend.SENT:
                use.keep_sent()
            elif blend is Blend.SINCE or (blend is Blend.MIX and self._share):
                use.count()
            elif blend in (Blend.NONE, Blend.MIX):
                use.drop()

    def conflicts(self, tables: Tables) -> bool:
        """Whether a position in the local progress can't be counted any more, because by these tables it is used or
        leased to another peer. All local progress must then be dropped."""
        return any(use.conflicts(tables) for use in self._uses.values())

    def hear(self, tables: Tables, *, ended: bool) -> None:
        """Take over the merged state's tables.

        Raises:
            ConfigError: the run's data set of a shard's name is another one, or it has too many.
        """
        for name, use in self._uses.items():
            self.shards[name].hear(_known(use, tables), () if ended else use.stock(tables))

    def send(self, fragment: int) -> list[Use]:
        """What a contribution to this fragment says of the data. Only one to the first fragment lists positions."""
        return [Use(use.data, (), use.wants) if fragment else use.send() for use in self._uses.values()]


def tables_of(plain: Sequence[Any]) -> Tables:
    """Read tables that the node has told as plain values."""
    return msgspec.convert(plain, Tables)


def _known(use: DataUse, tables: Tables) -> Table:
    """The run's table of a data set; an empty one if the run has none yet.

    Raises:
        ConfigError: the run's data set of this name is another one, or it has too many.
    """
    data, theirs = use.data, leases.of(tables, use.data.name)
    if theirs is None and len(tables) >= leases.TABLES_MAX:
        what = f"is one too many: the run has the data sets {', '.join(repr(one.data.name) for one in tables)}"
        raise ConfigError(what, key="name", value=data.name, mend="use one of these")
    table = theirs or Table(data)
    for key in ("length", "epochs", "fingerprint"):
        own, run = getattr(data, key), getattr(table.data, key)
        if own != run:
            where = f"{run!r} in the run's data set {data.name!r}"
            raise ConfigError(f"is {where}", key=key, value=own, mend=f"give {run!r}, or another name")
    return table
