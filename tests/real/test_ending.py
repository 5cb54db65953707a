"""A run that has ended stays so, whoever of its peers is started again, and from which of its checkpoints."""

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


def test_an_end_stays(swarm: Swarm, tmp_path: Path) -> None:
    """Four peers end; of three the last checkpoint is lost. These start again in a swarm that knows nothing, and wait
    for the last state: one not for long, which ends with code 7 and the reason. Then the fourth comes: it and those
    that waited end normally, with the digest that the run had ended with. Nobody trains on in between."""
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
    swarm.members[0].die()  # and with it what the DHT holds
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
