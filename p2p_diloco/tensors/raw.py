"""Between tensors and the bytes that they are made of.

Law: bytes are little-endian and lie in host memory; nothing here changes a value, nothing here writes to what
it was given.
"""

from __future__ import annotations

import sys
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Buffer: TypeAlias = bytes | bytearray | memoryview

assert sys.byteorder == "little", "tensors travel as they lie in memory, little-endian"


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, uncopied if it is contiguous and in host memory; the view keeps them alive."""
    flat = tensor.detach().cpu().reshape(-1)
    if flat.stride(0) != 1:  # of one element or none, too: torch takes that for contiguous and can't view it
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw: memoryview = flat.view(torch.uint8).numpy().data
    return raw


def tensor_over(buffer: Buffer) -> Tensor:
    """A uint8 tensor over `buffer`, without a copy if it lies on a multiple of 4 bytes; not to be written."""
    view = memoryview(buffer)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)  # torch has no tensor over nothing
    writable = np.asarray(_Lent(np.frombuffer(view, dtype=np.uint8))) if view.readonly else view
    tensor = torch.frombuffer(writable, dtype=torch.uint8)
    return tensor if tensor.data_ptr() % 4 == 0 else tensor.clone()


def all_finite(values: Tensor) -> bool:
    """Whether no element is NaN or infinite: one pass, no temporaries, for extremes carry any NaN along."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def magnitude(values: Tensor) -> float:
    """The largest absolute value; NaN if there is one among them, 0 of nothing."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(-low.item(), high.item())


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
