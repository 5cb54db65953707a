"""Slices of data sets on this machine's disk: a folder of bounded length.

Law: a file is named by the hash of its content, is complete as soon as it has its name, and is checked before its first
use in a process. When room is needed, the files that were used longest ago are removed first. Several peers may share a
folder; each peer after the first may exceed the bound by `SPARE` of the bound, because it looks at the others' files
only now and then.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from p2p_diloco.data.manifest import Slice

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
