"""Copies parameter values between devices and host memory, some megabytes at a time, in both directions.

Law: only copies; the caller works on the values. Parameters in host memory are used in place. A device has two buffers
of bounded size: while the caller works on one, the other is filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

CHUNK_BYTES = 8 << 20
"""The largest piece that is copied at a time, and a buffer's size: large enough to use the bus well, small beside a
model."""
SLOTS = 2
"""The number of buffers of a device."""

T = TypeVar("T")


class InPlace:
    """The staging for parameters in host memory. They are used in place."""

    def through(self, chunks: Iterable[tuple[Tensor, T]], *, fetch: bool, store: bool) -> Iterator[tuple[Tensor, T]]:
        """Yield each chunk's values in host memory, with the chunk's tag. The values are valid until the next chunk is
        yielded. A chunk is flat, dense, at most `CHUNK_BYTES` long, and on any device. `fetch`: copy the chunk's values
        into host memory first; without it that memory has undefined content. `store`: copy what the caller leaves in
        that memory back into the chunk, at the latest when the iteration ends."""
        del fetch, store
        yield from chunks


class Copies:
    """Copies between a device and a buffer in host memory; `slot` is the buffer's number. Here a copy is complete when
    its call returns, which works on any device of torch. Subclasses may copy in the background."""

    pinned = False
    """Whether buffers are page-locked."""

    def begin(self) -> None:
        """Let the next copies wait for all computations that were started before, so that finished values are
        copied."""

    def fetch(self, slot: int, host: Tensor, chunk: Tensor) -> None:
        """Start to copy the chunk into the buffer."""
        host.copy_(chunk)

    def store(self, slot: int, host: Tensor, chunk: Tensor) -> None:
        """Start to copy the buffer into the chunk."""
        chunk.copy_(host)

    def wait(self, slot: int) -> None:
        """Wait until this buffer's copies are complete."""

    def end(self) -> None:
        """Let all later computations see the stored values."""


class CudaCopies(Copies):
    """Copies on a CUDA stream of their own, from and to page-locked memory, so that the host can work meanwhile. Both
    directions use one stream, so a buffer is filled again only after it was emptied."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Let the stream of the copies wait for the kernels that the trainer has launched. The host doesn't wait."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, slot: int, host: Tensor, chunk: Tensor) -> None:
        """Start to copy the chunk into the buffer. The host doesn't wait."""
        with torch.cuda.stream(self._stream):
            host.copy_(chunk, non_blocking=True)
        self._copied[slot].record(self._stream)

    def store(self, slot: int, host: Tensor, chunk: Tensor) -> None:
        """Start to copy the buffer into the chunk. The host doesn't wait."""
        with torch.cuda.stream(self._stream):
            chunk.copy_(host, non_blocking=True)
        self._copied[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        """Let the host wait until this buffer's copies are complete."""
        self._copied[slot].synchronize()

    def end(self) -> None:
        """Let the trainer's next kernels wait for the copies. The host doesn't wait."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class DeviceStaging:
    """The staging for parameters on a device. It uses two buffers in turn: the next chunk is copied while the host
    works on the present one."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=copies.pinned) for _ in range(SLOTS)]

    def through(self, chunks: Iterable[tuple[Tensor, T]], *, fetch: bool, store: bool) -> Iterator[tuple[Tensor, T]]:
        """Yield each chunk's values in a buffer, with the chunk's tag. The arguments are those of `InPlace.through`."""
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
"""Copies flat values to host memory, and back after the caller has worked on them."""


def staging_for(device: torch.device) -> Staging:
    """The staging for parameters on this device."""
    match device.type:
        case "cpu":
            return InPlace()
        case "cuda":
            return DeviceStaging(CudaCopies(device))
        case _:
            return DeviceStaging(Copies())
