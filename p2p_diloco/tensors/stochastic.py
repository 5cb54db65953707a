"""Unbiased rounding to bf16: up or down at random.

Law: the same values and seed give the same bits on one kind of device; a value that bf16 can represent stays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.flat import blocks
from p2p_diloco.tensors.raw import all_finite

_DROPPED = 16
"""Bits of an fp32's fraction that bf16 lacks."""


def to_bf16(flat: Tensor, seed: int) -> Tensor:
    """Return `flat`, fp32 [numel], with each value x rounded to one of its two neighbours in bf16: to the upper one
    with probability (x − lower) / (upper − lower). Values that aren't finite stay as they are.

    Read as an integer, the 16 bits that bf16 lacks are that probability in units of 2⁻¹⁶. So a random integer of 16
    bits is added, and the lower 16 bits of the sum are set to 0.
    """
    rounded = torch.empty_like(flat)
    source = torch.Generator(device=flat.device)
    source.manual_seed(seed)
    words = torch.empty((min(flats.BLOCK, flat.numel()) + 3) // 4, dtype=torch.int64, device=flat.device)
    for values, out in blocks(flat, rounded):
        words.random_(-(2**63), None, generator=source)
        noise = words.view(torch.int16)[: values.numel()].to(torch.int32).bitwise_and_((1 << _DROPPED) - 1)
        bits = noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(-(1 << _DROPPED))
        out.copy_(bits.view(torch.float32) if all_finite(values) else values.to(torch.bfloat16))
    return rounded
