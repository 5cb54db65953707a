"""Files of this machine as the slices of a data set.

Law: two machines that cut the same files find the same manifest, wherever the files lie, because the manifest names a
file by its path below the folder that was given, or by its bare name. Slices are in the order of these names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2p_diloco.data.formats import cut, format_of
from p2p_diloco.data.manifest import NAME_MAX, SLICES_MAX, Manifest, Slice, hash_of
from p2p_diloco.errors import ConfigError, reason


@dataclass(frozen=True, slots=True)
class Piece:
    """Where the bytes of a slice are on this machine."""

    path: Path
    start: int
    nbytes: int

    def read(self) -> bytes:
        """The bytes that are there now. Raises OSError if they can't be read."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.nbytes)


def cut_files(
    paths: Sequence[Path], slice_bytes: int, tell: Callable[[str], None]
) -> tuple[Manifest, tuple[Piece, ...]]:
    """Cut files, and all files in folders, into slices; returns the manifest, and where each slice is. Each slice's
    bytes are read and hashed. `tell` is called with a text that says which file is being read.

    Raises:
        ConfigError: a file can't be used.
    """
    files = _files(paths)
    forms = sorted({format_of(path) for path in files.values()})
    if len(forms) != 1:
        found = f"has files of several formats ({', '.join(forms)})" if forms else "has no files"
        raise ConfigError(found, key="PATH", value=paths, mend="give files of one format")
    slices, pieces = list[Slice](), list[Piece]()
    for number, (name, path) in enumerate(sorted(files.items()), start=1):
        tell(f"reading {path} (file {number} of {len(files)})")
        try:
            for start, nbytes, samples in cut(path, forms[0], slice_bytes):
                pieces.append(Piece(path, start, nbytes))
                slices.append(Slice(name, nbytes, samples, hash_of(pieces[-1].read())))
        except OSError as error:
            raise ConfigError(
                f"can't be read ({reason(error)})", key="PATH", value=path, mend="make it readable"
            ) from None
    if not 1 <= len(slices) <= SLICES_MAX:
        wrong = f"makes {len(slices)} slices, and a data set has 1 to {SLICES_MAX}"
        raise ConfigError(wrong, key="--slice-bytes", value=slice_bytes, mend="choose another length")
    return Manifest(forms[0], tuple(slices)), tuple(pieces)


def _files(paths: Sequence[Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError("isn't there", key="PATH", value=path, mend="name a file or a folder")
        found = {path.name: path}
        if path.is_dir():
            found = {one.relative_to(path).as_posix(): one for one in path.rglob("*") if one.is_file()}
            for one in found.values():
                if not one.resolve().is_relative_to(path.resolve()):
                    mend = "name the file itself, or put it into the folder"
                    raise ConfigError("is a link to a file outside of the folder", key="PATH", value=one, mend=mend)
        for name, one in found.items():
            if name in files or len(name) > NAME_MAX:
                wrong = f"is the name of two files, or longer than {NAME_MAX} letters"
                raise ConfigError(wrong, key="PATH", value=name, mend="give each file another name")
            files[name] = one
    return files
