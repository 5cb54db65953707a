"""The manifest of a data set that data nodes serve: its slices, with their lengths and hashes; and slices on this
machine's disk: a folder of bounded length.

Law: a manifest is a value. All who use a data set must have the same manifest: its hash is the data set's identity. A
packed manifest comes from another peer: any bytes give a manifest or a ValueError.

A file of the folder is named by the hash of its content, is complete as soon as it has its name, and is checked before
its first use in a process. When room is needed, the files that were used longest ago are removed first. Several peers
may share a folder; each peer after the first may exceed the bound by `SPARE` of the bound, because it looks at the
others' files only now and then.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
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


SPARE = 1 / 16
"""A fraction of the bound. This much is made free at a time, and at most this much is put between two looks at all
files."""


class Cache:
    """The slices in a folder. Its calls block, and one thread at a time may use it."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        """Raises OSError if the folder can't be made."""
        self.folder, self.bytes_max = folder, bytes_max
        self._checked: set[bytes] = set()
        folder.mkdir(parents=True, exist_ok=True)
        self._room = self._make_room(0)  # bytes that may be put before the next look

    def find(self, one: Slice) -> Path | None:
        """The path of the file with this slice; None if there is no such file, or its content is damaged."""
        path = self._path(one)
        try:
            if one.hash not in self._checked and not one.is_hash_of(path.read_bytes()):
                path.unlink()
                return None
            os.utime(path)
        except OSError:
            return None
        self._checked.add(one.hash)
        return path

    def put(self, one: Slice, content: memoryview) -> Path:
        """Keep a slice, which the caller has checked. Raises OSError if the disk doesn't take it."""
        if one.nbytes > self._room:
            self._room = self._make_room(one.nbytes)
        path = self._path(one)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            part.write_bytes(content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        self._room -= one.nbytes
        self._checked.add(one.hash)
        return path

    def _path(self, one: Slice) -> Path:
        return self.folder / one.hash.hex()

    def _make_room(self, nbytes: int) -> int:
        """Look at all files. If they and `nbytes` more exceed the bound, remove files, those used longest ago first.
        Returns how many bytes may be put before the next look."""
        files = list[tuple[float, int, Path]]()
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # another peer may just have removed it
                found = entry.stat()
                files.append((found.st_mtime, found.st_size, Path(entry.path)))
        total, spare = sum(length for _, length, _ in files), int(SPARE * self.bytes_max)
        too_many = total + nbytes > self.bytes_max
        for used_at, length, path in sorted(files) if too_many else ():
            if total + nbytes <= self.bytes_max - spare:
                break
            if path.suffix == ".part" and time.time() - used_at < 60.0:
                continue  # another peer writes it
            with suppress(OSError):
                path.unlink()
            total -= length
        return min(self.bytes_max - total, max(nbytes, spare))
