"""Between a model's parameters and the flat fp32 vector.

Law: copies and one subtraction. Parameters have any dtype, device and strides; the flat side is contiguous fp32 in host
memory and belongs to the caller. Only the training thread may call functions that touch parameters.

Element-wise work on flat vectors goes block by block, and through numpy: a torch call costs four times as much, which
is a third of the work on a block. Both round the same.
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
def gather(params: Sequence[Tensor], out: Tensor) -> None:
    """Copy parameters one after another into `out` (flat fp32 of their total length)."""
    for param, part in _beside(params, out):
        part.view(param.shape).copy_(param)


@torch.no_grad()
def scatter(flat: Tensor, params: Sequence[Tensor]) -> None:
    """Load flat fp32 values into parameters, rounded to each one's dtype.

    Measure a pseudo-gradient from the values that `gather` reads back: a bf16 model's rounding is not progress.
    """
    for param, part in _beside(params, flat):
        param.copy_(part.view(param.shape))


@torch.no_grad()
def pseudo_gradient(base: Tensor, params: Sequence[Tensor], out: Tensor) -> None:
    """Write base − params, computed in fp32, into `out`, rounded to its dtype.

    All flat, in the order of `params`; `out` must not be `base`. `base` holds the global parameters that were loaded,
    rounded to each parameter's dtype or not. The sign is a gradient's: the outer optimizer descends along it
    (arXiv 2311.08105, Alg. 1, line 12).
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
    """Flat fp32 values, rounded as they are when loaded into `param`."""
    return values if param.dtype == torch.float32 else values.to(param.dtype).to(torch.float32)


def _beside(params: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter with its part of `flat`. ValueError unless that is flat fp32 of their total length."""
    total = sum(param.numel() for param in params)
    if flat.dtype != torch.float32 or flat.dim() != 1 or flat.numel() != total:
        raise ValueError(f"expected a flat fp32 vector of {total} elements, found {flat.dtype} {tuple(flat.shape)}")
    start = 0
    for param in params:
        yield param, flat[start : start + param.numel()]
        start += param.numel()
