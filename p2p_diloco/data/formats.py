"""The formats of data sets that data nodes serve: how a file is cut into slices, and which samples a slice has.

Law: a slice is a range of bytes of one file, and by itself a file of the same format. Files are read and never written.

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

from p2p_diloco.data.manifest import SLICE_BYTES_MAX
from p2p_diloco.errors import ConfigError

Range = tuple[int, int, int]
"""Where a slice is in its file: the first byte, the number of bytes, and the number of its samples."""

_SPLIT = f"split it into files of at most {SLICE_BYTES_MAX >> 20} MiB"


@dataclass(frozen=True, slots=True)
class Format:
    """`cut`: finds the slices of a file, each of about the given number of bytes. `read`: returns the samples of a
    slice."""

    cut: Callable[[Path, int], Iterator[Range]]
    read: Callable[[Path], Sequence[Any]]


def format_of(path: Path) -> str:
    """The format of a file, by the end of its name."""
    return {".safetensors": "safetensors", ".tar": "tar"}.get(path.suffix, "text")


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
