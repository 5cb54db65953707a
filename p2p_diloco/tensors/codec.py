"""Between flat fp32 vectors and the bytes that travel.

Law: a codec is one row of a table; whoever encodes or decodes names it and needs to know nothing else of it.
How many bytes there are follows from the number of elements alone. Bytes are little-endian and in host memory,
the same for the same values. What arrives from elsewhere is checked here, for its length and for bytes that mean
nothing, and is never written to; values that aren't finite, or huge, are the caller's to refuse (`peak`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors.blockwise import EXPONENTS, INT4, INT8
from p2p_diloco.tensors.cast import Cast
from p2p_diloco.tensors.flat import blocks
from p2p_diloco.tensors.raw import Buffer, tensor_over
from p2p_diloco.tensors.stochastic import to_bf16
from p2p_diloco.tensors.topk import TopK


class Codec(Protocol):
    """What a row of the table is. `raw` is uint8, as long as `nbytes` says."""

    @property
    def feeds_back(self) -> bool:
        """Whether so much is lost that the sender keeps it for its next contribution (`feedback`)."""

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements."""

    def encode(self, flat: Tensor) -> memoryview:
        """The bytes of `flat` [numel] fp32, on any device."""

    def peak(self, raw: Tensor, numel: int) -> float:
        """No value is larger in magnitude; NaN or infinite unless all are finite. ValueError for bytes that mean
        nothing."""

    def decode_blocks(self, raw: Tensor, numel: int) -> Iterator[Tensor]:
        """The values as fp32, cut as `flat.blocks` cuts, each good until the next is asked for. ValueError, before the
        first, for bytes that mean nothing, which may include what isn't finite."""


CODECS: dict[str, Codec] = {
    "fp32": Cast(torch.float32),
    "bf16": Cast(torch.bfloat16),
    "fp16": Cast(torch.float16),
    "int8": INT8,
    "int4": INT4,
    "e3m0": EXPONENTS,
    "topk": TopK(),
}
"""The codecs by the name that the run config gives them."""


def written_in(codec: str, rounding: str) -> torch.dtype:
    """The dtype in which a pseudo-gradient is written, to be sent. But for fp32's bytes, only bf16's are those that the
    codec would make of it: fp16 has to look at what is too large for it."""
    return torch.bfloat16 if codec == "bf16" and rounding == "nearest" else torch.float32


def nbytes(codec: str, numel: int) -> int:
    """Bytes that `numel` elements take. `ConfigError` for an unknown codec, here and in all that follow."""
    return _codec(codec).nbytes(numel)


def feeds_back(codec: str) -> bool:
    """Whether who sends in this codec keeps what it loses, and adds it to what is sent next."""
    return _codec(codec).feeds_back


def encode(flat: Tensor, codec: str) -> memoryview:
    """The bytes of a flat vector of fp32, or of the codec's own dtype (`written_in`). Where that is what it has, they
    are the vector's own: send them before it changes."""
    row = _codec(codec)
    _check_flat(flat, row.dtype if isinstance(row, Cast) else torch.float32)
    return row.encode(flat)


def encode_stochastically(flat: Tensor, codec: str, seed: int) -> memoryview:
    """`encode`, each value rounded up or down at random, right on average; of the casts to 16 bits only bf16."""
    _check_flat(flat)
    if codec != "bf16":
        raise ConfigError("has no stochastic rounding", key="codec", value=codec, mend="use codec=bf16")
    return CODECS[codec].encode(to_bf16(flat, seed))


def decode(buffer: Buffer, codec: str, numel: int) -> Tensor:
    """The fp32 vector [numel] in `buffer`; a view if fp32: don't write it. ValueError for what is none."""
    check_length(buffer, codec, numel)
    row, raw = _codec(codec), tensor_over(buffer)
    if isinstance(row, Cast):
        return row.decode(raw)
    values = torch.empty(numel)
    for (part,), block in zip(blocks(values), row.decode_blocks(raw, numel), strict=True):
        part.copy_(block)
    return values


def decode_blocks(buffer: Buffer, codec: str, numel: int) -> Iterator[Tensor]:
    """`decode` in blocks of `flat.BLOCK`, each decoded as it is asked for and good until the next is. A wrong length is
    refused at once."""
    check_length(buffer, codec, numel)
    return _codec(codec).decode_blocks(tensor_over(buffer), numel)


def peak(buffer: Buffer, codec: str, numel: int) -> float:
    """What no value in `buffer` exceeds in magnitude; NaN or infinite unless all are finite. ValueError as for
    `decode`."""
    check_length(buffer, codec, numel)
    return _codec(codec).peak(tensor_over(buffer), numel)


def finite(buffer: Buffer, codec: str, numel: int) -> bool:
    """Whether every value in `buffer` is finite. ValueError as for `decode`."""
    return math.isfinite(peak(buffer, codec, numel))


def check_length(buffer: Buffer, codec: str, numel: int) -> None:
    """ValueError unless `buffer` is as long as `numel` elements are."""
    expected, found = nbytes(codec, numel), memoryview(buffer).nbytes
    if found != expected:
        raise ValueError(f"{numel} elements in {codec} are {expected} bytes, found {found}")


def _check_flat(flat: Tensor, own: torch.dtype = torch.float32) -> None:
    if flat.dtype not in (torch.float32, own) or flat.dim() != 1:
        raise ValueError(f"expected a flat fp32 vector, found {flat.dtype} {tuple(flat.shape)}")


def _codec(name: str) -> Codec:
    codec = CODECS.get(name)
    if codec is None:
        raise ConfigError("is unknown", key="codec", value=name, mend=f"use one of {', '.join(CODECS)}")
    return codec
