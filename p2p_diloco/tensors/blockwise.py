"""Codecs of few bits: blocks of elements that share a peak, and a code for each element.

Law: all peaks first, then all codes, of equally long blocks of which the last may be shorter. A block's peak is the
largest magnitude in it, as a bf16, rounded up so that no element exceeds it; a code stands for a share of the peak.
So a decoded value is one product, the same on every machine, and never larger than what was encoded, rounded up to
a bf16. Of codes of 4 bits, an element of even index is the lower half of its byte; the last half byte of an odd
number is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.raw import as_bytes, magnitude

BLOCK = 128
"""Elements that share a peak; see docs/decisions/0011-few-bits.md. A power of two, and a part of `flat.BLOCK`."""
PEAK_BYTES = 2
LEAST_PEAK = 2.0**-100
"""A block of smaller values is one of zeros: a millionth of what any training moves, and far from where fp32 thins
out."""
_ONE_BELOW = 1 - 2.0**-22
"""What unit · levels, two roundings, needs so as not to exceed the peak."""


class Shares(Protocol):
    """Which shares of its block's peak an element may be. A code is a uint8, of which `bits` count."""

    @property
    def bits(self) -> int:
        """4 or 8."""

    @property
    def unit(self) -> float:
        """What a code point of 1 is, as a share of the peak."""

    @property
    def points(self) -> tuple[float, ...]:
        """The code points of 4 bits, in units; of 8 bits a code is its own, as an int8."""

    def nearest(self, values: Tensor, inverse: Tensor) -> Tensor:
        """The codes of `values` [blocks, BLOCK], of which `inverse` [blocks, 1] is 1/peak, or 0."""


@dataclass(frozen=True, slots=True)
class Integers:
    """Whole numbers, as many below 0 as above. The least two's complement is not written, and read as the one above
    it, so that nothing exceeds its peak."""

    bits: int

    @property
    def levels(self) -> int:
        """The largest."""
        return (1 << (self.bits - 1)) - 1

    @property
    def unit(self) -> float:
        """As `Shares.unit`."""
        return _ONE_BELOW / self.levels

    @property
    def points(self) -> tuple[float, ...]:
        """As `Shares.points`."""
        return tuple(float(max(code - 16, -7) if code > 7 else code) for code in range(16))

    def nearest(self, values: Tensor, inverse: Tensor) -> Tensor:
        """As `Shares.nearest`; ties to even."""
        codes = values.mul(inverse * self.levels).round_().to(torch.int8).view(torch.uint8)
        return codes if self.bits == 8 else codes.bitwise_and_(0x0F)


@dataclass(frozen=True, slots=True)
class PowersOfTwo:
    """A sign and three bits of exponent, no fraction: 0, and 1, 1/2, ... 1/64 of the peak, either sign."""

    bits: int = 4
    unit: float = 1.0

    @property
    def points(self) -> tuple[float, ...]:
        """As `Shares.points`."""
        magnitudes = (0.0, *(2.0 ** (exponent - 7) for exponent in range(1, 8)))
        return (*magnitudes, *(-value for value in magnitudes))

    def nearest(self, values: Tensor, inverse: Tensor) -> Tensor:
        """As `Shares.nearest`; what lies in the middle goes up.

        The uppermost bits of an fp32 are its sign, its exponent, and whether it has come to the middle between two
        powers of two. Counted in such halves of the way from one to the next, and from just below half of the least
        point, 2 and 3 are the least point, 4 and 5 the next, ...; and 1 is the least point as well.
        """
        upper = (values.mul(inverse).view(torch.int32) >> 22).to(torch.int16)
        halves = (upper & 0x1FF).sub_(2 * (127 - 7) - 1).clamp_(0, 15)
        codes = torch.maximum(halves >> 1, halves.clamp_(max=1))
        return codes.bitwise_or_(upper.bitwise_right_shift_(12).bitwise_and_(0x8)).to(torch.uint8)


@dataclass(frozen=True)
class Blockwise:
    """A codec whose elements are shares of their block's peak."""

    shares: Shares

    @property
    def feeds_back(self) -> bool:
        """So few bits lose what small elements are made of."""
        return True

    def nbytes(self, numel: int) -> int:
        """As `codec.Codec.nbytes`."""
        return PEAK_BYTES * _blocks(numel) + (numel * self.shares.bits + 7) // 8

    def encode(self, flat: Tensor) -> memoryview:
        """As `codec.Codec.encode`: first all peaks, for their few elements together, then the codes."""
        numel = flat.numel()
        raw = torch.empty(self.nbytes(numel), dtype=torch.uint8, device=flat.device)
        peaks, codes = self._parts(raw, numel)
        rows = list(_rows(flat))
        counts = [len(row) for row in rows]
        largest = torch.empty(len(peaks), device=flat.device)
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
        """As `codec.Codec.peak`: the largest of the blocks'."""
        peaks, _ = self._parts(raw, numel)
        if torch.any(peaks < 0):
            raise ValueError("the peak of a block is negative")
        return magnitude(peaks)

    def decode_blocks(self, raw: Tensor, numel: int) -> Iterator[Tensor]:
        """As `codec.Codec.decode_blocks`."""
        if not math.isfinite(self.peak(raw, numel)):
            raise ValueError("the peak of a block is not finite")
        return self._decoded(*self._parts(raw, numel), numel)

    def _decoded(self, peaks: Tensor, codes: Tensor, numel: int) -> Iterator[Tensor]:
        step = flats.BLOCK
        assert step % BLOCK == 0, "blocks of work are whole blocks of a codec"
        if not numel:
            yield torch.empty(0)  # as there is one block of nothing
        for start in range(0, numel, step):
            length = min(step, numel - start)
            here = codes[start * self.shares.bits // 8 : ((start + length) * self.shares.bits + 7) // 8]
            values = torch.zeros(_blocks(length) * BLOCK) if length % BLOCK else torch.empty(length)
            self._points(here, values[: len(here) * 8 // self.shares.bits])
            units = peaks[start // BLOCK : start // BLOCK + _blocks(length)].to(torch.float32) * self.shares.unit
            values.view(-1, BLOCK).mul_(units.unsqueeze(1))
            yield values[:length]

    def _points(self, codes: Tensor, out: Tensor) -> None:
        """Write the code points, in units, of bytes of codes into `out`."""
        if self.shares.bits == 8:
            out.copy_(codes.view(torch.int8)).clamp_(min=-127)
        else:
            torch.index_select(self._pairs, 0, codes.to(torch.int32), out=out.view(torch.float64))

    @cached_property
    def _pairs(self) -> Tensor:
        """The two points that a byte stands for, side by side, as one element: [256] float64."""
        points = torch.tensor(self.shares.points)
        return torch.stack((points.repeat(16), points.repeat_interleave(16)), 1).view(torch.float64).reshape(-1)

    def _parts(self, raw: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Peaks bf16 [blocks] and codes uint8 in `raw`."""
        split = PEAK_BYTES * _blocks(numel)
        return raw[:split].view(torch.bfloat16), raw[split:]


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _rows(flat: Tensor) -> Iterator[Tensor]:
    """Views [blocks, BLOCK] of `flat`, few enough to stay in a cache (on a CPU); the last block filled up with 0."""
    whole = flat.numel() // BLOCK * BLOCK
    at_once = flats.BLOCK // BLOCK if flat.device.type == "cpu" else max(whole, 1)
    yield from torch.split(flat[:whole].reshape(-1, BLOCK), at_once)
    if missing := -flat.numel() % BLOCK:
        yield pad(flat[whole:], (0, missing)).view(1, BLOCK)


def _rounded_up(largest: Tensor) -> Tensor:
    """Positive fp32 values as the next bf16 from there upwards; what is less than `LEAST_PEAK` as 0, NaN as NaN."""
    bits = largest.view(torch.int32).add(0xFFFF).bitwise_and_(-0x10000)
    peaks = torch.where(largest.isnan(), largest, bits.view(torch.float32)).to(torch.bfloat16)
    return peaks.masked_fill_(largest < LEAST_PEAK, 0.0)


def _paired(codes: Tensor) -> Tensor:
    """Two codes of 4 bits in each byte: the first is the lower half."""
    pairs = codes.view(torch.int16)
    return ((pairs >> 4) | pairs).to(torch.uint8)  # of the sixteen bits the lower eight stay


INT8 = Blockwise(Integers(8))
INT4 = Blockwise(Integers(4))
EXPONENTS = Blockwise(PowersOfTwo())
