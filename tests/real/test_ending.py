"""A run that has ended stays ended, whichever of its peers start again, and from whichever checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from swarm import Member, Swarm

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

STOP = 5
CONFIG = {"sync_every": 2, "codec": "fp32", "stop_after_epochs": STOP, "start_peers": 4}
PATIENT_S, IMPATIENT_S = 200.0, 2.0


def newest(folder: Path) -> int:
    return max(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def test_an_ended_run_stays_ended(swarm: Swarm, tmp_path: Path) -> None:
    """Four peers end; three of them lose the last checkpoint. These start again in a new swarm, and wait for the last
    state: one of them briefly, which ends with code 7 and the reason. Then the fourth starts: it and the waiting ones
    end normally, with the digest with which the run had ended. No peer trains in between."""
    disks = {name: tmp_path / name for name in "abcd"}

    def start(name: str, wait_s: float = PATIENT_S) -> Member:
        local = {"checkpoint_dir": str(disks[name]), "save_every": 2, "keep": 3}
        waits = {"wait_timeout": wait_s, "restart_wait": 5.0}
        return swarm.start(name, config=CONFIG, step_s=0.2, local={**local, **waits})

    swarm.bootstrap()
    first = [start(name) for name in disks]
    (digest,) = {peer.wait_for("finished")["digest"] for peer in first}
    assert [peer.status() for peer in first] == [0] * 4
    for folder in disks.values():
        assert newest(folder) == STOP
    for name in "abc":
        shutil.rmtree(disks[name] / f"checkpoint-{STOP}")
    kept = {name: newest(disks[name]) for name in "abc"}
    assert set(kept.values()) <= {2, 4}
    swarm.members[0].die()  # and with it the DHT
    swarm.addresses = []
    swarm.bootstrap()
    a, b, c = start("a", IMPATIENT_S), start("b"), start("c")
    error = a.wait_for("error")
    assert error["kind"] == "GaveUpWaiting"
    assert f"has ended at epoch {STOP} (digest {digest}" in error["sentence"]
    assert f"this peer's state is of epoch {kept['a']}" in error["sentence"]
    assert a.status() == 7
    for peer in (b, c, d := start("d")):
        finished = peer.wait_for("finished")
        assert (finished["epoch"], finished["digest"]) == (STOP, digest)
        assert peer.status() == 0
    for peer in (a, b, c, d):
        assert not peer.lines("epoch")
    assert not a.lines("in")
    assert newest(disks["a"]) == kept["a"]
