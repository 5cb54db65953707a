"""Copies parameter values between devices and host memory, some megabytes at a time, in both directions.

Law: only copies; the caller works on the values. Parameters in host memory are used in place. A device has two buffers
of bounded size: while the caller works on one, the other is filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from p2p_diloco.peer.devices import SLOTS, Copies, copies_for

CHUNK_BYTES = 8 << 20
"""The largest piece that is copied at a time, and a buffer's size: large enough to use the bus well, small beside a
model."""
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


class DeviceStaging:
    """The staging for parameters on a device. It uses two buffers in turn: the next chunk is copied while the host
    works on the present one."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._buffers = [
            torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=copies.pinned, device="cpu") for _ in range(SLOTS)
        ]

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
    copies = copies_for(device)
    return InPlace() if copies is None else DeviceStaging(copies)
