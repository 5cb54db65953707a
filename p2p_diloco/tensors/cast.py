"""Codecs that cast each element to the nearest value of a dtype.

Law: values up to `mean.MAGNITUDE_MAX`, the largest that a peer may send, stay finite: fp16 clamps them to 65504, its
largest value.
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
        decoded = torch.empty(min(numel, flats.BLOCK))
        return (decoded[: piece.numel()].copy_(piece) for piece in pieces)
