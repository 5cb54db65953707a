"""The manifest of a data set that data nodes serve: its slices, with their lengths and hashes.

Law: a value. All who use a data set must have the same manifest: its hash is the data set's identity. A packed manifest
comes from another peer: any bytes give a manifest or a ValueError.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

SLICE_BYTES_MAX = 128 * 2**20
"""The longest slice. A transport carries 256 MiB at once, and a data node holds several slices in memory."""
SLICES_MAX = 2**18
NAME_MAX = 256
"""The most letters of a file's name."""
MANIFEST_BYTES_MAX = 64 * 2**20
HASH_BYTES = 32
Form = Literal["text", "safetensors", "tar"]
"""The formats of samples: `files.FORMATS`."""


class Slice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A range of a file's bytes that can be read by itself. `name`: the name of the file; `samples`: the number of
    samples in the slice; `hash`: BLAKE3 of the bytes."""

    name: Annotated[str, Meta(max_length=NAME_MAX)]
    nbytes: Annotated[int, Meta(ge=1, le=SLICE_BYTES_MAX)]
    samples: Annotated[int, Meta(ge=1)]
    hash: Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]

    def __post_init__(self) -> None:
        if self.samples > self.nbytes:
            raise ValueError("a slice has more samples than bytes")

    def is_hash_of(self, content: memoryview | bytes) -> bool:
        """Whether these are the slice's bytes."""
        return hash_of(content) == self.hash


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """The slices of a data set, all of one format."""

    form: Form
    slices: Annotated[tuple[Slice, ...], Meta(min_length=1, max_length=SLICES_MAX)]

    @cached_property
    def packed(self) -> bytes:
        """The manifest's bytes, the same on all machines."""
        return msgspec.msgpack.encode(self)

    @cached_property
    def identity(self) -> str:
        """The data set's identity: BLAKE3 of the manifest's bytes, in hexadecimal."""
        return hash_of(self.packed).hex()

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all slices."""
        return sum(one.nbytes for one in self.slices)

    @cached_property
    def samples(self) -> int:
        """The samples of all slices."""
        return sum(one.samples for one in self.slices)

    @classmethod
    def unpack(cls, packed: bytes | memoryview) -> Manifest:
        """Decode a manifest. Raises ValueError for any other bytes."""
        try:
            return msgspec.msgpack.decode(packed, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ValueError(f"these bytes are no manifest: {error}") from None


def hash_of(content: memoryview | bytes) -> bytes:
    """BLAKE3 of these bytes."""
    return blake3(content).digest()
