"""What a trainer and its node share: the peer's settings and its model's parameters, which are the first message, and a
piece of memory: a header of numbers, θ, bases and the pseudo-gradient.

Law: plain values and memory, nothing else. Which side may use which part of the memory, and when:

    header   each slot has one writer (below); 8 bytes are read and written whole, so no lock is needed
    theta    the node writes, except while it lets the trainer read; before the start the trainer writes θ₀
    base     the node keeps the older θ here, if θ changes before the trainer has loaded the new one (`Bases`)
    delta    the trainer writes the pseudo-gradients of the due slices, and the values of due buffers, after it has
             merged; the node reads them from `contribute` on, and sends from this memory. Before the node answers a
             merge, it stops all sending of the slices that are due next

A trainer may be several processes, each with its part of the model. Then rank 0 writes the header, and tells the node
when all of them have read or written.

The memory has no name in any file system, so nothing is left behind when the processes end.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from ctypes import Structure, c_double, c_int64
from dataclasses import astuple, dataclass, fields
from typing import Any

import msgspec
import torch
from torch import Tensor

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.node.status import LastRound
from p2p_diloco.tensors.layout import ParamSpec

SAVE_S_MAX = 30.0
"""Seconds that a departing peer waits for a checkpoint that is being written. It is here, and not in `saving`, because
the trainer uses it too, and would load the whole protocol with `saving`."""

Specs = tuple[ParamSpec, ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a peer tells its node at the start. `asked`: the run settings that the peer was given. `local`: the peer's
    own settings. `specs`: the model's parameters; None for a peer without a model. `frozen`: the fingerprint of the
    model's frozen values; empty if it has none. `card`: the model's packed card; empty if it has none. `buffers`: the
    model's buffers that are exchanged (`tensors.buffers`), unless the run keeps them local. `not_finite`: names of
    parameters that have a NaN or an infinity; empty if there are none."""

    asked: RunConfig
    local: PeerConfig
    specs: Specs | None
    frozen: str = ""
    card: bytes = b""
    buffers: Specs = ()
    not_finite: str = ""

    @property
    def numel(self) -> int:
        """The number of elements of the model's parameters and buffers."""
        return sum(spec.numel for spec in (*(self.specs or ()), *self.buffers))

    @property
    def can_found(self) -> bool:
        """Whether this peer has what a founder needs: a model."""
        return self.specs is not None and self.local.role == "worker"

    def is_told_to_found(self, settings: RunConfig) -> bool:
        """Whether this peer founds the run if there is none. `settings`: the run settings that this peer was given, or
        those of its checkpoint. A peer with initial peers and none of these waits for another founder: otherwise it
        might found the run with the defaults just before the peer that has the settings."""
        local = self.local
        return local.found or bool(settings.given) or local.from_checkpoint is not None or not local.initial_peers

    def to_wire(self) -> dict[str, Any]:
        return {
            "asked": self.asked.model_dump(mode="json", exclude_unset=True),
            "local": self.local.model_dump(mode="json", exclude_unset=True),
            "frozen": self.frozen,
            "card": self.card,
            "specs": self.specs,
            "buffers": self.buffers,
            "not_finite": self.not_finite,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Setup:
        settings = {"asked": RunConfig(**wire["asked"]), "local": PeerConfig(**wire["local"])}
        specs = msgspec.convert([wire["specs"], wire["buffers"]], tuple[Specs | None, Specs])
        return cls(**{**wire, **settings, "specs": specs[0], "buffers": specs[1]})


_HEADER_BYTES = 4096
_LENT = b"m"


class Header(Structure):
    """The header's numbers, of 8 bytes each. Each number is written by one side: the first ones by the trainer, the
    others by the node."""

    # -- by the trainer

    steps: int
    """Inner steps since the start."""
    samples: int
    """Samples reported since the start."""
    stands: int
    """1 while training stands still until an exchange is over."""
    stands_since: float
    """The time, by `time.monotonic()`, since when training stands still for an exchange; 0 while training goes on."""
    step_time_s: float
    """Seconds that an inner step usually takes; 0 until known."""
    loss: float
    """The last reported loss; NaN before the first."""
    held_out_loss: float
    """The last reported held-out loss of the global parameters; NaN before the first."""
    waiting_s: float
    """Seconds that the trainer has waited for the other peers so far."""
    gpu_reserved: int
    """Bytes of GPU memory that the trainer's process holds, as of its last round; 0 without a GPU."""
    gpu_total: int
    """Bytes of memory that these GPUs have."""

    # -- by the node

    changed: int
    """Grows whenever some fragment's state has changed."""
    epoch: int
    """The lowest epoch over the fragments; -1 while no state is held."""
    finished: int
    """1 once the run has ended for all."""
    leave_s: float
    """Seconds that a departing node may stay after the run's end, until all others have the last state."""
    goal: int
    """The number of the run's commits, summed over fragments, until which a peer has asked all others to exchange after
    every inner step; 0: no peer has asked."""
    saved: int
    """The epoch of the newest checkpoint of the outer state that is written or begun; 0: none."""
    trains_for_s: float
    """With pace="time": seconds that this peer's inner steps of a round should take; inf until known."""
    peers: int
    """The number of live peers, including this peer."""
    bytes_sent: int
    bytes_received: int
    retries: int
    """How many times a message was sent and not accepted."""
    reconnections: int
    """Links that broke."""
    revision: int
    """The lowest revision over the fragments; 0: the settings at the founding."""
    outer_lr: float
    """The outer learning rate of that revision."""
    outer_momentum: float
    """The outer momentum of that revision."""

    _fields_ = [
        *((name, c_int64 if kind == "int" else c_double) for name, kind in __annotations__.items()),
        ("_round", c_double * len(fields(LastRound))),
    ]

    @property
    def last_round(self) -> LastRound | None:
        """The trainer's last round; None before the first one is over. Its numbers are written one by one, so a reader
        may get some of one round and some of the next."""
        return LastRound(*self._round) if any(self._round) else None

    @last_round.setter
    def last_round(self, value: LastRound) -> None:
        self._round[:] = astuple(value)


class SharedMemory(Header):
    """The shared memory: the header's numbers, and three flat vectors [numel] of fp32. A page takes no memory until
    it is used."""

    def __new__(cls, fd: int, numel: int) -> SharedMemory:
        """Map the memory behind the file descriptor `fd`. The descriptor may be closed afterwards."""
        memory = mmap.mmap(fd, _size(numel))
        made = cls.from_buffer(memory)
        made._map = memory
        return made

    def __init__(self, fd: int, numel: int) -> None:
        self.numel = numel
        self.theta = self._vector(_HEADER_BYTES)
        """θ, [numel] fp32."""
        self.delta = self._vector(_HEADER_BYTES + 4 * numel)
        """What was last sent, [numel] fp32: the pseudo-gradient, for which see `delta_in`, then the buffers' values."""
        self.base = self._vector(_HEADER_BYTES + 8 * numel)
        """The θ that the trainer loaded last, for the slices that `slice_work.Bases` has copied, [numel] fp32."""

    def delta_in(self, dtype: torch.dtype) -> Tensor:
        """The pseudo-gradient, [numel] of a dtype that both sides know. With a shorter dtype a part of the vector's
        memory is never used, and takes no pages. The buffers come last in `delta`, so their fp32 values lie beyond the
        pseudo-gradient of any dtype."""
        return self.delta.view(dtype)[: self.numel]

    def _vector(self, offset: int) -> Tensor:
        if not self.numel:
            return torch.empty(0, device="cpu")
        return torch.frombuffer(self._map, dtype=torch.float32, count=self.numel, offset=offset)


def create(numel: int) -> int:
    """Make zeroed memory for `numel` elements; returns its file descriptor. The memory exists as long as a process has
    it open or mapped.

    On Linux it is memory (not in /dev/shm, which is small in containers), elsewhere a deleted temporary file.
    """
    if sys.platform == "linux":
        fd = os.memfd_create("p2p-diloco")
    else:
        with tempfile.TemporaryFile(prefix="p2p-diloco-") as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _size(numel))
    return fd


def numel_of(fd: int) -> int:
    """The number of elements for which the memory behind a file descriptor was made."""
    return (os.fstat(fd).st_size - _HEADER_BYTES) // (3 * 4)


def shareable(sock: socket.socket) -> bool:
    """Whether memory can be shared with the process at the other end of a socket, because it is on this machine."""
    return sock.family == socket.AF_UNIX


def lend(fd: int, sock: socket.socket) -> None:
    """Send a file descriptor to another process on this machine, over a Unix socket."""
    socket.send_fds(sock, [_LENT], [fd])


def borrow(sock: socket.socket) -> int:
    """Receive a file descriptor that the other process has sent by `lend`. Raises OSError if none came."""
    _, fds, _, _ = socket.recv_fds(sock, len(_LENT), 1)
    if not fds:
        raise OSError("no file descriptor came")
    return fds[0]


def _size(numel: int) -> int:
    return _HEADER_BYTES + 3 * 4 * numel
