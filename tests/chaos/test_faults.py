"""Full disks, and daemons that die: one peer is hit, the others go on."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm import Member, Swarm, agree, stall_s, until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(300)]

INTERVAL_S, TIMEOUT_S = 0.5, 5.0
CONFIG = {"sync_every": 4, "outer_lr": 0.5, "codec": "fp32", "start_peers": 3}
CONFIG |= {"heartbeat_interval": INTERVAL_S, "heartbeat_timeout": TIMEOUT_S, "round_timeout": 20.0}
TRAINING = {"config": CONFIG, "params": {"w": [100_000]}, "step_s": 0.05}
BOUND_S = TIMEOUT_S + 5 * INTERVAL_S


def settled(members: list[Member]) -> None:
    for member in members:
        until(lambda m=member: len(m.lines("epoch", synced=True)) > 6, 120.0, f"rounds of {member.name}")


def test_a_dead_daemon_is_one_more_death(swarm: Swarm) -> None:
    """A peer whose p2pd is killed soon ends with an error that says so, and leaves nothing behind; the others go on."""
    swarm.bootstrap()
    *survivors, victim = [swarm.start(name, **TRAINING) for name in "abc"]
    settled([*survivors, victim])
    (daemon,) = [process for process in victim.family() if process.name() == "p2pd"]
    daemon.kill()
    killed_at = time.time()
    error = victim.wait_for("error", 15.0)
    assert "p2pd" in error["sentence"] or "daemon" in error["sentence"], error
    assert victim.status(15.0) == 1
    swarm.gone()
    for member in survivors:
        member.epoch(member.reached() + 5)
        assert stall_s(member, killed_at) <= BOUND_S
    agree(survivors)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no disk of a chosen size can be made here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_loud_and_ends_nothing(swarm: Swarm, small_disk: Path) -> None:
    """Each checkpoint that doesn't fit is an error in the log; training goes on, and no torn checkpoint is left."""
    swarm.bootstrap()
    config = {**CONFIG, "start_peers": 2}
    disk = {"checkpoint_dir": str(small_disk), "save_every": 2}
    full = swarm.start("a", **{**TRAINING, "config": config}, local=disk)
    other = swarm.start("b", **{**TRAINING, "config": config})
    settled([full, other])
    full.wait_for_log("No space left")
    for member in (full, other):
        member.epoch(member.reached() + 10)
    agree([full, other])
    assert full.log().count("No space left") > 1
    assert not list(small_disk.glob("checkpoint-*/manifest*"))
