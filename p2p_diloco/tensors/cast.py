"""Codecs that cast each element to the nearest value of a dtype; and unbiased rounding to bf16, up or down at random.

Law: the same values, and for random rounding the same seed, give the same bits on one kind of device. Rounding
to bf16 does not change a value that bf16 can represent. Values up to `mean.MAGNITUDE_MAX`, the largest that a peer may
send, stay finite: fp16 clamps them to 65504, its largest value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.flat import blocks
from p2p_diloco.tensors.raw import all_finite, as_bytes, magnitude

_DROPPED = 16
"""Bits of an fp32's fraction that bf16 lacks."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A codec that rounds each element to `dtype`."""

    dtype: torch.dtype

    feeds_back = False  # a cast's error is too small to need that

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, flat: Tensor) -> memoryview:
        """Return the bytes of `flat` in this codec's dtype. They are not copied if `flat` has that dtype."""
        cast = flat.to(self.dtype)
        if self.dtype == torch.float16 and not all_finite(cast):
            largest = torch.finfo(torch.float16).max
            cast = torch.where(flat.isfinite(), flat.clamp(-largest, largest), flat).to(torch.float16)
        return as_bytes(cast)

    def peak(self, raw: Tensor, numel: int) -> float:
        """Return the largest magnitude of the values. It is exact, though `codec.Codec.peak` asks only for a bound."""
        return magnitude(raw.view(self.dtype))

    def decode(self, raw: Tensor) -> Tensor:
        """Return the elements as fp32. They are not copied if the bytes are fp32."""
        return raw.view(self.dtype).to(torch.float32)

    def decode_blocks(self, raw: Tensor, numel: int) -> Iterator[Tensor]:
        pieces = torch.split(raw.view(self.dtype), flats.BLOCK)
        if self.dtype == torch.float32:
            return iter(pieces)
        decoded = torch.empty(min(numel, flats.BLOCK), device="cpu")
        return (decoded[: piece.numel()].copy_(piece) for piece in pieces)


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
