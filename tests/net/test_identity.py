"""Identity files: made whole, private, in use by one process, and read with clear errors."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from threading import Barrier, Thread

import pytest

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.private_files import IdentityFile, read_key

RSA = b"\x08\x00\x12\xa8\x09" + bytes(1192)
"""As libp2p's file of an RSA key begins, and as long as one."""


def test_a_new_file_is_private_and_in_use_by_one_process(tmp_path: Path) -> None:
    # A new file is private and in use by one process. Only its owner may read it, and nothing else is left in its
    # folder. A second claim is refused until the first is released, and finds the same key then; a key can be
    # read all the while.
    path = tmp_path / "identity"
    first = IdentityFile.claim(str(path))
    with pytest.raises(ConfigError, match=r"identity_path=.*in use by another process"):
        IdentityFile.claim(str(path))
    assert read_key(path).peer_id == first.key.peer_id
    first.release()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["identity"]
    second = IdentityFile.claim(str(path))
    second.release()
    assert first.key.peer_id == second.key.peer_id

    # A temporary file goes with its peer. Without a path each claim has a key of its own, in a private folder
    # that is deleted.
    a, b = IdentityFile.claim(None), IdentityFile.claim(None)
    assert a.key.peer_id != b.key.peer_id
    assert stat.S_IMODE(a.path.parent.stat().st_mode) == 0o700
    for identity in (a, b):
        assert read_key(identity.path).peer_id == identity.key.peer_id
        identity.release()
        assert not identity.path.parent.exists()


def test_processes_that_start_at_once_agree_on_one_key(tmp_path: Path) -> None:
    """Of several that make the file at the same time one wins; none reads a part of it, and nothing else is left."""
    path, start = tmp_path / "identity", Barrier(8)
    claimed: list[IdentityFile] = []
    refused: list[ConfigError] = []

    def claim() -> None:
        start.wait(30.0)
        try:
            claimed.append(IdentityFile.claim(str(path)))
        except ConfigError as error:
            refused.append(error)

    threads = [Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert (len(claimed), len(refused)) == (1, 7)
    assert all("in use by another process" in str(error) for error in refused)
    assert claimed[0].key.peer_id == read_key(path).peer_id
    claimed[0].release()
    assert os.listdir(tmp_path) == ["identity"]


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is a ConfigError, and neither the file nor a part of it stays."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"identity_path=.*no space left"):
        IdentityFile.claim(str(tmp_path / "identity"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [None, b"", b"\x08\x01\x12\x40", b"\x08\x01\x12\x03abc", RSA])
def test_a_file_without_a_key_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    """Whether it doesn't exist or holds something else, the error names the key, the file and the mend. A peer that
    starts is refused as well, and the file stays."""
    path = tmp_path / "identity"
    if content is not None:
        path.write_bytes(content)
    for use in (read_key, lambda path: IdentityFile.claim(str(path))) if content is not None else (read_key,):
        with pytest.raises(ConfigError, match=r"identity_path=.*identity.*name the file") as error:
            use(path)
        assert (error.value.key, error.value.value) == ("identity_path", str(path))
    assert content is None or path.read_bytes() == content
