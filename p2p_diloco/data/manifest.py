"""The manifest of a data set that data nodes serve: its slices, with their lengths and hashes.

Law: a value. All who use a data set must have the same manifest: its hash is the data set's identity. A packed manifest
comes from another peer: any bytes give a manifest or a ValueError.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from functools import cached_property

import msgpack
from blake3 import blake3

SLICE_BYTES_MAX = 128 * 2**20
"""The longest slice. A transport carries 256 MiB at once, and a data node holds several slices in memory."""
SLICES_MAX = 2**18
NAME_MAX = 256
"""The most letters of a file's name."""
MANIFEST_BYTES_MAX = 64 * 2**20
FORMAT_NAMES = ("text", "safetensors", "tar")
"""How samples are read from each of these formats: `files.FORMATS`."""
HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of a file's bytes that can be read by itself. `name`: the name of the file; `samples`: the number of
    samples in the slice."""

    name: str
    nbytes: int
    samples: int
    hash: bytes
    """BLAKE3 of the bytes."""

    def __post_init__(self) -> None:
        name, counts = self.name, (self.nbytes, self.samples)
        if type(name) is not str or len(name) > NAME_MAX or any(type(count) is not int for count in counts):
            raise ValueError("a slice has no usable name, or a count that is no whole number")
        if not (1 <= self.nbytes <= SLICE_BYTES_MAX and 1 <= self.samples <= self.nbytes):
            raise ValueError("a slice has an impossible length")
        if type(self.hash) is not bytes or len(self.hash) != HASH_BYTES:
            raise ValueError("a slice has no hash")

    def is_hash_of(self, content: memoryview | bytes) -> bool:
        """Whether these are the slice's bytes."""
        return hash_of(content) == self.hash


@dataclass(frozen=True)
class Manifest:
    """The slices of a data set, all of one format."""

    form: str
    slices: tuple[Slice, ...]

    def __post_init__(self) -> None:
        if self.form not in FORMAT_NAMES or not 1 <= len(self.slices) <= SLICES_MAX:
            raise ValueError("a manifest has an unknown format, or no slices, or too many")

    @cached_property
    def packed(self) -> bytes:
        """The manifest's bytes, the same on all machines."""
        return bytes(msgpack.packb([self.form, [list(astuple(one)) for one in self.slices]]))

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
        """Decode a manifest. Raises ValueError for any other bytes.

        Each slice is checked before the next is read: 64 MiB of empty lists would become 4 GB of Python's objects.
        """
        unpacker = msgpack.Unpacker(
            max_buffer_size=max(1, len(packed)), max_array_len=0, max_map_len=0, max_ext_len=0,
            max_str_len=4 * NAME_MAX, max_bin_len=HASH_BYTES,
        )  # fmt: skip
        try:
            unpacker.feed(packed)
            if unpacker.read_array_header() != len(fields(cls)):
                raise ValueError("it has another number of fields")
            form, count = unpacker.unpack(), unpacker.read_array_header()
            if count > SLICES_MAX:
                raise ValueError("it has too many slices")
            found = cls(form, tuple(_slice(unpacker) for _ in range(count)))
            if unpacker.tell() != len(packed):
                raise ValueError("more bytes follow")
            return found
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"these bytes are no manifest: {error}") from None


def _slice(unpacker: msgpack.Unpacker) -> Slice:
    if unpacker.read_array_header() != len(fields(Slice)):
        raise ValueError("a slice has another number of fields")
    return Slice(*(unpacker.unpack() for _ in fields(Slice)))


def hash_of(content: memoryview | bytes) -> bytes:
    """BLAKE3 of these bytes."""
    return blake3(content).digest()
