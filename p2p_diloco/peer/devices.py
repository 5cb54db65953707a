"""All that depends on the kind of a device: copies, streams, random states, and waiting for started work.

Law: no other module of the package names CUDA, except the one that `plan --measure` puts into a user's script
(`cli/plan/timing`). Everything else uses calls that torch supports on every device, so a kind of device that is not
named here works, too, but its copies are not made in the background.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from p2p_diloco.errors import ConfigError

SLOTS = 2
"""The number of a device's buffers in host memory (`Staging`)."""


class Copies:
    """Copies between a device and a buffer in host memory; `slot` is the buffer's number. Here a copy is complete when
    its call returns, which works on any device of torch. Subclasses may copy in the background."""

    pinned = False
    """Whether buffers are page-locked."""

    def begin(self) -> None:
        """Let the next copies wait for all computations that were started before, so that finished values are
        copied."""

    def copy(self, slot: int, source: Tensor, target: Tensor) -> None:
        """Start to copy a chunk into the buffer, or the buffer into a chunk."""
        target.copy_(source)

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

    def copy(self, slot: int, source: Tensor, target: Tensor) -> None:
        """Start to copy a chunk into the buffer, or the buffer into a chunk. The host doesn't wait."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._copied[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        """Let the host wait until this buffer's copies are complete."""
        self._copied[slot].synchronize()

    def end(self) -> None:
        """Let the trainer's next kernels wait for the copies. The host doesn't wait."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def numbered(kind: str) -> torch.device:
    """The device of this kind that the process uses."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def usable(name: str) -> torch.device:
    """The device of this name.

    Raises:
        ConfigError: this machine has no such device, or torch can't use it.
    """
    try:
        return torch.zeros(1, dtype=torch.uint8, device=name).device
    except (RuntimeError, AssertionError) as error:  # which of these torch raises depends on the device
        wrong = f"can't be used here ({str(error).splitlines()[0]})"
        raise ConfigError(wrong, key="device", value=name, mend="choose e.g. the default, cpu") from None


def finish(device: torch.device) -> None:
    """Wait until the work that was started on this device is done, so that its time can be measured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_reserved() -> tuple[int, int]:
    """The bytes of memory that torch holds for this process on the CUDA devices that it uses, and the bytes of memory
    that these devices have. Zeros if this process uses none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0, 0  # any other question would start CUDA
    held = [torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count())]
    used = [device for device, reserved in enumerate(held) if reserved]
    return sum(held), sum(torch.cuda.get_device_properties(device).total_memory for device in used)


def random_states() -> list[Tensor]:
    """The states of the random generators of all CUDA devices that this process may use. Empty if this process has not
    used any such device yet. The state of the CPU's generator is not included; `torch.get_rng_state` has it."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def restore_random_states(states: Sequence[Tensor]) -> None:
    """Restore what `random_states` returned, unless this machine has another number of devices."""
    if torch.cuda.is_initialized() and len(states) == torch.cuda.device_count():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state_all(states)


# -- staging

CHUNK_BYTES = 8 << 20
"""The largest piece that is copied at a time, and a buffer's size: large enough to use the bus well, small beside a
model."""
T = TypeVar("T")


class Staging:
    """Copies flat values of a device to host memory, and back after the caller has worked on them. It uses two buffers
    in turn: the next chunk is copied while the host works on the present one."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._buffers = [
            torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=copies.pinned, device="cpu") for _ in range(SLOTS)
        ]

    def through(self, chunks: Iterable[tuple[Tensor, T]], *, fetch: bool, store: bool) -> Iterator[tuple[Tensor, T]]:
        """Yield each chunk's values in host memory, with the chunk's tag. The values are valid until the next chunk is
        yielded. A chunk is flat, dense, at most `CHUNK_BYTES` long, and on the device. `fetch`: copy the chunk's values
        into host memory first; without it that memory has undefined content. `store`: copy what the caller leaves in
        that memory back into the chunk, at the latest when the iteration ends."""
        self._copies.begin()
        try:
            ready: tuple[int, Tensor, Tensor, T] | None = None
            for number, (chunk, tag) in enumerate(chunks):
                slot = number % SLOTS
                host = self._buffers[slot][: chunk.numel() * chunk.element_size()].view(chunk.dtype)
                if fetch:
                    self._copies.copy(slot, chunk, host)
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
            self._copies.copy(slot, host, chunk)


def staging_for(device: torch.device) -> Staging | None:
    """The staging for parameters on this device; None: they lie in host memory, and are used in place."""
    match device.type:
        case "cpu":
            return None
        case "cuda":
            return Staging(CudaCopies(device))
        case _:
            return Staging(Copies())
