"""Between a model's parameters and the flat fp32 vector.

Law: copies and one subtraction. Parameters may be of any dtype, on any device and strided in any way; the
flat side is contiguous fp32 in host memory, and is the caller's. Only the thread that trains may call what
touches parameters.

Element-wise work on the flat side goes block by block, and by numpy: a call costs it a quarter of what one costs torch,
which is a third of the work on a block. Both round the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"
"""Flat fp32 in host memory."""

BLOCK = 1 << 17
"""Elements that are worked on at a time: some blocks of fp32 stay in a processor's last cache. With half as many the
calls cost a tenth more time, with eight times as many memory costs half as much again."""
UNDIVIDED = 1 << 15
"""The same where torch may have threads, among which it doesn't divide so few: their waiting for one another costs
many times the work where a trainer keeps every core busy."""


def blocks(*tensors: Tensor, size: int | None = None) -> Iterator[tuple[Tensor, ...]]:
    """Views of equally long flat tensors, a block at a time: element-wise work without long temporaries."""
    return zip(*(torch.split(tensor, size or BLOCK) for tensor in tensors), strict=True)


def arrays(first: Iterable[Tensor], *others: Tensor) -> Iterator[tuple[Array, ...]]:
    """The pieces of a flat vector, none longer than `BLOCK`, each with what lies beside it in `others`."""
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
"""Decorates what goes on with values that are not finite, which somebody else looks for."""


@torch.no_grad()
def gather(params: Sequence[Tensor], out: Tensor) -> None:
    """Copy parameters one after another into `out` (flat fp32, exactly as long as they are together)."""
    for param, part in _beside(params, out):
        part.view(param.shape).copy_(param)


@torch.no_grad()
def scatter(flat: Tensor, params: Sequence[Tensor]) -> None:
    """Load flat fp32 values into parameters, rounded to each one's dtype.

    What was loaded, to measure a pseudo-gradient from, is what `gather` reads back: a bf16 model's rounding
    must not be taken for progress.
    """
    for param, part in _beside(params, flat):
        param.copy_(part.view(param.shape))


@torch.no_grad()
def pseudo_gradient(base: Tensor, params: Sequence[Tensor], out: Tensor) -> None:
    """Write base − params, in fp32, into `out`, rounded to its dtype (all flat, in the order of `params`; `out` may not
    be `base`).

    `base` holds the global parameters that were loaded, be they rounded to each one's dtype or not. The sign is that
    of a gradient: the outer optimizer descends along it (arXiv 2311.08105, Alg. 1, line 12).
    """
    if base.shape != out.shape:
        raise ValueError(f"base has {base.numel()} elements, out {out.numel()}")
    for (param, anchor), part in zip(_beside(params, base), torch.split(out, [p.numel() for p in params]), strict=True):
        if param.device.type == "cpu" and param.is_contiguous():
            for anchors, values, parts in blocks(anchor, param.view(-1), part, size=UNDIVIDED):
                parts.copy_(torch.sub(_rounded(anchors, values), values.to(torch.float32)))
        else:
            values = torch.empty_like(anchor)
            values.view(param.shape).copy_(param)
            part.copy_(torch.sub(_rounded(anchor, param), values))


def _rounded(values: Tensor, param: Tensor) -> Tensor:
    """Flat fp32 values as they are once they were loaded into a parameter."""
    return values if param.dtype == torch.float32 else values.to(param.dtype).to(torch.float32)


def _beside(params: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter with its part of the flat vector."""
    total = sum(param.numel() for param in params)
    if flat.dtype != torch.float32 or flat.dim() != 1 or flat.numel() != total:
        raise ValueError(
            f"expected a flat fp32 vector of {total} elements, found {flat.dtype} {tuple(flat.shape)}"
        )
    start = 0
    for param in params:
        yield param, flat[start : start + param.numel()]
        start += param.numel()
