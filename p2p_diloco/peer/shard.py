"""`Shard`: this peer's part of a data set that all peers share, as training code sees it; and `Supply`: all of these.

Law: on the training thread only. A position is first in the stock, which `Supply` tells at each merge; then drawn by
the DataLoader; then delivered to the training loop; then part of a step. `Supply` hears of a position only after its
step. A position that was drawn and not delivered may be drawn again. What becomes of the positions in the local
progress follows from what a merge does with the progress of the first fragment, whose state has the tables of the data
(`core.leases`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from torch.utils.data import DataLoader, Dataset, default_collate

from p2p_diloco.core import leases
from p2p_diloco.core.leases import EPOCHS_MAX, LENGTH_MAX, WANTS_MAX, DataSet, DataUse, Lease, Table, Tables, Use
from p2p_diloco.core.spans import Spans, length, minus, taken, union, within
from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.peer.order import Collated, Numbers, Ordered, Stream, indices, stream
from p2p_diloco.peer.progress import Blend

log = logging.getLogger("p2p_diloco")

SOON = 2**16
"""A data set is told at most this many of the stock's next positions ahead."""
OURS = ("shuffle", "sampler", "batch_sampler", "drop_last", "in_order")
"""Arguments of a DataLoader that the shard decides."""
TEXT_MAX = 256
"""The most letters of a name or a fingerprint: they are in each message about the data."""
PART = 50
"""Outside a run this stands in for H, so that the stock is refilled with 2 · PART batches at a time."""


class Shard:
    """This peer's part of a data set: which samples it trains on, decided while the run goes on. Each sample of an
    epoch is used once by all peers together."""

    def __init__(self, data: DataSet, dataset: Dataset[Any], seed: str, refill: Callable[[Shard], bool]) -> None:
        """`seed`: determines the order of the samples. `refill`: gets more stock; returns False if there will be
        none."""
        self.data, self.dataset, self._seed, self._refill = data, dataset, seed, refill
        self.complete = False
        """Whether all samples of all epochs are used, as of the last merge."""
        self.used = 0
        """How many samples the swarm has used, over all epochs, as of the last merge."""
        self.epoch = 0
        """The epoch of the first sample that is not used yet, as of the last merge."""
        self.left: int | None = None
        """How many positions no peer holds or has used, as of the last merge; None if the data set has no end."""
        self.mark: tuple[int, ...] = ()
        """Changes whenever any peer has used or got some data."""
        self.batch_size = 1
        self.per_step = 0
        """Positions that the last inner step used."""
        self.stock: Spans = ()
        self.rested = False
        """Whether a loop has ended for lack of data, and no inner step has been made since."""
        self._turn = 0  # number of loops so far
        self._looping = False
        self._ahead = 0  # this many of the last delivered batches are for a later step
        self._drawn: deque[Spans] = deque()
        self._delivered: deque[Spans] = deque()
        self._stepped: Spans = ()

    def __len__(self) -> int:
        raise TypeError("a shard has no length: how much a peer trains on depends on the other peers")

    def __iter__(self) -> Iterator[Any]:
        mend = "loop over shard.loader(batch_size=...); a DataLoader of your own can't take it as its sampler"
        raise UsageError("is no sampler: a DataLoader draws samples before it delivers them", key="shard", mend=mend)

    def again(self, data: DataSet, dataset: Dataset[Any]) -> Shard:
        """Return this shard for a further call of `peer.shard`. A new one would not know which positions were used in
        steps since the last merge.

        Raises:
            ConfigError: `data` is not what was given before.
        """
        if data != self.data:
            mend = "give the same length, epochs and fingerprint, or another name"
            raise ConfigError("was given before with other values", key="name", value=data.name, mend=mend)
        self.dataset = dataset
        return self

    def loader(self, batch_size: int = 1, *, ahead: int = 0, **arguments: Any) -> ShardLoader:
        """A loader of this peer's batches. It ends when all epochs are used by the swarm, or the run has ended.
        `arguments`: those of a DataLoader. `ahead`: the number of batches that a wrapper of the loader fetches before
        the step on the first of them.

        Raises:
            ConfigError, UsageError: an argument can't be used.
        """
        for key in OURS:
            if key in arguments:
                mend = "leave it out: the run decides which samples this peer gets, and in which order"
                raise UsageError("can't be given", key=key, value=arguments[key], mend=mend)
        value: Any
        for key, value, least in (("batch_size", batch_size, 1), ("ahead", ahead, 0)):
            if not isinstance(value, int) or value < least:
                mend = f"give {least} or more"
                raise ConfigError("is no whole number, or too low", key=key, value=value, mend=mend)
        self.batch_size = batch_size
        return ShardLoader(self, batch_size, ahead, arguments)

    # -- what the loader does

    def begin(self, ahead: int) -> int:
        """Begin a loop, and return its number. Positions that an earlier loop did not use may be drawn again: those
        drawn and not delivered, and those delivered ahead of their step."""
        self._drawn.clear()
        for _ in range(min(self._ahead, len(self._delivered))):
            self._delivered.pop()
        self._ahead, self._turn, self._looping = ahead, self._turn + 1, True
        return self._turn

    def goes_on(self, turn: int) -> None:
        """Check that no newer loop has begun.

        Raises:
            UsageError: a newer loop has begun.
        """
        if turn != self._turn:
            mend = "end one loop before the next one begins; two loops at a time need two names"
            raise UsageError("is in a newer loop", key="shard", value=self.data.name, mend=mend)

    def end(self) -> None:
        """Called when no data is left for a loop: the next step uses all that was delivered."""
        self._ahead = 0

    def leave(self, turn: int) -> None:
        """Called when a loop has ended or was broken off. Unless a newer loop has begun, this peer wants no more
        data."""
        self._looping &= turn != self._turn

    def batches(self, size: int) -> Iterator[list[int]]:
        """Draw batches of samples until the stock is empty."""
        while spans := taken(self.free, size)[0]:
            self._drawn.append(spans)
            yield self.indices(spans)

    def deliver(self) -> bool:
        """Record that the loop gets the next drawn batch. Returns False if the loop must not get it, because this peer
        no longer holds all of its positions."""
        spans = self._drawn.popleft()
        if not within(spans, self.stock):
            return False
        self._delivered.append(spans)
        return True

    def pass_over(self) -> None:
        """The batch that was delivered last holds no samples. It is used at once, because no step may come after it."""
        self._stepped = union(self._stepped, self._delivered.pop())

    def indices(self, spans: Spans) -> list[int]:
        """The samples at these positions."""
        positions = _positions(spans)
        if isinstance(self.dataset, Ordered):
            found: list[int] = self.dataset.order(self._seed, positions).tolist()
        else:
            found = indices(self._seed, self.data.length, positions).tolist()
        return found

    def _tell_ahead(self) -> None:
        """Tell the data set which positions come next, if it wants to know."""
        if isinstance(self.dataset, Ordered) and (spans := taken(self.free, SOON)[0]):
            self.dataset.soon(self._seed, _positions(spans))

    def refill(self) -> bool:
        """Get more stock. Returns False if there will be none."""
        return self._refill(self)

    @property
    def unstepped(self) -> int:
        """The number of batches that the loop has got and no step has used."""
        return len(self._delivered)

    @property
    def free(self) -> Spans:
        """The positions of the stock that may be drawn now."""
        return minus(self.stock, union(self._stepped, *self._drawn, *self._delivered))

    def rest(self) -> None:
        """Called when a loop must end because no data is left for it but the batches that it has.

        Raises:
            UsageError: an earlier loop has ended for the same reason, and no step was made since.
        """
        if self.rested:
            mend = "call optimizer.step() after the loop, then loop again"
            raise UsageError("batches of the last loop are in no step", key="shard", value=self.data.name, mend=mend)
        self.rested = True
        text = "no data is left for this peer but batches that are in no step: call optimizer.step(), then loop again"
        log.info("the loop over %r ends early: %s", self.data.name, text)

    # -- what the hook does

    def stepped(self) -> None:
        """An inner step was made: what was delivered is part of it."""
        made: list[Spans] = []
        while len(self._delivered) > self._ahead:
            made.append(self._delivered.popleft())
        self.rested = False
        if spans := union(*made):
            self.per_step = length(spans)
            self._stepped = union(self._stepped, spans)

    def say(self, sync_every: int) -> tuple[Spans, int]:
        """What `Supply` is told before a merge: (the positions that steps have used since the last one, the number of
        positions that this peer wants to hold). A peer wants those of 2 · `sync_every` steps; outside of a loop it
        wants none, because others may have to wait until it has used all that it holds."""
        spans, self._stepped = self._stepped, ()
        wants = 2 * max(1, sync_every) * max(self.batch_size, self.per_step)
        return spans, min(WANTS_MAX, wants) if self._looping else 0

    def hear(self, table: Table, stock: Spans) -> None:
        """Take over the data set's table at the end of a merge, and the positions that this peer may train on."""
        new, freed = leases.ungranted(table), leases.freed(table)
        self.stock = stock
        self.complete, self.used = leases.complete(table), length(leases.used(table))
        self.left = None if new is None else new + freed
        self.epoch = leases.lowest(table) // self.data.length
        self.mark = table.next, self.used, freed
        self._tell_ahead()


class ShardLoader:
    """Yields this peer's batches. A batch is used by the next `optimizer.step()`; with `ahead`, by a later one."""

    def __init__(self, shard: Shard, batch_size: int, ahead: int, arguments: Mapping[str, Any]) -> None:
        self._shard, self._ahead = shard, ahead
        given = {"persistent_workers": bool(arguments.get("num_workers")), **arguments}
        self._streams = isinstance(shard.dataset, Stream)
        if self._streams:
            given["collate_fn"] = Collated(given.get("collate_fn") or default_collate)
        self._loader: DataLoader[Any] = DataLoader(shard.dataset, batch_sampler=_Drawn(shard, batch_size), **given)

    def __iter__(self) -> Iterator[Any]:
        shard = self._shard
        turn = shard.begin(self._ahead)
        try:
            while shard.free or shard.refill():
                for batch in self._loader:
                    if not shard.deliver():
                        continue
                    if self._streams and batch is None:
                        shard.pass_over()
                        continue
                    yield batch
                    shard.goes_on(turn)
            shard.end()
        finally:
            shard.leave(turn)


class _Drawn:
    """The batches that a shard draws, as a DataLoader asks for them."""

    def __init__(self, shard: Shard, batch_size: int) -> None:
        self._shard, self._batch_size = shard, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return self._shard.batches(self._batch_size)


class Alone:
    """Outside a run: gives all of a data set to the only peer, a part at a time, and counts the positions that the peer
    has trained on."""

    def __init__(self, data: DataSet) -> None:
        self._data, self._next = data, 0
        self._leased: Spans = ()

    def __call__(self, shard: Shard) -> bool:
        """Get more stock for the shard. Returns False if there will be none."""
        spans, wants = shard.say(PART)
        self._leased = minus(self._leased, spans)
        end, before = self._data.end, self._next
        if not minus(shard.free, spans):
            self._next = before + wants if end is None else min(end, before + wants)
        self._leased = union(self._leased, ((before, self._next),) if before < self._next else ())
        table = Table(self._data, self._next, tuple(Lease("", 0, start, stop, 0) for start, stop in self._leased))
        shard.hear(table, self._leased)
        if not shard.free and shard.unstepped:
            shard.rest()
        return bool(shard.free)


def _positions(spans: Spans) -> Numbers:
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in spans])


def data_set(
    dataset: Any, name: Any, epochs: Any, fingerprint: Any, length: Any = None
) -> tuple[DataSet, Dataset[Any]]:
    """Check the arguments of `Peer.shard`. Returns what the peers must agree on, and the data set itself. If `dataset`
    is a number of samples, the samples are the numbers from 0.

    Raises:
        ConfigError, UsageError: an argument can't be used.
    """
    found: Any = range(dataset) if isinstance(dataset, int) else dataset
    getitem = getattr(type(found), "__getitem__", Dataset.__getitem__)  # torch's own only raises an error
    if not hasattr(found, "__len__") or getitem is Dataset.__getitem__:
        found = stream(found, length, name)
    elif length is not None:
        what = "can be given for a stream only, and this data set has samples by number"
        raise UsageError(what, key="length", value=length, mend="leave it out")
    if isinstance(found, Ordered):
        fingerprint = fingerprint or found.fingerprint
    key, count = ("dataset", len(found)) if length is None else ("length", length)
    if not isinstance(count, int) or not 1 <= count <= LENGTH_MAX:
        mend = f"give a whole number of samples from 1 to {LENGTH_MAX}"
        raise ConfigError("has no samples, or too many", key=key, value=count, mend=mend)
    if epochs is not None and not (isinstance(epochs, int) and 1 <= epochs <= EPOCHS_MAX):
        mend = f"choose a whole number from 1 to {EPOCHS_MAX}, or leave it out for a run without end"
        raise ConfigError("is out of range", key="epochs", value=epochs, mend=mend)
    for key, text in (("name", name), ("fingerprint", fingerprint)):
        if not isinstance(text, str) or len(text) > TEXT_MAX:
            mend = f"give text of at most {TEXT_MAX} letters"
            raise ConfigError("is no text, or too long", key=key, value=str(text)[:40], mend=mend)
    return DataSet(name, count, epochs or 0, fingerprint), found


# -- all shards of a trainer


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
