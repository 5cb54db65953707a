"""Walks over flat vectors in host memory, piece by piece, in one thread or several, and computes the pseudo-gradient.

Law: views and one subtraction, independent of the meaning of a vector's elements. Bytes of tensors are little-endian.

Element-wise work on flat vectors goes block by block, and through numpy: the overhead of a call is four times as large
in torch as in numpy, and would be a third of the time that a block takes. torch and numpy round the same, and both let
other threads run meanwhile, if torch doesn't divide a piece itself. A result has the same bits for any number of
threads, because every element is computed by the same operations.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"
"""Flat fp32 in host memory."""

BLOCK = 1 << 17
"""Elements of a block of work, chosen so that several fp32 blocks fit into the last-level cache. Blocks of half the
size take 10 % more time, of eight times the size 50 % more."""
UNDIVIDED = 1 << 15
"""So few elements torch doesn't divide among its threads. On busy cores, waiting for threads takes many times as long
as the work."""


def undivided() -> int:
    """Return the elements of a block that torch computes in the calling thread alone."""
    return UNDIVIDED if torch.get_num_threads() > 1 else BLOCK


def blocks(*tensors: Tensor, size: int | None = None) -> Iterator[tuple[Tensor, ...]]:
    """Return views of equally long flat tensors, block by block, for element-wise work without long temporaries."""
    return zip(*(torch.split(tensor, size or BLOCK) for tensor in tensors), strict=True)


def arrays(first: Iterable[Tensor], *others: Tensor) -> Iterator[tuple[Array, ...]]:
    """Yield each piece of a flat vector (`first`) together with the same range of all `others`. No piece is longer than
    `BLOCK`."""
    whole = [other.numpy() for other in others]
    start = 0
    for piece in first:
        values = piece.numpy()
        stop = start + len(values)
        yield values, *[array[start:stop] for array in whole]
        start = stop
    if any(len(array) != start for array in whole):
        raise ValueError(f"expected {[len(array) for array in whole]} elements, found {start}")


unheeded = np.errstate(over="ignore", invalid="ignore")
"""Decorator for work on values that may not be finite, which are detected elsewhere."""


class Finite:
    """Whether all values of the blocks that it was given are finite."""

    def __init__(self) -> None:
        self.finite = True

    @unheeded
    def __call__(self, block: Array) -> None:
        """Add a block; several threads may. The sum takes one pass; it isn't finite if a value isn't, or if it is too
        large itself."""
        if not math.isfinite(np.add.reduce(block)) and not (math.isfinite(block.max()) and math.isfinite(block.min())):
            self.finite = False


def copy(values: Tensor, out: Tensor) -> None:
    """Copy flat values into `out`, rounded to its dtype, in the calling thread alone. fp32 is copied as a whole."""
    if values.dtype == out.dtype == torch.float32:
        np.copyto(out.numpy(), values.numpy())
        torch.autograd.graph.increment_version(out)  # else a backward pass would not notice that it changed
    else:
        for piece, target in blocks(values, out, size=undivided()):
            target.copy_(piece)


@torch.no_grad()
def pseudo_gradient(base: Tensor, local: Tensor, out: Tensor) -> None:
    """Compute base − local in fp32, and write it into `out`, rounded to the dtype of `out`.

    All three are flat and in host memory; `out` must not be `base`. `base`: the global values that were loaded into the
    model, rounded to `local`'s dtype or not. The sign is a gradient's: the outer optimizer descends along it (arXiv
    2311.08105, Alg. 1, line 12).
    """
    for anchors, values, parts in blocks(base, local, out, size=undivided()):
        if values.dtype != torch.float32:  # three calls take a quarter of the time, also if they change nothing
            anchors, values = anchors.to(values.dtype).to(torch.float32), values.to(torch.float32)
        torch.sub(anchors, values, out=parts)


# -- threads

USUAL_MAX = 8


def usual() -> int:
    """The usual number of threads: a quarter of the cores that this process may use, from 1 to `USUAL_MAX`. The other
    cores are for training."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(USUAL_MAX, cores // 4))


class Threads:
    """A fixed number of threads, the caller's own included. `count` 1: all work is done by the caller."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._pool = None if count == 1 else ThreadPoolExecutor(count - 1, thread_name_prefix="tensors")

    def over(self, numel: int, work: Callable[[slice], None]) -> None:
        """Call `work` for ranges that together cover `numel` elements once, and return when all are done. A range
        begins at a multiple of `BLOCK`. Raises an error of `work`."""
        count = -(-numel // BLOCK)
        each = -(-count // self.count) * BLOCK
        self.all(*(lambda a=a: work(slice(a, min(a + each, numel))) for a in range(0, numel, each)))

    def all(self, *tasks: Callable[[], None]) -> None:
        """Carry out all tasks, and return when all are done. Raises the error of the first that failed."""
        if self._pool is None or len(tasks) < 2:
            for task in tasks:
                task()
            return
        others = [self._pool.submit(task) for task in tasks[1:]]
        try:
            tasks[0]()
        finally:
            errors = [other.exception() for other in others]  # waits for each: they use the caller's memory
        for error in errors:
            if error is not None:
                raise error


ALONE = Threads()
"""No further threads."""


# -- bytes

Buffer: TypeAlias = bytes | bytearray | memoryview

assert sys.byteorder == "little", "tensors are sent as they lie in memory, so this machine must be little-endian"


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor. They are not copied if the tensor is contiguous and in host memory. The result
    keeps the tensor alive."""
    flat = tensor.detach().cpu().reshape(-1)
    if flat.stride(0) != 1:  # torch calls one element or none contiguous with any stride, and can't view it
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw: memoryview = flat.view(torch.uint8).numpy().data
    return raw


def tensor_over(buffer: Buffer) -> Tensor:
    """Return a read-only uint8 tensor over `buffer`. The bytes are copied only if the buffer isn't aligned to 4
    bytes."""
    view = memoryview(buffer)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")  # `torch.frombuffer` refuses an empty buffer
    writable = np.asarray(_Lent(np.frombuffer(view, dtype=np.uint8))) if view.readonly else view
    tensor = torch.frombuffer(writable, dtype=torch.uint8)
    return tensor if tensor.data_ptr() % 4 == 0 else tensor.clone()


def all_finite(values: Tensor) -> bool:
    """Return whether no element is NaN or infinite. It looks only at the least and the greatest element, which takes
    one pass without temporaries: a NaN makes both NaN."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def magnitude(values: Tensor) -> float:
    """Return the largest absolute value of a tensor in host memory; NaN if any element is NaN, 0 if there are no
    elements.

    Read as whole numbers, floats of one sign are in the order of their magnitudes, NaN after infinity: the signed
    maximum is the largest positive float, the unsigned one the largest negative float. numpy looks for both, because
    torch would divide a long tensor among its threads.
    """
    if not values.numel():
        return 0.0
    signed = torch.int16 if values.element_size() == 2 else torch.int32
    bits = values.view(signed).numpy()
    negative = int(bits.view(f"u{bits.itemsize}").max()) - 2 ** (8 * bits.itemsize - 1)
    largest = torch.tensor(max(int(bits.max()), negative), dtype=signed, device="cpu")
    return largest.view(values.dtype).item()


class _Lent:
    """Offers another object's bytes to numpy as if they were writable.

    `torch.frombuffer` warns about read-only memory. These tensors are never written to, so the flag is dropped. numpy
    keeps this object alive, and this object keeps the owner of the bytes alive.
    """

    def __init__(self, owner: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self.owner = owner
        address = owner.__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": owner.shape,
            "typestr": "|u1",
        }
