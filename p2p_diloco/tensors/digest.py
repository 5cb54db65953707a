"""The digest of a slice's outer state.

Law: replicas with equal digests hold the same bits of θ and of every tensor of the outer optimizer's state. It detects
faults, not forgery: xxh3 is fast, not cryptographic.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash
from torch import Tensor


def digest(theta: Tensor, state: Mapping[str, Tensor]) -> str:
    """Return one xxh3-128, 32 hexadecimal digits, over each tensor's name, length and own xxh3-128, in the order of
    names. The lengths make sure that different states give different byte streams."""
    whole = xxhash.xxh3_128()
    for name, values in sorted([("theta", theta), *((f"state.{name}", values) for name, values in state.items())]):
        raw = values.numpy()
        whole.update(f"{name}:{raw.nbytes};".encode() + xxhash.xxh3_128(raw.data).digest())
    return whole.hexdigest()
