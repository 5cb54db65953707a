"""Slices of a data set that data nodes serve, and their samples, as training code sees them.

Law: reads files only. The node fetches them; any process and thread of the trainer may ask for them at the node's door
(`node.channel.Door`). A slice that the node has since removed from its cache is asked for again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from p2p_diloco.data.files import FORMATS
from p2p_diloco.data.manifest import Manifest
from p2p_diloco.errors import GaveUpWaiting, NodeDied
from p2p_diloco.node.channel import Message, TrainerEnd
from p2p_diloco.peer.node_client import Requests
from p2p_diloco.peer.order import Numbers, Ordered, indices

OPEN_MAX = 2
"""Slices whose samples each process keeps in memory."""
TRIES = 5
"""How often to ask for a slice, if its file is removed each time before it can be read."""


class _Door:
    """The way to the node's door. Each thread of each process has a connection of its own."""

    def __init__(self, path: str, wait_s: float) -> None:
        self._path, self._wait_s = path, wait_s
        self._mine = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Door, (self._path, self._wait_s)

    def ask(self, kind: str, answer: str, **values: Any) -> Message:
        """Send the node a request, and wait for its answer. The reasons that the node gives for a wait are logged.

        Raises:
            GaveUpWaiting: the answer did not come within `wait_timeout`. NodeDied: the node has ended. P2PDilocoError:
                the node's own error.
        """
        node = self._connected()
        self._mine.owner = 0  # the node serves what was asked here before what is asked next, unless the answer comes
        message = node.wait_for(answer, n=node.request(kind, **values), timeout_s=self._wait_s)
        if message is None:
            mend = "start a data node that serves it, or wait longer"
            why = f"is over: {node.told or 'the node does not answer'}"
            raise GaveUpWaiting(why, key="wait_timeout", value=f"{self._wait_s:g}", mend=mend)
        self._mine.owner = os.getpid()
        return message

    def tell(self, kind: str, **values: Any) -> None:
        """Tell the node something that needs no answer. If the node has ended, the next `ask` raises the error."""
        with contextlib.suppress(NodeDied):
            self._connected().tell(kind, **values)

    def _connected(self) -> Requests:
        if getattr(self._mine, "owner", 0) != os.getpid():  # a forked process has its parent's connection, too
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.connect(self._path)
            except OSError:
                sock.close()
                raise NodeDied("the node has ended", mend="see its log above") from None
            self._mine.owner, self._mine.node = os.getpid(), Requests(TrainerEnd(sock), lambda: "the node has ended")
        node: Requests = self._mine.node
        return node


class Slices(Ordered):
    """The slices of a data set: a sequence of paths. A file may be removed when other slices are fetched, so open it at
    once."""

    def __init__(self, door: _Door, name: str, manifest: Manifest) -> None:
        self._door, self.name, self.manifest = door, name, manifest
        self.fingerprint = manifest.identity
        """The data set's identity."""

    def __len__(self) -> int:
        return len(self.manifest.slices)

    def __getitem__(self, index: Any) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        asked = {"data_set": self.fingerprint, "index": int(index) % len(self)}
        return Path(self._door.ask("get", "slice", **asked)["path"])

    @property
    def samples(self) -> Samples:
        """The samples of all slices."""
        return Samples(self)

    def soon(self, seed: str, positions: Numbers) -> None:
        self.fetch_ahead(self.order(seed, positions))

    def fetch_ahead(self, slices: Numbers) -> None:
        """Have these slices fetched ahead, in this order."""
        _, first = np.unique(slices, return_index=True)
        self._door.tell("soon", data_set=self.fingerprint, indices=slices[np.sort(first)].tolist())


class Samples(Ordered):
    """The samples of a data set's slices, one slice after another. In `peer.shard` each epoch takes the slices in
    another order. Within a slice the samples come one after another, also in another order each epoch. So the swarm
    fetches each slice about once an epoch."""

    def __init__(self, slices: Slices) -> None:
        self.slices, self.fingerprint = slices, slices.fingerprint
        self._counts = np.array([one.samples for one in slices.manifest.slices], dtype=np.int64)
        self._ends: list[int] = list(accumulate(self._counts.tolist()))
        self._starts = np.cumsum(self._counts) - self._counts
        self._rows = lru_cache(OPEN_MAX)(self._read)
        self._turns = lru_cache(2)(self._turn)

    def __reduce__(self) -> tuple[Any, ...]:
        return Samples, (self.slices,)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, sample: Any) -> Any:
        if not -len(self) <= sample < len(self):
            raise IndexError(sample)
        sample = int(sample) % len(self)
        index = bisect_right(self._ends, sample)
        return self._rows(index)[sample - int(self._starts[index])]

    def order(self, seed: str, positions: Numbers) -> Numbers:
        epochs, slices, rows = self._at(seed, positions)
        for epoch, index in {*zip(epochs.tolist(), slices.tolist(), strict=True)}:
            here = (epochs == epoch) & (slices == index)
            rows[here] = indices(f"{seed}/{epoch}/{index}", int(self._counts[index]), rows[here])
        return self._starts[slices] + rows

    def soon(self, seed: str, positions: Numbers) -> None:
        self.slices.fetch_ahead(self._at(seed, positions)[1])

    def _at(self, seed: str, positions: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """The epochs, the slices, and the places within the slices, of these positions; [n] each."""
        epochs, within = np.divmod(positions, len(self))
        slices, rows = np.empty_like(within), np.empty_like(within)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            turn, ends = self._turns(seed, int(epoch))
            at = np.searchsorted(ends, within[here], side="right")
            slices[here] = turn[at]
            rows[here] = within[here] - ends[at] + self._counts[turn[at]]
        return epochs, slices, rows

    def _turn(self, seed: str, epoch: int) -> tuple[Numbers, Numbers]:
        """The order of the slices in an epoch, and the position in the epoch at which each of them ends; both
        [slices]."""
        number = len(self.slices)
        turn = indices(f"{seed}/slices", number, epoch * number + np.arange(number, dtype=np.int64))
        return turn, np.cumsum(self._counts[turn])

    def _read(self, index: int) -> Sequence[Any]:
        for left in reversed(range(TRIES)):
            try:
                return FORMATS[self.slices.manifest.form].read(self.slices[index])
            except FileNotFoundError:
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")


def open_slices(door: str, name: str, identity: str, wait_s: float) -> Slices:
    """Find a data set through the node's door; see `Peer.slices`."""
    at = _Door(door, wait_s)
    return Slices(at, name, Manifest.unpack(at.ask("open", "manifest", name=name, identity=identity)["packed"]))
