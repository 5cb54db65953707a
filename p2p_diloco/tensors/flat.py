"""Work on flat vectors in host memory, piece by piece; the pseudo-gradient.

Law: views and one subtraction; nothing here knows what a vector's elements belong to.

Element-wise work on flat vectors goes block by block, and through numpy: a torch call costs four times as much, which
is a third of the work on a block. Both round the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"
"""Flat fp32 in host memory."""

BLOCK = 1 << 17
"""Elements per block of work: some blocks of fp32 fit into the last-level cache. Half as many cost a tenth more time,
eight times as many half as much again."""
UNDIVIDED = 1 << 15
"""The same where torch may have threads: it doesn't split so few elements among them. On busy cores, waiting threads
cost many times the work."""


def blocks(*tensors: Tensor, size: int | None = None) -> Iterator[tuple[Tensor, ...]]:
    """Views of equally long flat tensors, block by block, for element-wise work without long temporaries."""
    return zip(*(torch.split(tensor, size or BLOCK) for tensor in tensors), strict=True)


def arrays(first: Iterable[Tensor], *others: Tensor) -> Iterator[tuple[Array, ...]]:
    """The pieces of a flat vector, none longer than `BLOCK`, each with the same range of `others`."""
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
"""Decorates work that may meet values that are not finite, which are detected elsewhere."""


@torch.no_grad()
def pseudo_gradient(base: Tensor, local: Tensor, out: Tensor) -> None:
    """Write base − local, computed in fp32, into `out`, rounded to its dtype.

    All flat and in host memory; `out` must not be `base`. `base` holds the global values that were loaded, rounded to
    `local`'s dtype or not. The sign is a gradient's: the outer optimizer descends along it (arXiv 2311.08105, Alg. 1,
    line 12).
    """
    for anchors, values, parts in blocks(base, local, out, size=UNDIVIDED):
        parts.copy_(torch.sub(anchors.to(values.dtype).to(torch.float32), values.to(torch.float32)))
