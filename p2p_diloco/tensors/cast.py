"""Codecs that are a cast: each element by itself, one after another, to the nearest value of a dtype.

Law: what a peer may send (`mean.MAGNITUDE_MAX`) stays finite. fp16, whose exponents don't reach so far, writes what
lies beyond its largest value, 65504, as that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.raw import all_finite, as_bytes, magnitude


@dataclass(frozen=True, slots=True)
class Cast:
    """Each element as `dtype` has it."""

    dtype: torch.dtype

    @property
    def feeds_back(self) -> bool:
        """A cast loses too little to be kept."""
        return False

    def nbytes(self, numel: int) -> int:
        """As `codec.Codec.nbytes`."""
        return numel * self.dtype.itemsize

    def encode(self, flat: Tensor) -> memoryview:
        """The bytes of `flat`: one cast at most, no copy."""
        cast = flat.to(self.dtype)
        if self.dtype == torch.float16 and not all_finite(cast):
            largest = torch.finfo(torch.float16).max
            cast = torch.where(flat.isfinite(), flat.clamp(-largest, largest), flat).to(torch.float16)
        return as_bytes(cast)

    def peak(self, raw: Tensor, numel: int) -> float:
        """As `codec.Codec.peak`, and no more than it has to be."""
        return magnitude(raw.view(self.dtype))

    def decode(self, raw: Tensor) -> Tensor:
        """The elements as fp32; without a copy where the bytes are fp32 already."""
        return raw.view(self.dtype).to(torch.float32)

    def decode_blocks(self, raw: Tensor, numel: int) -> Iterator[Tensor]:
        """As `codec.Codec.decode_blocks`."""
        pieces = torch.split(raw.view(self.dtype), flats.BLOCK)
        if self.dtype == torch.float32:
            return iter(pieces)
        decoded = torch.empty(min(numel, flats.BLOCK))
        return (decoded[: piece.numel()].copy_(piece) for piece in pieces)
