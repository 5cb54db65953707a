"""Real text as bytes: the training text and the held-out text of the built-in trainer.

Law: reading and splitting, without torch, so that a text that can't be used is reported before torch is loaded. The
result is a function of the text alone.

The text is cut in blocks (a file, or a part of a long one). A block's *name* decides whether it is held
out: peers that read the same text hold out the same blocks, and no held-out byte is ever trained on.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from p2p_diloco.errors import ConfigError, reason

BLOCK_BYTES = 32 * 1024
"""The length of the longest block; most source files are a single block."""
HELD_OUT_SHARE = 1 / 16
MAX_TEXT_BYTES = 64 * 1024 * 1024
"""The most bytes that are read: the text is kept in memory, and this trainer is for small models."""
BINARY_PROBE_BYTES = 8 * 1024
"""A file with a zero byte among its first BINARY_PROBE_BYTES bytes is treated as binary, and skipped."""

LIBRARY_FILE_BYTES = range(1024, 256 * 1024)
"""Sizes, in bytes, of standard library files that are read: smaller files are stubs, larger ones generated tables."""
LIBRARY_SKIPPED = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages"}
    | {"test", "tests", "turtledemo"}
)
"""Folders that are not part of the library proper, that some machines lack, or that hold tables."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of the text, and the name that decides whether it is held out."""

    name: str
    content: bytes

    @property
    def rank(self) -> float:
        """A number in [0, 1) that is computed from the name. It is the same on every machine."""
        return hash_of(self.name) / 2**64


@dataclass(frozen=True, slots=True)
class Text:
    """The training blocks and the held-out blocks; no block is in both."""

    training: tuple[Block, ...]
    held_out: tuple[Block, ...]


def load_text(data: Path | None = None) -> Text:
    """Read the text of a file or a folder, and split it into training blocks and held-out blocks. With None, read the
    source files of Python's standard library.

    Raises ConfigError if the path doesn't exist, can't be read, or has too little text to hold a part of it out.
    """
    blocks = list(_library_blocks() if data is None else _blocks_at(data))
    held_out = [block for block in blocks if block.rank < HELD_OUT_SHARE]
    if blocks and not held_out:
        held_out = [min(blocks, key=lambda block: block.rank)]
    names = {block.name for block in held_out}
    training = [block for block in blocks if block.name not in names]
    if not training:
        size = sum(len(block.content) for block in blocks)
        wrong = f"holds {size} bytes of text, which is too little (hidden and binary files are left out)"
        raise _unusable(data, wrong)
    return Text(tuple(training), tuple(held_out))


def hash_of(text: str) -> int:
    """Return a 64-bit hash of the text. (Python's own hash differs from process to process.)"""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _library_blocks() -> Iterator[Block]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _files_at(root, skipped=LIBRARY_SKIPPED):
        if path.suffix == ".py" and path.stat().st_size in LIBRARY_FILE_BYTES:
            yield from _cut(path.relative_to(root).as_posix(), path.read_bytes())


def _blocks_at(data: Path) -> Iterator[Block]:
    """Yield the blocks of a file or a folder."""
    if not os.path.exists(data):  # unlike Path.exists, also False if a parent folder can't be entered
        raise _unusable(data, "does not exist")
    left = MAX_TEXT_BYTES
    for path in _files_at(data):
        try:
            with path.open("rb") as file:
                content = file.read(left + 1)
        except OSError as error:
            raise _unreadable(data, error) from None
        if b"\0" in content[:BINARY_PROBE_BYTES]:
            continue
        # A single file's name is not used, so that copies under other names are split in the same way.
        yield from _cut("" if path == data else path.relative_to(data).as_posix(), content[:left])
        left -= len(content)
        if left < 0:
            log.warning("data=%s holds more than %d MiB: the rest is left out", data, MAX_TEXT_BYTES >> 20)
            return


def _files_at(data: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Return the file itself, or a folder's files in the same order on every machine. Hidden files and folders are left
    out, and so are folders whose name is in `skipped`."""
    if not data.is_dir():
        return [data]

    def stop(error: OSError) -> None:
        raise _unreadable(data, error)

    found: list[Path] = []
    for folder, inner, names in os.walk(data, onerror=stop):
        # Assigned in place, so that the walk doesn't enter the other folders.
        inner[:] = [name for name in inner if not name.startswith(".") and name not in skipped]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    found = [path for path in found if path.is_file()]  # no pipes, no dangling links
    return sorted(found, key=lambda path: path.relative_to(data).as_posix())


def _cut(name: str, content: bytes) -> Iterator[Block]:
    for number, start in enumerate(range(0, len(content), BLOCK_BYTES)):
        yield Block(f"{name}:{number}", content[start : start + BLOCK_BYTES])


def _unreadable(data: Path, error: OSError) -> ConfigError:
    return _unusable(data, f"can't be read ({reason(error)})")


def _unusable(data: Path | None, wrong: str) -> ConfigError:
    if data is None:
        return ConfigError(
            "has no source files on this machine",
            key="the Python standard library",
            mend="name other text with data",
        )
    return ConfigError(
        wrong,
        key="data",
        value=data,
        mend=f"name a file or a folder with more than {BLOCK_BYTES} bytes of text, or leave it out",
    )
