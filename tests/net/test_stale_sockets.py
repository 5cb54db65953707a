"""Sockets that killed daemons left behind are removed, and no others."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest

from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.net import stale_sockets
from p2p_diloco.net.stale_sockets import YOUNG_S, check_writable, sweep


def left_behind(folder: Path, name: str, age_s: float = 2 * YOUNG_S) -> Path:
    """A socket on which nothing listens any longer."""
    path = folder / name
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))
    return path


def test_sockets_of_daemons_that_are_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sockets of such a daemon go. Those of a daemon that listens, young ones, and other files stay."""
    for name in ("p2pd-a", "p2pclient-a", "p2pd-b"):
        left_behind(tmp_path, f"hivemind-{name}.sock")
    young = left_behind(tmp_path, "hivemind-p2pd-young.sock", age_s=0.0)
    other = left_behind(tmp_path, "other-p2pd-c.sock")
    plain = tmp_path / "hivemind-p2pd-plain.sock"
    plain.write_text("")
    os.utime(plain, (0.0, 0.0))
    with socket.socket(socket.AF_UNIX) as listener:
        listening = tmp_path / "hivemind-p2pd-live.sock"
        listener.bind(str(listening))
        listener.listen()
        os.utime(listening, (0.0, 0.0))
        with monkeypatch.context() as patch:
            patch.setattr(stale_sockets.os, "getuid", lambda: plain.stat().st_uid + 1)
            assert sweep(tmp_path) == 0  # those of other users stay
        assert sweep(tmp_path) == 2
        assert sorted(tmp_path.iterdir()) == sorted((listening, young, other, plain))


def test_hivemind_makes_its_sockets_where_they_are_looked_for() -> None:
    """A release of Hivemind that puts them elsewhere fails here."""
    from hivemind.p2p import P2P

    assert f"/unix{stale_sockets.FOLDER}/hivemind-" == P2P._UNIX_SOCKET_PREFIX
    assert stale_sockets.DAEMONS == "hivemind-p2pd-"


def test_a_folder_that_can_not_be_written_is_named_with_the_mend(tmp_path: Path) -> None:
    """As /tmp in a container with a read-only root. One that can be written is left as it was; and too few open files
    are another fault."""
    check_writable(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(P2PDilocoError, match=r"absent can't be written \(no such .*; let this user write there"):
        check_writable(tmp_path / "absent")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # the standard streams
    try:
        with pytest.raises(P2PDilocoError, match=r"no further file .*\(too many open files\); .*ulimit -n"):
            check_writable(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
