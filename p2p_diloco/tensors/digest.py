"""One hash over all of a shard's outer state.

Law: two replicas whose digests are equal hold the same bits: θ, every tensor of the outer optimizer's state,
and whatever the layer above counts as state (`meta`: counts, tables, revisions). It guards against faults,
not against forgers: xxh3 is fast, not cryptographic.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash
from torch import Tensor

from p2p_diloco.tensors.raw import as_bytes


def digest(theta: Tensor, state: Mapping[str, Tensor], meta: bytes) -> str:
    """xxh3-128, 32 hexadecimal digits. Tensors are contiguous, in host memory, and read in place.

    Every piece is preceded by its name and length, so that different states give different streams of bytes.
    """
    hasher = xxhash.xxh3_128()
    pieces = [
        ("theta", as_bytes(theta)),
        *((f"state.{name}", as_bytes(state[name])) for name in sorted(state)),
    ]
    for name, data in (*pieces, ("meta", memoryview(meta))):
        hasher.update(f"{name}:{data.nbytes};".encode())
        hasher.update(data)
    return hasher.hexdigest()
