"""Checks this machine: its memory for a model, and its disk space for checkpoints.

Law: looks at memory and disks, and computes what a model needs; leaves no file behind. docs/operations.md has the
measured bytes of memory for each parameter.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

import psutil

from p2p_diloco.cli.doctor.report import Finding
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import reason
from p2p_diloco.observe.figures import bytes_of
from p2p_diloco.planning.memory import NODE_BYTES, per_parameter

SAVED_PER_PARAMETER = 16
"""Bytes of a checkpoint for each parameter: 4 each for the global value, the outer momentum and AdamW's two moments."""
ROOM_BYTES = 1_000_000_000
"""If the model's size is unknown, less free disk space than this for its checkpoints is a warning."""
_TRIED_BYTES = 64 * 1024
_CGROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def memory(run: RunConfig, parameters: int | None, free_bytes: int) -> Finding:
    """Check whether the free memory is enough for a model with `parameters` parameters. None: the number is unknown."""
    free = f"{bytes_of(free_bytes, ' ')} free"
    if parameters is None:
        if free_bytes < NODE_BYTES:
            mend = "end other programs, or take a larger machine"
            return Finding("memory", "bad", f"{free}, and a node alone takes {bytes_of(NODE_BYTES, ' ')}", mend)
        return Finding("memory", "ok", f"{free}; --params N tells whether a model of N parameters fits")
    each = per_parameter(run, parameters)
    needed = NODE_BYTES + each * parameters
    text = (
        f"{bytes_of(needed, ' ')} needed beside the model and its optimizer "
        f"({each} bytes for each of {parameters:,} parameters, and {bytes_of(NODE_BYTES, ' ')} for the node); {free}"
    )
    if needed <= free_bytes:
        return Finding("memory", "ok", text)
    return Finding("memory", "bad", text, "end other programs, train a smaller model, or take a larger machine")


def free_memory(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The bytes of memory that are free on this machine; in a container, what the container's limit leaves if less."""
    return min([psutil.virtual_memory().available, *_left_in(cgroups)])


def _left_in(cgroups: Path) -> Iterator[int]:
    for limit, used in _CGROUPS:
        try:
            yield max(0, int((cgroups / limit).read_text()) - int((cgroups / used).read_text()))
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue


def disk(peer: PeerConfig, parameters: int | None) -> Finding:
    """Check whether this peer can write its checkpoints, and whether the disk has room for them."""
    folder = peer.checkpoint_dir
    if folder is None:
        return Finding("disk", "ok", "no checkpoints are kept (--checkpoint-dir is unset)")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        free_bytes = shutil.disk_usage(there).free
        _try_to_write(there)
    except OSError as error:
        return _unwritable(folder, there, error)
    free = f"{folder}: {bytes_of(free_bytes, ' ')} free"
    if parameters is None:
        if free_bytes >= ROOM_BYTES:
            return Finding("disk", "ok", free)
        return Finding("disk", "warn", free, _more_room(there))
    copies = peer.keep + 1
    needed = copies * SAVED_PER_PARAMETER * parameters
    text = f"{free}, about {bytes_of(needed, ' ')} needed ({copies} checkpoints while one is written, with AdamW)"
    return Finding("disk", "ok", text) if needed <= free_bytes else Finding("disk", "bad", text, _more_room(there))


def _try_to_write(folder: Path) -> None:
    with TemporaryFile(dir=folder) as file:
        file.write(bytes(_TRIED_BYTES))
        file.flush()


def _unwritable(folder: Path, there: Path, error: OSError) -> Finding:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Finding("disk", "bad", f"{folder}: the disk is full", _more_room(there))
    mend = f"let this user write to {there}, or name another folder with --checkpoint-dir"
    return Finding("disk", "bad", f"{folder} can't be written: {reason(error)}", mend)


def _more_room(there: Path) -> str:
    return f"delete files on that disk (`df -h {there}`), or name a folder on another one with --checkpoint-dir"
