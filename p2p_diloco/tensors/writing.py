"""Writes files of tensors: safetensors, flushed to disk and hashed on the way.

Law: one pass over the bytes, in order; no copy of all tensors is made.

The library's own writer is not used: it refuses slices of one flat vector, it needs all tensors in their final dtype at
once, and to hash its file every byte would have to be read again. Layout: https://huggingface.co/docs/safetensors
(8 bytes of header length, a JSON header, then the data; wide types first, so that all are aligned).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from p2p_diloco.errors import CheckpointError
from p2p_diloco.tensors.flat import as_bytes

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The names of dtypes in safetensors."""


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Write the tensors into a new safetensors file, one after another. Return the file's length and hash. `dtypes`:
    the dtypes to which tensors are cast, by the tensors' names; all other tensors keep theirs. Raises `CheckpointError`
    for a dtype that the format lacks, and OSError."""
    cast = {name: (dtypes or {}).get(name, tensor.dtype) for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (-cast[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        if cast[name] not in _DTYPES:
            key = f"{path.stem}.{name}"
            raise CheckpointError(f"can't be saved as {cast[name]}", key=key, mend="cast it first")
        start, end = end, end + tensors[name].numel() * cast[name].itemsize
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _DTYPES[cast[name]], "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    pieces = (as_bytes(tensors[name].cpu().to(cast[name])) for name in order)
    return write_file(path, chain([len(head).to_bytes(8, "little") + head], pieces))


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, object]:
    """Write the pieces into a new file, flush it to disk, and return its length and hash."""
    hasher, length = xxhash.xxh3_128(), 0
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            hasher.update(piece)
            length += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": length, "xxh3": hasher.hexdigest()}


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
