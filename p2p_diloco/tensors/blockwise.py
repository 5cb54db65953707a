"""Codecs of 4 or 8 bits: the elements of a block share a peak, and each element has a code.

Law: the bytes hold first the peaks of all blocks, then all codes; the last block may be shorter. A block's peak is the
largest magnitude in it as bf16, rounded up, so that no element exceeds it; a code stands for a fraction of the peak. A
decoded value is one product: the same on every machine, and never larger than the peak. Two codes of 4 bits share a
byte, the first in the lower half; after an odd number of them the upper half is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.flat import as_bytes, magnitude

BLOCK = 128
"""Elements that share a peak; see docs/decisions/0011-few-bits.md. A power of two that divides `flat.BLOCK`."""
PEAK_BYTES = 2
LEAST_PEAK = 2.0**-100
"""A block with a smaller peak is encoded as zeros. This value is far below any training signal, and far above fp32's
denormals."""
_ONE_BELOW = 1 - 2.0**-22
"""Keeps unit · levels, which is rounded twice, from exceeding the peak."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Codes that are integers from -levels to levels. The lowest number of two's complement is never written. If
    received bytes contain it, it is read as -levels, so that no value exceeds its peak."""

    bits: int
    """4 or 8. A code is a uint8, of which only the lower `bits` bits count."""

    @property
    def levels(self) -> int:
        """The largest integer."""
        return (1 << (self.bits - 1)) - 1

    @property
    def unit(self) -> float:
        """The fraction of the peak that a code point of 1 stands for."""
        return _ONE_BELOW / self.levels

    @property
    def points(self) -> tuple[float, ...]:
        """The code point, in units, of each of the 16 codes of 4 bits. A code of 8 bits needs no table: read as int8,
        it is its own point."""
        return tuple(float(max(code - 16, -7) if code > 7 else code) for code in range(16))

    def nearest(self, values: Tensor, inverse: Tensor) -> Tensor:
        """Return the nearest codes of `values` [blocks, BLOCK], with ties rounded to even. `inverse` [blocks, 1] is
        1/peak, or 0 where the peak is 0."""
        codes = values.mul(inverse * self.levels).round_().to(torch.int8).view(torch.uint8)
        return codes if self.bits == 8 else codes.bitwise_and_(0x0F)


@dataclass(frozen=True, slots=True)
class PowersOfTwo:
    """Codes with a sign and three bits of exponent, without a fraction. They stand for 0 and for ±1, ±1/2, ... ±1/64 of
    the peak."""

    bits: int = 4
    unit: float = 1.0

    @property
    def points(self) -> tuple[float, ...]:
        """The code point, in units, of each of the 16 codes."""
        magnitudes = (0.0, *(2.0 ** (exponent - 7) for exponent in range(1, 8)))
        return (*magnitudes, *(-value for value in magnitudes))

    def nearest(self, values: Tensor, inverse: Tensor) -> Tensor:
        """Return the codes of `values`, as `Integers.nearest` does, but with ties rounded up.

        The upper bits of an fp32 are its sign, its exponent, and a bit that tells whether its fraction is at least one
        half. Exponent and bit together number the half steps between powers of two. `halves` is this number, counted
        from half of the least point: 0 becomes the code of 0; 1, 2 and 3 that of the least point; 4 and 5 that of the
        next point, and so on.
        """
        upper = (values.mul(inverse).view(torch.int32) >> 22).to(torch.int16)
        halves = (upper & 0x1FF).sub_(2 * (127 - 7) - 1).clamp_(0, 15)
        codes = torch.maximum(halves >> 1, halves.clamp_(max=1))
        return codes.bitwise_or_(upper.bitwise_right_shift_(12).bitwise_and_(0x8)).to(torch.uint8)


@dataclass(frozen=True)
class Blockwise:
    """A codec that stores each element as a fraction of its block's peak."""

    shares: Integers | PowersOfTwo
    """The codes, and the fraction of the block's peak that each one stands for."""

    feeds_back = True  # codes of so few bits round small elements to zero

    def nbytes(self, numel: int) -> int:
        return PEAK_BYTES * _blocks(numel) + (numel * self.shares.bits + 7) // 8

    def encode(self, flat: Tensor) -> memoryview:
        """Encode `flat`, as `codec.Codec.encode` defines it. The peaks of all blocks are computed at once, because
        there are few."""
        numel = flat.numel()
        raw = torch.empty(self.nbytes(numel), dtype=torch.uint8, device="cpu")
        peaks, codes = self._parts(raw, numel)
        rows = list(_rows(flat))
        counts = [len(row) for row in rows]
        largest = torch.empty(len(peaks), device="cpu")
        for row, found in zip(rows, torch.split(largest, counts), strict=True):
            torch.amax(row.abs(), 1, out=found)
        peaks.copy_(_rounded_up(largest))
        inverse = torch.where(peaks == 0, 0.0, peaks.to(torch.float32).reciprocal_()).unsqueeze(1)
        for row, scale in zip(rows, torch.split(inverse, counts), strict=True):
            written = self.shares.nearest(row, scale).view(-1)
            written = written if self.shares.bits == 8 else _paired(written)
            place, codes = codes[: len(written)], codes[len(written) :]
            place.copy_(written[: len(place)])
        return as_bytes(raw)

    def peak(self, raw: Tensor, numel: int) -> float:
        """Return the largest peak of all blocks, as the bound that `codec.Codec.peak` defines."""
        peaks, _ = self._parts(raw, numel)
        if torch.any(peaks < 0):
            raise ValueError("the peak of a block is negative")
        return magnitude(peaks)

    def decode_blocks(self, raw: Tensor, numel: int) -> Iterator[Tensor]:
        if not math.isfinite(self.peak(raw, numel)):
            raise ValueError("the peak of a block is not finite")
        return self._decoded(*self._parts(raw, numel), numel)

    def _decoded(self, peaks: Tensor, codes: Tensor, numel: int) -> Iterator[Tensor]:
        step = flats.BLOCK
        assert step % BLOCK == 0, "a block of work must consist of whole blocks of a codec"
        if not numel:
            yield torch.empty(0, device="cpu")  # `flat.blocks` yields one empty block, too
        for start in range(0, numel, step):
            length = min(step, numel - start)
            here = codes[start * self.shares.bits // 8 : ((start + length) * self.shares.bits + 7) // 8]
            values = (torch.zeros if length % BLOCK else torch.empty)(_blocks(length) * BLOCK, device="cpu")
            self._points(here, values[: len(here) * 8 // self.shares.bits])
            units = peaks[start // BLOCK : start // BLOCK + _blocks(length)].to(torch.float32) * self.shares.unit
            values.view(-1, BLOCK).mul_(units.unsqueeze(1))
            yield values[:length]

    def _points(self, codes: Tensor, out: Tensor) -> None:
        """Write the code points that the bytes `codes` stand for, in units, into `out`."""
        if self.shares.bits == 8:
            out.copy_(codes.view(torch.int8)).clamp_(min=-127)
        else:
            torch.index_select(self._pairs, 0, codes.to(torch.int32), out=out.view(torch.float64))

    @cached_property
    def _pairs(self) -> Tensor:
        """The two fp32 points that each byte stands for, viewed as one float64: [256]."""
        points = torch.tensor(self.shares.points, device="cpu")
        return torch.stack((points.repeat(16), points.repeat_interleave(16)), 1).view(torch.float64).reshape(-1)

    def _parts(self, raw: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return views into `raw`: the peaks, bf16 [blocks], and the codes, uint8."""
        split = PEAK_BYTES * _blocks(numel)
        return raw[:split].view(torch.bfloat16), raw[split:]


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _rows(flat: Tensor) -> Iterator[Tensor]:
    """Yield the blocks of `flat` as views [blocks, BLOCK], each of which fits into the cache. The last block is padded
    with 0."""
    whole = flat.numel() // BLOCK * BLOCK
    yield from torch.split(flat[:whole].reshape(-1, BLOCK), flats.BLOCK // BLOCK)
    if missing := -flat.numel() % BLOCK:
        yield pad(flat[whole:], (0, missing)).view(1, BLOCK)


def _rounded_up(largest: Tensor) -> Tensor:
    """Return positive fp32 values rounded up to bf16. Values below `LEAST_PEAK` become 0, NaN stays NaN."""
    bits = largest.view(torch.int32).add(0xFFFF).bitwise_and_(-0x10000)
    peaks = torch.where(largest.isnan(), largest, bits.view(torch.float32)).to(torch.bfloat16)
    return peaks.masked_fill_(largest < LEAST_PEAK, 0.0)


def _paired(codes: Tensor) -> Tensor:
    """Return the codes of 4 bits packed into bytes, two in each, the first one in the lower half."""
    pairs = codes.view(torch.int16)
    return ((pairs >> 4) | pairs).to(torch.uint8)  # keeps the lower eight bits


INT8 = Blockwise(Integers(8))
INT4 = Blockwise(Integers(4))
EXPONENTS = Blockwise(PowersOfTwo())
