"""Files with secrets. Only their owner may read them, none is ever overwritten, and a peer's identity is in use by one
process at a time.

Law: writes and reads files; of their content it knows only that an identity file holds a `SigningKey`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from p2p_diloco.errors import ConfigError, reason
from p2p_diloco.net.signing import SigningKey

OTHERS = 0o077
"""The permission bits of group and others."""

_KEY = "identity_path"


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


class IdentityFile:
    """A key file, locked by this process until `release`."""

    def __init__(self, path: Path, key: SigningKey, lock: IO[bytes] | None, ephemeral_dir: Path | None) -> None:
        self.path, self.key = path, key
        self._lock = lock
        self._ephemeral_dir = ephemeral_dir

    @classmethod
    def claim(cls, path: str | None) -> IdentityFile:
        """Lock the key file at `path`; if the file doesn't exist, make a new key there. Without a path, make a
        temporary key file.

        Raises:
            ConfigError: the file can't be read or written, holds no key, or another process uses it.
        """
        if path is None:
            folder = Path(tempfile.mkdtemp(prefix="p2p-diloco-"))
            _make(folder / "identity")
            return cls(folder / "identity", read_key(folder / "identity"), None, folder)
        file = Path(path).expanduser()
        try:
            if not file.exists():
                _make(file)
            key, lock = read_key(file), file.open("rb")
        except OSError as error:
            mend = "name a file in a folder that this user may read and write"
            raise ConfigError(f"can't be used ({reason(error)})", key=_KEY, value=path, mend=mend) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            mend = "give each peer an identity of its own, or end the other process"
            raise ConfigError("is in use by another process", key=_KEY, value=path, mend=mend) from None
        return cls(file, key, lock, None)

    def forget_if_ephemeral(self) -> None:
        """Delete the key file if it is a temporary one. Call this once the daemon has read the file."""
        if self._ephemeral_dir is not None:
            shutil.rmtree(self._ephemeral_dir, ignore_errors=True)

    def release(self) -> None:
        """Unlock the key file; delete it if it is a temporary one."""
        self.forget_if_ephemeral()
        if self._lock is not None:
            self._lock.close()


def read_key(path: Path) -> SigningKey:
    """Read the key from the identity file at `path`. It takes no lock: a running peer may have the file in use.

    Raises:
        ConfigError: the file can't be read, or holds no Ed25519 key.
    """
    mend = "name the file that --identity-path made"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't be read ({reason(error)})", key=_KEY, value=path, mend=mend) from None
    try:
        return SigningKey.read(content)
    except ValueError:
        raise ConfigError("holds no key of a peer", key=_KEY, value=path, mend=mend) from None


def _make(file: Path) -> None:
    """Write a new key to a temporary file in the same folder, then link this file to its final name in one step, so
    that no process sees a part of the key."""
    descriptor, unfinished = tempfile.mkstemp(prefix=".identity-", dir=file.parent)  # readable by its owner alone
    try:
        with open(descriptor, "wb") as made:
            made.write(SigningKey.create().content)
            made.flush()
            os.fsync(made.fileno())
        with contextlib.suppress(FileExistsError):  # another process has made one in the meantime: use that one
            os.link(unfinished, file)
    finally:
        os.unlink(unfinished)
