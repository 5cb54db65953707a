"""Finds the buffers of a model that are exchanged.

Law: reads names, dtypes and, once, values; changes nothing. All peers of a run must find the same buffers, so the rule
depends on the model and, at the moment of entering, on whether fp32 holds a buffer's values.

A buffer is exchanged if it is saved with the model and is a mean or a counter: of a floating-point dtype up to fp32, or
of int64. All others stay local:

    not saved (persistent=False), None or empty     caches, which a model computes anew
    bool, complex, fp64, other integers             masks, and codes of quantised weights
    of a module with buffers of other integers      scales and zero points of quantised weights
    a DTensor, or without values (meta device)      no process has all of its values
    sparse, expanded, of inference mode             its elements can't be changed in place
    values that are not finite or above 2³⁰;        fp32, or a sum of them, would not hold them: masks of -inf, hashes,
    for int64 above 2²⁴                             seeds
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from p2p_diloco.tensors.layout import ParamSpec, plain_name
from p2p_diloco.tensors.mean import MAGNITUDE_MAX

MEANS = (torch.float32, torch.bfloat16, torch.float16)
COUNTERS = (torch.int64,)
COUNT_MAX = 2.0**24
"""fp32 holds all integers up to this one."""


def exchanged(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are exchanged, by name, in the model's order. A buffer that several modules share comes
    once, under its first name. Names are those of the model before compilation."""
    return {name: buffer for name, buffer in candidates(model) if _is_held(buffer)}


def candidates(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that are exchanged if their values can be, by name."""
    saved = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        module, _, _ = name.rpartition(".")
        fits = buffer.dtype in (*MEANS, *COUNTERS) and buffer.layout is torch.strided
        fits = fits and not hasattr(buffer, "placements") and not buffer.is_meta and can_be_written(buffer)
        if fits and name in saved and buffer.numel() and not _is_quantised(model.get_submodule(module)):
            yield plain_name(name), buffer


def specs_of(model: nn.Module) -> tuple[ParamSpec, ...]:
    """Return the specs of the buffers in `exchanged(model)`, in the same order."""
    return tuple(ParamSpec.of(name, buffer) for name, buffer in exchanged(model).items())


def can_be_written(tensor: Tensor) -> bool:
    """Whether a dense tensor is none of inference mode, and each of its elements has memory of its own."""
    if tensor.is_inference():
        return False
    return all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_quantised(module: nn.Module) -> bool:
    """Whether a module has buffers of integers other than counters, as layers of quantised weights do."""
    dtypes = {buffer.dtype for buffer in module.buffers(recurse=False)}
    return any(not (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes - {*COUNTERS, torch.bool})


@torch.no_grad()
def _is_held(buffer: Tensor) -> bool:
    """Whether fp32 holds the buffer's values, and sums of them."""
    low, high = torch.aminmax(buffer.detach())
    most = COUNT_MAX if buffer.dtype in COUNTERS else MAGNITUDE_MAX
    return -most <= low.item() and high.item() <= most  # NaN compares as false
