"""Wire codecs: they turn flat fp32 vectors into bytes and back.

Law: a codec is one row of a table, chosen by name. The length of encoded bytes depends only on the number of elements.
Bytes are little-endian, in host memory, and equal for equal values. Received buffers are checked for their length and
for invalid bytes, and never written to; the caller refuses values that are not finite or too large (`peak`). Values up
to `mean.MAGNITUDE_MAX`, the largest that a peer may send, stay finite. Random rounding gives the same bits for the same
seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.blockwise import EXPONENTS, INT4, INT8
from p2p_diloco.tensors.flat import Buffer, all_finite, as_bytes, blocks, magnitude, tensor_over
from p2p_diloco.tensors.topk import TopK

_DROPPED = 16
"""Bits of an fp32's fraction that bf16 lacks."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A codec that rounds each element to the nearest value of `dtype`. fp16 clamps it to 65504, its largest value."""

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
    with probability (x − lower) / (upper − lower). Values that bf16 has stay as they are; so do those that aren't
    finite.

    Read as an integer, the 16 bits that bf16 lacks are that probability in units of 2⁻¹⁶. So a random integer of 16
    bits is added, and the lower 16 bits of the sum are set to 0.
    """
    rounded = torch.empty_like(flat)
    source = torch.Generator("cpu")
    source.manual_seed(seed)
    words = torch.empty((min(flats.BLOCK, flat.numel()) + 3) // 4, dtype=torch.int64, device="cpu")
    for values, out in blocks(flat, rounded):
        words.random_(-(2**63), None, generator=source)
        noise = words.view(torch.int16)[: values.numel()].to(torch.int32).bitwise_and_((1 << _DROPPED) - 1)
        bits = noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(-(1 << _DROPPED))
        out.copy_(bits.view(torch.float32) if all_finite(values) else values.to(torch.bfloat16))
    return rounded


class Codec(Protocol):
    """One row of the table `CODECS`. `raw`: the encoded bytes, uint8 [nbytes]."""

    @property
    def feeds_back(self) -> bool:
        """Whether the sender adds the codec's error to its next contribution (`feedback`)."""

    def nbytes(self, numel: int) -> int:
        """Return how many bytes `numel` elements take when encoded."""

    def encode(self, flat: Tensor) -> memoryview:
        """Encode `flat`, fp32 [numel] in host memory, and return the bytes."""

    def peak(self, raw: Tensor, numel: int) -> float:
        """Return an upper bound of the values' magnitudes; NaN or infinite if any value isn't finite. Raises ValueError
        for invalid bytes."""

    def decode_blocks(self, raw: Tensor, numel: int) -> Iterator[Tensor]:
        """Return the values as fp32, in blocks like those of `flat.blocks`. A block is valid until the next one is
        drawn. Raises ValueError, before the first block, for invalid bytes; a codec may also refuse values that aren't
        finite."""


CODECS: dict[str, Codec] = {
    "fp32": Cast(torch.float32),
    "bf16": Cast(torch.bfloat16),
    "fp16": Cast(torch.float16),
    "int8": INT8,
    "int4": INT4,
    "e3m0": EXPONENTS,
    "topk": TopK(),
}
"""Codecs by their name in the run config."""


def written_in(codec: str, rounding: str) -> torch.dtype:
    """Return the dtype in which a pseudo-gradient is written: bf16 if the encoded bytes are then the same as those
    encoded from fp32, else fp32. (It is never fp16: that codec clamps values, so the bytes would differ.)"""
    return torch.bfloat16 if codec == "bf16" and rounding == "nearest" else torch.float32


def nbytes(codec: str, numel: int) -> int:
    """Return how many bytes `numel` elements take when encoded."""
    return CODECS[codec].nbytes(numel)


def feeds_back(codec: str) -> bool:
    """Return whether the sender adds the codec's error to its next contribution (`feedback`)."""
    return CODECS[codec].feeds_back


def encode(flat: Tensor, codec: str) -> memoryview:
    """Return the bytes of a flat vector of fp32, or of the codec's own dtype (`written_in`). If the vector has the
    codec's own dtype, the bytes are the vector's own memory (`shares`): send them before the vector changes."""
    row = CODECS[codec]
    _check_flat(flat, row.dtype if isinstance(row, Cast) else torch.float32)
    return row.encode(flat)


def shares(flat: Tensor, codec: str) -> bool:
    """Return whether `encode` returns the vector's own memory."""
    row = CODECS[codec]
    return isinstance(row, Cast) and flat.dtype == row.dtype


def encode_stochastically(flat: Tensor, seed: int) -> memoryview:
    """Encode a flat vector in bf16 with unbiased random rounding, and return the bytes."""
    _check_flat(flat)
    return CODECS["bf16"].encode(to_bf16(flat, seed))


def decode(buffer: Buffer, codec: str, numel: int) -> Tensor:
    """Return the fp32 vector [numel] that `buffer` encodes. With codec fp32 the result is a view of the buffer: don't
    write to it. Raises ValueError for an invalid buffer."""
    check_length(buffer, codec, numel)
    row, raw = CODECS[codec], tensor_over(buffer)
    if isinstance(row, Cast):
        return row.decode(raw)
    values = torch.empty(numel, device="cpu")
    for (part,), block in zip(blocks(values), row.decode_blocks(raw, numel), strict=True):
        part.copy_(block)
    return values


def decode_blocks(buffer: Buffer, codec: str, numel: int) -> Iterator[Tensor]:
    """Decode the buffer in blocks of `flat.BLOCK` elements. Each block is decoded when it is drawn, and is valid until
    the next one is drawn. Raises ValueError, before the first block, for a wrong length."""
    check_length(buffer, codec, numel)
    return CODECS[codec].decode_blocks(tensor_over(buffer), numel)


def is_cast(codec: str) -> bool:
    """Return whether each element is encoded by itself, so that the bytes of a range encode that range (`part`)."""
    return isinstance(CODECS[codec], Cast)


def part(buffer: Buffer, codec: str, place: slice) -> memoryview:
    """Return the bytes of the elements in `place`, as a view. Only for a codec that `is_cast`."""
    size = nbytes(codec, 1)
    return memoryview(buffer).cast("B")[place.start * size : place.stop * size]


def peak(buffer: Buffer, codec: str, numel: int) -> float:
    """Return an upper bound of the magnitudes of the values in `buffer`; NaN or infinite if any value isn't finite.
    Raises ValueError for an invalid buffer."""
    check_length(buffer, codec, numel)
    return CODECS[codec].peak(tensor_over(buffer), numel)


def check_length(buffer: Buffer, codec: str, numel: int) -> None:
    """Raise ValueError unless `buffer` is as long as `numel` encoded elements."""
    expected, found = nbytes(codec, numel), memoryview(buffer).nbytes
    if found != expected:
        raise ValueError(f"{numel} elements in {codec} are {expected} bytes, found {found}")


def _check_flat(flat: Tensor, own: torch.dtype = torch.float32) -> None:
    if flat.dtype not in (torch.float32, own) or flat.dim() != 1:
        raise ValueError(f"expected a flat fp32 vector, found {flat.dtype} {tuple(flat.shape)}")
