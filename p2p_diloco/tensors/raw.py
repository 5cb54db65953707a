"""Tensors as bytes, and bytes as tensors.

Law: bytes are little-endian and in host memory; no value changes, and no argument is written to.
"""

from __future__ import annotations

import sys
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Buffer: TypeAlias = bytes | bytearray | memoryview

assert sys.byteorder == "little", "tensors are sent as they lie in memory, so this machine must be little-endian"


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor. They are not copied if the tensor is contiguous and in host memory. The result
    keeps the tensor alive."""
    flat = tensor.detach().cpu().reshape(-1)
    if flat.stride(0) != 1:  # torch calls one element or none contiguous with any stride, and can't view it
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw: memoryview = flat.view(torch.uint8).numpy().data
    return raw


def tensor_over(buffer: Buffer) -> Tensor:
    """Return a read-only uint8 tensor over `buffer`. The bytes are copied only if the buffer isn't aligned to 4
    bytes."""
    view = memoryview(buffer)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")  # `torch.frombuffer` refuses an empty buffer
    writable = np.asarray(_Lent(np.frombuffer(view, dtype=np.uint8))) if view.readonly else view
    tensor = torch.frombuffer(writable, dtype=torch.uint8)
    return tensor if tensor.data_ptr() % 4 == 0 else tensor.clone()


def all_finite(values: Tensor) -> bool:
    """Return whether no element is NaN or infinite. It looks only at the least and the greatest element, which takes
    one pass without temporaries: a NaN makes both NaN."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def magnitude(values: Tensor) -> float:
    """Return the largest absolute value of a tensor in host memory; NaN if any element is NaN, 0 if there are no
    elements.

    Read as whole numbers, floats of one sign are in the order of their magnitudes, NaN after infinity: the signed
    maximum is the largest positive float, the unsigned one the largest negative float. numpy looks for both, because
    torch would divide a long tensor among its threads.
    """
    if not values.numel():
        return 0.0
    signed = torch.int16 if values.element_size() == 2 else torch.int32
    bits = values.view(signed).numpy()
    negative = int(bits.view(f"u{bits.itemsize}").max()) - 2 ** (8 * bits.itemsize - 1)
    largest = torch.tensor(max(int(bits.max()), negative), dtype=signed, device="cpu")
    return largest.view(values.dtype).item()


class _Lent:
    """Offers another object's bytes to numpy as if they were writable.

    `torch.frombuffer` warns about read-only memory. These tensors are never written to, so the flag is dropped. numpy
    keeps this object alive, and this object keeps the owner of the bytes alive.
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
