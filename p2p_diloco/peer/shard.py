"""`Shard`: this peer's part of a data set that all peers share, as training code sees it.

Law: on the training thread only. A position is drawn from the stock that the node told at the last merge, then
delivered to the loop, then part of a step; only then the node hears of it. What is drawn and not delivered goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from p2p_diloco.core.leases import EPOCHS_MAX, LENGTH_MAX, DataSet
from p2p_diloco.core.spans import Spans, length, minus, taken, union, within
from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.peer.order import indices

OURS = ("shuffle", "sampler", "batch_sampler", "drop_last")
"""Arguments of a DataLoader that the shard decides."""
PART = 50
"""Outside a run: half the batches that are got at a time."""


class Shard(Sampler[int]):
    """This peer's part of a data set: which samples it trains on, decided while the run goes on. Each sample of an
    epoch is used once by all peers together."""

    def __init__(
        self, data: DataSet, dataset: Dataset[Any] | None, seed: str, refill: Callable[[Shard], bool], ahead: int = 0
    ) -> None:
        """`refill`: gets more stock, or returns False if there will be none. `seed`: of the order."""
        self.data, self._dataset, self._seed, self._refill = data, dataset, seed, refill
        self.complete = False
        """Whether all samples of all epochs are used, as of the last merge."""
        self.used = 0
        """How many samples the swarm has used, over all epochs, as of the last merge."""
        self.epoch = 0
        """The epoch of the first sample that is not used yet, as of the last merge."""
        self.ahead = ahead
        self.mark: tuple[int, ...] = ()
        """Changes whenever any peer has used or got some data."""
        self.batch_size = 1
        self.per_step = 0
        """Positions that the last inner step used."""
        self.stock: Spans = ()
        self._drawn: deque[Spans] = deque()
        self._delivered: deque[Spans] = deque()
        self._stepped: Spans = ()

    def __len__(self) -> int:
        raise TypeError("a shard has no length: how much a peer trains on depends on the other peers")

    def __iter__(self) -> Iterator[int]:
        """Yield samples one by one, for a DataLoader with `sampler=shard` and without workers. A sample counts as
        delivered when it is drawn."""
        for spans in self._batches(1, again=True):
            self._delivered.append(spans)
            self._drawn.clear()
            yield self.indices(spans)[0]

    def loader(self, batch_size: int = 1, *, ahead: int = 0, **arguments: Any) -> ShardLoader:
        """A loader of this peer's batches. It ends when all epochs are used by the swarm, or the run has ended.
        `arguments`: those of a DataLoader. `ahead`: the batches that a wrapper fetches before it steps on the first.

        Raises:
            ConfigError, UsageError: an argument can't be used.
        """
        for key in OURS:
            if key in arguments:
                mend = "leave it out: the run decides which samples this peer gets, and in which order"
                raise UsageError("can't be given", key=key, value=arguments[key], mend=mend)
        if batch_size < 1:
            raise ConfigError("must be at least 1", key="batch_size", value=batch_size, mend="choose e.g. 32")
        if self._dataset is None:
            mend = "give the data set instead: peer.shard(dataset)"
            raise UsageError("knows only the length of its data set", key="shard", value=self.data.length, mend=mend)
        self.batch_size, self.ahead = batch_size, ahead
        return ShardLoader(self, self._dataset, batch_size, arguments)

    def indices(self, spans: Spans) -> list[int]:
        """The samples at these positions."""
        positions = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in spans])
        found: list[int] = indices(self._seed, self.data.length, positions).tolist()
        return found

    # -- what the loader does

    def begin(self) -> None:
        """Give back what was drawn and not delivered."""
        self._drawn.clear()

    def _batches(self, size: int, *, again: bool = False) -> Iterator[Spans]:
        """Draw batches until the stock is empty; with `again` until there will be no more."""
        while True:
            spans, _ = taken(self.free, size)
            if spans:
                self._drawn.append(spans)
                yield spans
            elif not again or not self._refill(self):
                return

    def batches(self, size: int) -> Iterator[list[int]]:
        """Draw batches of samples until the stock is empty."""
        return map(self.indices, self._batches(size))

    def deliver(self) -> bool:
        """Record that the loop gets the next batch. Returns False if it must not, because another peer has it now."""
        spans = self._drawn.popleft()
        if not within(spans, self.stock):
            return False
        self._delivered.append(spans)
        return True

    def refill(self) -> bool:
        """Get more stock. Returns False if there will be none."""
        return self._refill(self)

    @property
    def free(self) -> Spans:
        """The positions that may be drawn."""
        return minus(self.stock, union(self._stepped, *self._drawn, *self._delivered))

    # -- what the hook does

    def stepped(self) -> None:
        """An inner step was made: what was delivered is part of it."""
        made: list[Spans] = []
        while len(self._delivered) > self.ahead:
            made.append(self._delivered.popleft())
        spans = union(*made)
        if spans:
            self.per_step = length(spans)
            self._stepped = union(self._stepped, spans)

    def say(self, sync_every: int) -> tuple[Spans, int]:
        """What the node is told with a merge request: the positions of the steps since the last one, and how many
        positions this peer wants to hold: those of two rounds."""
        spans, self._stepped = self._stepped, ()
        return spans, 2 * max(1, sync_every) * max(self.batch_size, self.per_step)

    def hear(self, told: Mapping[str, Any]) -> None:
        """Take over what the node tells at the end of a merge.

        Raises:
            ConfigError: the run's data set of this name is another one.
        """
        theirs, data = told["theirs"], self.data
        mine = [data.length, data.epochs, data.fingerprint]
        for key, own, run in zip(("length", "epochs", "fingerprint"), mine, theirs or mine, strict=True):
            if own != run:
                where = f"{run!r} in the run's data set {data.name!r}"
                raise ConfigError(f"is {where}", key=key, value=own, mend=f"give {run!r}, or another name")
        self.stock = tuple((start, stop) for start, stop in told["stock"])
        self.complete, self.used = told["complete"], told["used"]
        self.epoch = told["lowest"] // data.length
        self.mark = told["next"], told["used"], told["freed"]


class ShardLoader:
    """Yields this peer's batches. Each counts as used when an `optimizer.step()` has come after it."""

    def __init__(self, shard: Shard, dataset: Dataset[Any], batch_size: int, arguments: Mapping[str, Any]) -> None:
        self._shard = shard
        workers = arguments.get("num_workers", 0)
        given = {"persistent_workers": bool(workers), **arguments}
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=_Drawn(shard, batch_size), **given)

    def __iter__(self) -> Iterator[Any]:
        shard = self._shard
        while True:
            shard.begin()
            try:
                for batch in self._loader:
                    if shard.deliver():
                        yield batch
            except Exception:
                shard.begin()
                raise
            if not shard.free and not shard.refill():
                return


class _Drawn(BatchSampler):
    """The batches that a shard draws, as a DataLoader asks for them."""

    def __init__(self, shard: Shard, batch_size: int) -> None:
        self.batch_size, self.drop_last, self.sampler = batch_size, False, shard
        self._shard = shard

    def __iter__(self) -> Iterator[list[int]]:
        return self._shard.batches(self.batch_size)

    def __len__(self) -> int:
        return len(self._shard)


class Alone:
    """Gives all of a data set to the only peer, a part at a time, and counts what it has trained on."""

    def __init__(self, data: DataSet) -> None:
        self._data, self._next, self._used = data, 0, 0
        self._leased: Spans = ()

    def __call__(self, shard: Shard) -> bool:
        """Get more stock for the shard. Returns False if there will be none."""
        spans, wants = shard.say(PART)
        self._leased, self._used = minus(self._leased, spans), self._used + length(spans)
        end, before = self._data.end, self._next
        if not minus(shard.free, spans):
            self._next = before + wants if end is None else min(end, before + wants)
        self._leased = union(self._leased, ((before, self._next),) if before < self._next else ())
        lowest = self._leased[0][0] if self._leased else self._next
        told = {"stock": self._leased, "complete": self._used == end, "used": self._used, "lowest": lowest}
        shard.hear({**told, "next": self._next, "freed": 0, "theirs": None})
        return bool(shard.free)


def data_set(dataset: Any, name: str, epochs: int | None, fingerprint: str) -> tuple[DataSet, Dataset[Any] | None]:
    """What the peers must agree on, and the data set itself; None if only its length is given.

    Raises:
        ConfigError, UsageError: an argument can't be used.
    """
    found = None if isinstance(dataset, int) else dataset
    if found is not None and not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        mend = "give a data set with a length and samples by number, or the number of samples"
        raise UsageError("has no length", key="dataset", value=type(dataset).__name__, mend=mend)
    count = dataset if isinstance(dataset, int) else len(dataset)
    if not 1 <= count <= LENGTH_MAX:
        raise ConfigError("has no samples, or too many", key="dataset", value=count, mend="give 1 sample or more")
    if epochs is not None and not 1 <= epochs <= EPOCHS_MAX:
        mend = f"choose 1 to {EPOCHS_MAX}, or leave it out for a run without end"
        raise ConfigError("is out of range", key="epochs", value=epochs, mend=mend)
    return DataSet(name, count, epochs or 0, fingerprint), found
