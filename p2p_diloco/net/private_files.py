"""Files with secrets: only their owner may read them, and none is ever overwritten.

Law: writes and reads files, whatever they hold.
"""

from __future__ import annotations

import os
from pathlib import Path

from p2p_diloco.errors import ConfigError, reason

OTHERS = 0o077
"""The permission bits of group and others."""


def write_new(path: Path, text: str, *, key: str) -> None:
    """Write a new file that only its owner may read. `key`: the setting that an error names.

    Raises:
        ConfigError: the file exists already, or can't be written.
    """
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        mend = "name another file, or move this one away"
        raise ConfigError("exists and is not overwritten", key=key, value=path, mend=mend) from None
    except OSError as error:
        mend = "name a place that this user may write to"
        raise ConfigError(f"can't be written ({reason(error)})", key=key, value=path, mend=mend) from None


def read(path: Path, *, key: str) -> str:
    """The text of a file.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        mend = "name a file that this user can read"
        raise ConfigError(f"can't be read ({reason(error)})", key=key, value=path, mend=mend) from None
    except UnicodeDecodeError:
        raise ConfigError("is no text file", key=key, value=path, mend="name the right file") from None


def read_private(path: Path, *, key: str) -> str:
    """The text of a file that only its owner can read.

    Raises:
        ConfigError: it can't be read, or other users can read it.
    """
    text = read(path, key=key)
    if open_to_others(path):
        wrong = "can be read by other users of this machine"
        raise ConfigError(wrong, key=key, value=path, mend=f"run: chmod 600 {path}")
    return text


def open_to_others(path: Path) -> bool:
    """Whether the group or other users may read or write the file."""
    return bool(path.stat().st_mode & OTHERS)
