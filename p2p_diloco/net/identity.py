"""Keeps the file that holds a peer's private key. The key is the peer's identity.

Law: only the file; `signing` reads the key. The file is complete or absent, readable only by its owner, and in use by
one process at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from p2p_diloco.errors import ConfigError

_KEY = "identity_path"


class IdentityFile:
    """A key file, locked by this process until `release`."""

    def __init__(self, path: Path, lock: IO[bytes] | None, ephemeral_dir: Path | None) -> None:
        self.path = path
        self.content = path.read_bytes()
        self._lock = lock
        self._ephemeral_dir = ephemeral_dir

    @classmethod
    def claim(cls, path: str | None, generate: Callable[[str], None]) -> IdentityFile:
        """Lock the key file at `path`; if the file doesn't exist, `generate` makes it. Without a path, make a temporary
        key file.

        Raises:
            ConfigError: the file can't be read or written, or another process uses it.
        """
        if path is None:
            folder = Path(tempfile.mkdtemp(prefix="p2p-diloco-"))
            generate(str(folder / "identity"))
            return cls(folder / "identity", None, folder)
        file = Path(path).expanduser()
        try:
            if not file.exists():
                _generate_whole(file, generate)
            lock = file.open("rb")
        except OSError as error:
            mend = "name a file in a folder that this user may read and write"
            raise ConfigError(f"can't be used ({error.strerror})", key=_KEY, value=path, mend=mend) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            mend = "give each peer an identity of its own, or end the other process"
            raise ConfigError("is in use by another process", key=_KEY, value=path, mend=mend) from None
        return cls(file, lock, None)

    def forget_if_ephemeral(self) -> None:
        """Delete the key file if it is a temporary one. Call this once the daemon has read the file."""
        if self._ephemeral_dir is not None:
            shutil.rmtree(self._ephemeral_dir, ignore_errors=True)

    def release(self) -> None:
        """Unlock the key file; delete it if it is a temporary one."""
        self.forget_if_ephemeral()
        if self._lock is not None:
            self._lock.close()


def _generate_whole(file: Path, generate: Callable[[str], None]) -> None:
    """Make the key file in a private folder, then link it to its final name in one step, so that no process sees a part
    of it."""
    folder = Path(tempfile.mkdtemp(prefix=".identity-", dir=file.parent))
    try:
        generate(str(folder / "identity"))
        with contextlib.suppress(FileExistsError):  # another process has made one in the meantime: use that one
            os.link(folder / "identity", file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
