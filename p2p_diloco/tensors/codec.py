"""Between flat fp32 vectors and the bytes that travel.

Law: a codec is one row of a table; whoever encodes or decodes names it and needs to know nothing else of it.
Bytes are little-endian. What arrives from elsewhere is checked here for length and for values that aren't
finite, and is never written to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors.flat import blocks

Buffer: TypeAlias = bytes | bytearray | memoryview

assert sys.byteorder == "little", "tensors travel as they lie in memory, little-endian"


@dataclass(frozen=True, slots=True)
class Codec:
    """Each element cast to `dtype`, one after another."""

    dtype: torch.dtype

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements."""
        return numel * self.dtype.itemsize

    def encode(self, flat: Tensor) -> memoryview:
        """The bytes of `flat`: one cast at most, no copy."""
        return as_bytes(flat.to(self.dtype))

    def decode(self, buffer: Buffer) -> Tensor:
        """The elements as fp32; without a copy where the bytes are fp32 already."""
        return self._view(buffer).to(torch.float32)

    def decode_blocks(self, buffer: Buffer) -> Iterator[Tensor]:
        """`decode`, a block at a time."""
        return (values.to(torch.float32) for (values,) in blocks(self._view(buffer)))

    def finite(self, buffer: Buffer) -> bool:
        """Whether every value is finite."""
        return all_finite(self._view(buffer))

    def _view(self, buffer: Buffer) -> Tensor:
        return _tensor_over(buffer).view(self.dtype)


CODECS = {"fp32": Codec(torch.float32), "bf16": Codec(torch.bfloat16)}
"""The codecs by the name that the run config gives them."""


def nbytes(codec: str, numel: int) -> int:
    """Bytes that `numel` elements take. `ConfigError` for an unknown codec, here and in all that follow."""
    return _codec(codec).nbytes(numel)


def encode(flat: Tensor, codec: str) -> memoryview:
    """The bytes of a flat fp32 vector. For fp32 they are the vector's own: send them before it changes."""
    if flat.dtype != torch.float32 or flat.dim() != 1:
        raise ValueError(f"expected a flat fp32 vector, found {flat.dtype} {tuple(flat.shape)}")
    return _codec(codec).encode(flat)


def decode(buffer: Buffer, codec: str, numel: int) -> Tensor:
    """The fp32 vector [numel] in `buffer`; a view if fp32: don't write it. ValueError for a wrong length."""
    check_length(buffer, codec, numel)
    return _codec(codec).decode(buffer)


def decode_blocks(buffer: Buffer, codec: str, numel: int) -> Iterator[Tensor]:
    """`decode` in blocks of `flat.BLOCK`, each decoded as it is asked for."""
    check_length(buffer, codec, numel)
    return _codec(codec).decode_blocks(buffer)


def finite(buffer: Buffer, codec: str) -> bool:
    """Whether every value in `buffer` is finite. Whoever asks has checked the length."""
    return _codec(codec).finite(buffer)


def check_length(buffer: Buffer, codec: str, numel: int) -> None:
    """ValueError unless `buffer` is as long as `numel` elements are."""
    expected, found = nbytes(codec, numel), memoryview(buffer).nbytes
    if found != expected:
        raise ValueError(f"{numel} elements in {codec} are {expected} bytes, found {found}")


def all_finite(values: Tensor) -> bool:
    """Whether no element is NaN or infinite: one pass, no temporaries, for extremes carry any NaN along."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, uncopied if it is contiguous; the view keeps them alive."""
    raw: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return raw


class _Lent:
    """Bytes of another object, offered to numpy as writable.

    `torch.frombuffer` warns about read-only memory, once per process and from whichever thread comes first.
    Nothing here writes to such a tensor, so the memory is lent without its flag. numpy keeps this object, and
    it the bytes.
    """

    def __init__(self, owner: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self.owner = owner
        address = owner.__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": owner.shape,
            "typestr": "|u1",
        }


def _tensor_over(buffer: Buffer) -> Tensor:
    """A uint8 tensor over `buffer`, without a copy if it lies on a multiple of 4 bytes."""
    owner = np.frombuffer(buffer, dtype=np.uint8)
    if not owner.size:
        return torch.empty(0, dtype=torch.uint8)  # numpy's empty array has a stride that torch can't view
    if owner.__array_interface__["data"][0] % 4:
        return torch.from_numpy(owner.copy())
    return torch.from_numpy(np.asarray(_Lent(owner)))


def _codec(name: str) -> Codec:
    codec = CODECS.get(name)
    if codec is None:
        raise ConfigError("is unknown", key="codec", value=name, mend=f"use one of {', '.join(CODECS)}")
    return codec
