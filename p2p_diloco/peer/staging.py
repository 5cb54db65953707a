"""Between the devices that hold parameters and host memory: some megabytes at a time, there and back.

Law: copies alone; the caller works on the values. Parameters in host memory are handed out where they are. A device
has two buffers of bounded size: while the caller works on one, the other is filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

CHUNK_BYTES = 8 << 20
"""The largest piece that is copied at a time, and a buffer's size: long enough for a bus, short beside a model."""
SLOTS = 2
"""Buffers of a device."""

T = TypeVar("T")


class InPlace:
    """Parameters in host memory: they are worked on where they are."""

    def through(self, chunks: Iterable[tuple[Tensor, T]], *, fetch: bool, store: bool) -> Iterator[tuple[Tensor, T]]:
        """For each chunk (flat, dense, at most `CHUNK_BYTES`, wherever it is) its values in host memory, until the
        next is asked for, with what came along with it. `fetch`: they are the chunk's; else they are anything.
        `store`: what the caller leaves there becomes the chunk's, at the latest when the iteration has ended.
        """
        del fetch, store
        yield from chunks


class Copies:
    """How values are copied between a device and a buffer, of which `slot` tells which. These copies are over when the
    call returns: so on any device that torch knows.
    """

    pinned = False
    """Whether buffers are page-locked."""

    def begin(self) -> None:
        """What was computed so far is to be seen."""

    def fetch(self, slot: int, host: Tensor, chunk: Tensor) -> None:
        """Begin to copy into the buffer."""
        host.copy_(chunk)

    def store(self, slot: int, host: Tensor, chunk: Tensor) -> None:
        """Begin to copy out of it."""
        chunk.copy_(host)

    def wait(self, slot: int) -> None:
        """Until the copies of this buffer are over."""

    def end(self) -> None:
        """What is computed from now on is to see what was stored."""


class CudaCopies(Copies):
    """Copies on a stream beside the one that trains, from and to page-locked memory, so that host and bus work at the
    same time. One stream for both ways: a buffer is filled again only after it was emptied.
    """

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """The stream waits for the kernels that the trainer has launched; the trainer does not."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, slot: int, host: Tensor, chunk: Tensor) -> None:
        """As `Copies`."""
        with torch.cuda.stream(self._stream):
            host.copy_(chunk, non_blocking=True)
        self._copied[slot].record(self._stream)

    def store(self, slot: int, host: Tensor, chunk: Tensor) -> None:
        """As `Copies`."""
        with torch.cuda.stream(self._stream):
            chunk.copy_(host, non_blocking=True)
        self._copied[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        """The host stands until then."""
        self._copied[slot].synchronize()

    def end(self) -> None:
        """The trainer's next kernels wait for the copies, the host does not."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class DeviceStaging:
    """Parameters on a device, through two buffers in turns: the copy of the next chunk is under way while the host
    works on this one.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=copies.pinned) for _ in range(SLOTS)]

    def through(self, chunks: Iterable[tuple[Tensor, T]], *, fetch: bool, store: bool) -> Iterator[tuple[Tensor, T]]:
        """As `InPlace.through`."""
        self._copies.begin()
        try:
            ready: tuple[int, Tensor, Tensor, T] | None = None
            for number, (chunk, tag) in enumerate(chunks):
                slot = number % SLOTS
                host = self._buffers[slot][: chunk.numel() * chunk.element_size()].view(chunk.dtype)
                if fetch:
                    self._copies.fetch(slot, host, chunk)
                if ready is not None:
                    yield from self._turn(*ready, store=store)
                ready = slot, host, chunk, tag
            if ready is not None:
                yield from self._turn(*ready, store=store)
        finally:
            self._copies.end()

    def _turn(self, slot: int, host: Tensor, chunk: Tensor, tag: T, *, store: bool) -> Iterator[tuple[Tensor, T]]:
        self._copies.wait(slot)
        yield host, tag
        if store:
            self._copies.store(slot, host, chunk)


Staging = InPlace | DeviceStaging
"""Brings flat values into host memory, and back once they were worked on."""


def staging_for(device: torch.device) -> Staging:
    """How values are staged between host memory and a device."""
    match device.type:
        case "cpu":
            return InPlace()
        case "cuda":
            return DeviceStaging(CudaCopies(device))
        case _:
            return DeviceStaging(Copies())
