"""Files of this machine as the slices of a data set.

Law: two machines that cut the same files find the same manifest, wherever the files lie, because the manifest names a
file by its path below the folder that was given, or by its bare name. Slices are in the order of these names. A slice
is a range of bytes of one file, and by itself a file of the same format. Files are read and never written.

| format | files | a sample | cut |
|---|---|---|---|
| text | any text | a line, as text | at the end of a line |
| safetensors | `.safetensors` | a row: the tensors at one index of their first dimension | not: a file is a slice |
| tar | `.tar` | consecutive files of one name up to its first dot, as {rest of the name: bytes} | between samples |
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from p2p_diloco.data.manifest import NAME_MAX, SLICE_BYTES_MAX, SLICES_MAX, Form, Manifest, Slice, hash_of
from p2p_diloco.errors import ConfigError, listed, reason


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
    if not slices:
        raise ConfigError("is empty", key="PATH", value=listed([*map(str, paths)], 3), mend="name files with data")
    if len(slices) > SLICES_MAX:
        wrong = f"makes {len(slices)} slices, and a data set has at most {SLICES_MAX}"
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


# -- formats

Range = tuple[int, int, int]
"""Where a slice is in its file: the first byte, the number of bytes, and the number of its samples."""

_SPLIT = f"split it into files of at most {SLICE_BYTES_MAX >> 20} MiB"


@dataclass(frozen=True, slots=True)
class Format:
    """`cut`: finds the slices of a file, each of about the given number of bytes. `read`: returns the samples of a
    slice."""

    cut: Callable[[Path, int], Iterator[Range]]
    read: Callable[[Path], Sequence[Any]]


def format_of(path: Path) -> Form:
    """The format of a file, by the end of its name."""
    forms: dict[str, Form] = {".safetensors": "safetensors", ".tar": "tar"}
    return forms.get(path.suffix, "text")


# -- text


def _cut_text(path: Path, slice_bytes: int) -> Iterator[Range]:
    start = 0
    with path.open("rb") as file:
        while block := file.read(slice_bytes):
            block += file.readline(SLICE_BYTES_MAX)  # up to the line's end
            if b"\0" in block:
                raise _unusable(path, "is no text: it has a byte 0", "give text, .safetensors or .tar files")
            yield start, len(block), len(_lines(block))
            start += len(block)


def _lines(content: bytes) -> list[bytes]:
    return content.removesuffix(b"\n").split(b"\n")


def _read_text(path: Path) -> Sequence[str]:
    return [line.decode(errors="replace") for line in _lines(path.read_bytes())]


# -- safetensors


def _cut_tensors(path: Path, slice_bytes: int) -> Iterator[Range]:
    try:
        with safe_open(path, framework="np") as file:
            lengths = {(file.get_slice(key).get_shape() or [0])[0] for key in file.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        raise _unusable(path, f"can't be read as safetensors ({error})", "write it anew") from None
    if len(lengths) != 1 or 0 in lengths:
        mend = "give each tensor one row for each sample"
        raise _unusable(path, "needs one or more tensors, all with a first dimension of one length above 0", mend)
    yield 0, path.stat().st_size, lengths.pop()


class Rows(Sequence[Any]):
    """The samples of a safetensors file: one for each index of the tensors' first dimension."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            self._tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    def __getitem__(self, row: Any) -> Any:
        return {key: tensor[row] for key, tensor in self._tensors.items()}


# -- tar


def _cut_tar(path: Path, slice_bytes: int) -> Iterator[Range]:
    try:
        with tarfile.open(path, "r:") as tar:
            start, samples = 0, 0
            for _, members in groupby(tar, _key_of):
                group = list(members)
                if sparse := [member.name for member in group if member.issparse()]:
                    raise _unusable(path, f"has the sparse file {sparse[0]}", "write it without --sparse")
                if samples and group[0].offset - start >= slice_bytes:
                    yield start, group[0].offset - start, samples
                    start, samples = group[0].offset, 0
                samples += any(map(_has_content, group))
            if samples:
                yield start, tar.offset - start, samples
    except tarfile.TarError as error:
        raise _unusable(path, f"can't be read as a tar file ({error})", "write it anew, without compression") from None


def _key_of(member: tarfile.TarInfo) -> str:
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _has_content(member: tarfile.TarInfo) -> bool:
    """Whether a member's bytes lie in the archive. Links have none; a sparse file of a few bytes may unfold to any
    length."""
    return member.isreg() and not member.issparse()


def _read_tar(path: Path) -> Sequence[dict[str, bytes]]:
    with tarfile.open(path, "r:") as tar:
        found = []
        for key, members in groupby(tar, _key_of):
            files = [(one.name[len(key) + 1 :], tar.extractfile(one)) for one in members if _has_content(one)]
            if sample := {rest: file.read() for rest, file in files if file is not None}:
                found.append(sample)
        return found


FORMATS = {
    "text": Format(_cut_text, _read_text),
    "safetensors": Format(_cut_tensors, Rows),
    "tar": Format(_cut_tar, _read_tar),
}


def cut(path: Path, form: str, slice_bytes: int) -> Iterator[Range]:
    """The slices of a file, of about `slice_bytes` each; the last one may be shorter, and a sample is never cut.

    Raises:
        ConfigError: the file has another format, or a sample that is too long.
    """
    for found in FORMATS[form].cut(path, slice_bytes):
        if found[1] > SLICE_BYTES_MAX:
            raise _unusable(path, "can't be cut into slices that are short enough", _SPLIT)
        yield found


def _unusable(path: Path, wrong: str, mend: str) -> ConfigError:
    return ConfigError(wrong, key="PATH", value=path, mend=mend)
