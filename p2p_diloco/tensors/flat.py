"""Walks over flat vectors in host memory, piece by piece, in one thread or several, and computes the pseudo-gradient.

Law: views and one subtraction, independent of the meaning of a vector's elements.

Element-wise work on flat vectors goes block by block, and through numpy: the overhead of a call is four times as large
in torch as in numpy, and would be a third of the time that a block takes. torch and numpy round the same.
Both let other threads run meanwhile, if torch doesn't divide a piece itself. A result has the same bits for any number
of threads, because every element is computed by the same operations.
"""

from __future__ import annotations

import math
import os
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
