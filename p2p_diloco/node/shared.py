"""The memory that a trainer and its node share: a header of numbers, θ, its past and the pseudo-gradient.

Law: memory and nothing else. Who may touch what, and when:

    header   each slot has one writer (below); 8 bytes are read and written whole, so no lock is needed
    theta    the node writes, except while it lets the trainer read; before the start the trainer writes θ₀
    base     the node keeps here what θ was, where it goes on before the trainer has loaded that (`bases`)
    delta    the trainer writes what is due, after it has merged; the node reads it from `contribute` on, and sends from
             here, until it is about to answer a merge: then nothing of what is due may be on its way any more

A trainer may be several processes, each with its part of the model. Then rank 0 writes the header, and speaks with the
node once all of them have read or written.

It has no name in any file system, so nothing is left behind however the two end.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_HEADER_BYTES = 4096
_SLOT_BYTES = 8
_LENT = b"m"


class Count(IntEnum):
    """Slots of whole numbers."""

    STEPS = 0
    """Trainer: inner steps since the start."""
    SAMPLES = 1
    """Trainer: samples reported since the start."""
    CHANGED = 2
    """Node: grows whenever some shard's state has changed."""
    EPOCH = 3
    """Node: the lowest epoch over the shards; -1 while no state is held."""
    FINISHED = 4
    """Node: 1 once the run has ended for all."""
    PEERS = 5
    """Node: live peers, this one included."""
    BYTES_SENT = 6
    """Node: bytes of messages sent."""
    BYTES_RECEIVED = 7
    """Node: bytes of messages received."""
    RETRIES = 8
    """Node: messages that could not be delivered at once."""
    RECONNECTIONS = 9
    """Node: links that broke."""
    GOAL = 10
    """Node: the commits, summed over fragments, up to which a peer asks all to exchange at once."""
    STANDS = 11
    """Trainer: 1 while training stands still until an exchange is over."""
    SAVED = 12
    """Node: the epoch of the newest checkpoint of the outer state that is written or begun; 0: none."""
    REVISION = 20
    """Node: the lowest revision over the shards; 0: as the run was founded."""


class Level(IntEnum):
    """Slots of real numbers."""

    STEP_TIME_S = 32
    """Trainer: what an inner step usually takes; 0 until known."""
    LOSS = 33
    """Trainer: the loss last reported; NaN until then."""
    WAITING_S = 34
    """Trainer: how long it has waited for the others so far."""
    STANDS_SINCE = 35
    """Trainer: since when it stands still until an exchange is over, as `time.monotonic()`; 0 while it does not."""
    ROUND = 36
    """Trainer: the first of several, what became of its last round's time (`ledger.SHARES`); all 0 before one is over.
    They are written one by one, for people to look at: one look may see two rounds' figures."""
    TRAINS_FOR_S = 47
    """Node, with pace="time": how long this peer's inner steps of a round should take; inf while that is not known."""
    OUTER_LR = 48
    """Node: the outer learning rate of that revision."""
    OUTER_MOMENTUM = 49
    """Node: its outer momentum."""


class SharedMemory:
    """The header, and θ, the pseudo-gradient and what progress is measured from, [numel] each, flat fp32. What is
    never touched of them is never taken."""

    def __init__(self, fd: int, numel: int) -> None:
        """Map what lies behind a file descriptor; it may be closed afterwards."""
        self.numel = numel
        self._map = mmap.mmap(fd, _size(numel))
        view = memoryview(self._map)[:_HEADER_BYTES]
        self._counts, self._levels = view.cast("q"), view.cast("d")
        self.theta = self._vector(_HEADER_BYTES)
        """θ, [numel] fp32."""
        self.delta = self._vector(_HEADER_BYTES + 4 * numel)
        """The pseudo-gradient that was last sent, fragment by fragment, [numel] fp32; see `delta_in`."""
        self.base = self._vector(_HEADER_BYTES + 8 * numel)
        """What θ was when the trainer loaded it, of the shards that `bases.Bases` names, [numel] fp32."""

    def count(self, slot: Count) -> int:
        """A whole number."""
        return self._counts[slot]

    def set_count(self, slot: Count, value: int) -> None:
        """Write a whole number."""
        self._counts[slot] = value

    def level(self, slot: Level) -> float:
        """A real number."""
        return self._levels[slot]

    def set_level(self, slot: Level, value: float) -> None:
        """Write a real number."""
        self._levels[slot] = value

    def levels(self, first: Level, count: int) -> list[float]:
        """Real numbers side by side."""
        return [self._levels[first + index] for index in range(count)]

    def set_levels(self, first: Level, values: Sequence[float]) -> None:
        """Write real numbers side by side."""
        for index, value in enumerate(values):
            self._levels[first + index] = value

    def delta_in(self, dtype: torch.dtype) -> Tensor:
        """The pseudo-gradient, [numel] of a dtype that both sides know. What a shorter one doesn't need of the memory
        is never touched, and so never taken."""
        return self.delta.view(dtype)[: self.numel]

    def _vector(self, offset: int) -> Tensor:
        if not self.numel:
            return torch.empty(0)
        return torch.frombuffer(self._map, dtype=torch.float32, count=self.numel, offset=offset)


def create(numel: int) -> int:
    """A file descriptor with room for `numel` elements, zeroed; it lives as long as a process holds or maps
    it.

    On Linux it is memory (not in /dev/shm, which is small in containers), elsewhere a deleted temporary file.
    """
    if sys.platform == "linux":
        fd = os.memfd_create("p2p-diloco")
    else:
        with tempfile.TemporaryFile(prefix="p2p-diloco-") as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _size(numel))
    return fd


def lend(fd: int, sock: socket.socket) -> None:
    """Give another process on this machine, at the other end of a Unix socket, what lies behind a file descriptor."""
    socket.send_fds(sock, [_LENT], [fd])


def borrow(sock: socket.socket) -> int:
    """A file descriptor that the other end lent; OSError if none came."""
    _, fds, _, _ = socket.recv_fds(sock, len(_LENT), 1)
    if not fds:
        raise OSError("no file descriptor came")
    return fds[0]


def _size(numel: int) -> int:
    return _HEADER_BYTES + 3 * 4 * numel
