"""Peers in what containers are like: as process 1, as a user without a name or a home, without /dev/shm, on a root that
can't be written. Needs root, to make such places.
"""

from __future__ import annotations

import os
import shutil
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
TRAINS = """
import os, torch
from p2p_diloco import Peer
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Peer(model, optimizer, run_id="contained", config={"sync_every": 2, "stop_after_epochs": 2}) as peer:
    while not peer.finished:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
print(peer.epoch, os.getpid(), os.getuid())
"""
NOBODY = "setpriv --reuid 12345 --regid 12345 --clear-groups"  # no user of this number is known
SOMEBODY = "12D3KooWJ7XELPLGcjCsanCpFvdpDJFTopB9XdNAXfXeMrMAvkdW"
ONLY_READ = "mount -t tmpfs -o ro none"
BARE_DEV = "mount -t tmpfs none /dev; mknod -m 666 /dev/null c 1 3; mknod -m 666 /dev/urandom c 1 9"


def a_tmp(mode: str = "1777", *, only_read: bool = False) -> str:
    """Shell commands that make an empty /tmp. A checkout that lies in /tmp stays where it is."""
    made = f"mount -t tmpfs none /tmp; chmod {mode} /tmp"
    if ROOT.is_relative_to("/tmp"):
        made = f"mount --bind {ROOT} /mnt; {made}; mkdir -p {ROOT}; mount --move /mnt {ROOT}"
    return f"{made}; mount -o remount,ro /tmp" if only_read else made


class Greets(socketserver.BaseRequestHandler):
    """Answers as every libp2p program does."""

    def handle(self) -> None:
        self.request.sendall(b"\x13/multistream/1.0.0\n")


@pytest.fixture(autouse=True)
def namespaces() -> None:
    """Skip where no such places can be made."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if missing := [tool for tool in ("unshare", "setpriv", "mount") if shutil.which(tool) is None]:
        pytest.skip(f"needs {missing[0]}")
    made = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no mount namespaces here: {made.stderr.strip()}")


def in_place(place: str, *command: str, as_user: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of this Python as process 1 of a place of its own, which the shell commands in `place` make."""
    made = f'set -e; {opened() if as_user else ""}; {place}; exec {as_user} "$@"'.replace("; ;", ";")
    start = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", made, "sh"]
    # torch, once it is imported, leaves the path of a cache in this process' environment, which no container has
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TORCH")}
    variables = {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **env}
    return subprocess.run(
        [*start, sys.executable, *command], cwd="/", env=variables, capture_output=True, text=True, timeout=180
    )


def opened() -> str:
    """Shell commands that let other users reach this Python, if it lies in a folder that is closed to them."""
    python = Path(sys.executable).resolve()
    closed = next((folder for folder in reversed(python.parents) if not folder.stat().st_mode & 1), None)
    if closed is None:
        return "true"
    inside = closed / python.relative_to(closed).parts[0]
    return (
        f"mount --bind {inside} /mnt; mount -t tmpfs none {closed}; chmod 755 {closed}; mkdir {inside}; "
        f"mount --move /mnt {inside}"
    )


EVERYTHING = f"{a_tmp()}; {BARE_DEV}; mount -o remount,bind,ro /"


@pytest.mark.parametrize(
    ("place", "user", "home"),
    [
        (EVERYTHING, NOBODY, "/nowhere"),
        pytest.param(f"{ONLY_READ} /dev/shm; {ONLY_READ} /srv", "", "/srv", marks=pytest.mark.chaos),
    ],
    ids=["unknown-user", "home-only-read"],
)
def test_a_peer_trains_in_a_container(place: str, user: str, home: str) -> None:
    """As process 1. A bare /dev has no /dev/shm, which Hivemind asks for."""
    ended = in_place(place, "-c", TRAINS, as_user=user, HOME=home)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["2", "1", "12345" if user else "0"]


@pytest.mark.parametrize("user", [pytest.param("", marks=pytest.mark.chaos), NOBODY])
def test_a_tmp_that_cant_be_written_is_named_by_the_script_and_by_doctor(user: str) -> None:
    place = a_tmp("755") if user else a_tmp(only_read=True)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Greets) as answers:
        threading.Thread(target=answers.serve_forever, daemon=True).start()
        peer = f"/ip4/127.0.0.1/tcp/{answers.server_address[1]}/p2p/{SOMEBODY}"
        doctor = ["-m", "p2p_diloco", "doctor"]
        for command in (["-c", TRAINS], [*doctor, "--initial-peers", peer]):
            ended = in_place(place, *command, as_user=user, HOME="/nowhere")
            assert ended.returncode == 1
            said = ended.stdout + ended.stderr
            assert "docker run --tmpfs /tmp" in said
            assert said.count("/tmp can't be written") == 1
            assert "Traceback" not in said or command[0] == "-c"
        answers.shutdown()
