"""The life of a run of real processes: peers that don't fit, come, die and leave; all are killed, and go on from disk;
the end stays the end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from swarm import Member, Swarm, agree, until

from p2p_diloco.history.reading import check, naming, read

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

CONFIG = {
    "sync_every": 4, "outer_lr": 0.5, "codec": "bf16", "slice_elements": 500, "num_fragments": 4, "overlap_steps": 1,
    "start_peers": 2, "heartbeat_interval": 0.5, "heartbeat_timeout": 20.0,
}  # fmt: skip
TRAINING: dict[str, Any] = {"params": {name: [700] for name in "stuvw"}, "step_s": 0.08, "hashes": True}
ROUNDS = 4
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWJWoaqZhDaoEFshF7Rh1bpY9ohihFhzcW6d69Lr2NASuq"


def go_on(members: Sequence[Member]) -> None:
    """All merge some more commits of the whole model together, and hold the same parameters, bit by bit, at every epoch
    that two of them took part in."""
    newest = max(member.reached() for member in members)
    for member in members:
        member.epoch(newest + ROUNDS, 90.0)
    agree(members)
    found: dict[int, set[str]] = {}
    for member in members:
        for line in member.lines("epoch", whole=True):
            found.setdefault(line["epoch"], set()).add(line["theta"])
    assert {epoch: hashes for epoch, hashes in found.items() if len(hashes) > 1} == {}


def refused(member: Member, kind: str, status: int, *texts: str) -> None:
    """A peer ends with this error and exit status, and its sentence contains these texts."""
    error = member.wait_for("error")
    assert error["kind"] == kind
    assert all(text in error["sentence"] for text in texts), error["sentence"]
    assert member.status() == status


def test_peers_come_die_and_leave(swarm: Swarm, tmp_path: Path) -> None:
    """What is trained is counted, and all stay equal to the bit, through all of it. Their histories tell it."""
    bootstrap = swarm.bootstrap()
    training = {**TRAINING, "local": {"history_path": str(tmp_path)}}
    a, b = [swarm.start(name, delta=1.0 + n, config=CONFIG, **training) for n, name in enumerate("ab")]
    a.wait_for("in")

    # other settings and other shapes are named with both values
    unlike = swarm.start("s", config={"sync_every": 8, "outer_momentum": 0.5})
    shapes = swarm.start("p", params={**TRAINING["params"], "u": [2, 3], "more": [4]})
    refused(unlike, "ConfigMismatch", 5, "sync_every (the run's 4 / yours 8)")
    assert "outer_momentum" not in unlike.last("error")["sentence"]  # it may change while a run goes on
    refused(shapes, "ModelMismatch", 6, "u: 700 in the run, 2x3 here", "more: not in the run, 4 here")
    go_on([a, b])

    # a newcomer is counted
    c = swarm.start("c", delta=3.0, **training)
    c.wait_for("epoch", synced=True)
    go_on([a, b, c])

    # one dies, and so does the bootstrap: a newcomer joins by a peer's address, and another by those that it remembers
    b.die()
    bootstrap.die()
    dead, swarm.addresses = swarm.addresses, a.wait_for("in")["addresses"]
    d = swarm.start("d", delta=2.0, **training)
    d.wait_for("epoch", synced=True)
    go_on([a, c, d])
    swarm.addresses = dead
    e = swarm.start("e", **training)
    e.wait_for("in")
    assert "trying" in e.log()
    swarm.addresses = [NOBODY]  # not led into this run of the same name
    refused(swarm.start("f"), "NoBootstrapReached", 4, NOBODY)

    # ^C leaves, and no peer waits for the one that left; so does SIGTERM, which service managers send
    for member, number in ((e, signal.SIGINT), (d, signal.SIGTERM)):
        member.signal(number)
        assert member.status() == 128 + number
        a.wait_for_log("left the run")
    go_on([a, c])
    assert not any("is dropped" in member.log() for member in (a, c))

    # a node hangs: the first ^C waits for it, the second one ends the peer at once, its node with it
    node = next(p for p in c.family() if p.name().startswith("p2pd")).parent()
    node.suspend()
    c.signal(signal.SIGINT)
    c.wait_for("leaving")
    assert c.process.poll() is None
    c.signal(signal.SIGINT)
    assert c.status(20.0) != 0
    until(lambda: not psutil.pid_exists(node.pid), 20.0, "the end of the node")

    # the histories tell it in order, and each of them, also the killed peers', plays again with the same effects
    told = subprocess.run(
        [sys.executable, "-m", "p2p_diloco", "replay", str(tmp_path / "test")],
        capture_output=True, text=True, timeout=100, check=True, env={**os.environ, "COLUMNS": "100"},
    ).stdout  # fmt: skip
    order = [
        r"\b(a|b) founds the run",
        r"c joins at epoch \d+",
        r"b dies: its history ends without a goodbye; \w notices [\d.]+ s later, \w notices",
        r"d joins at epoch \d+",
    ]
    assert re.search(".*".join(order), " ".join(told.split())), told
    lives = read([tmp_path])
    assert {*"abcde"} <= set(map(naming(lives), (life.peer for life in lives)))
    for life in lives:
        assert (*check(life), life.gap) == (len(life.entries), "", "")


def nesterov(epoch: int) -> float:
    """θ after so many rounds with η = 1, μ = 0.9 and a pseudo-gradient of 1, from 0."""
    theta = m = 0.0
    for _ in range(epoch):
        m = 0.9 * m + 1.0
        theta -= 1.0 + 0.9 * m
    return theta


def newest(folder: Path) -> int:
    return max((int(path.parent.name.split("-")[1]) for path in folder.glob("checkpoint-*/manifest*")), default=0)


STOP = 14


def test_a_killed_run_goes_on_from_disk_and_stays_ended(swarm: Swarm, tmp_path: Path) -> None:
    """Its numbers are those of an undisturbed run, momentum included. Once it has ended nobody trains it any more: who
    lacks the last state waits for it, or says so; who gets it has the digest with which the run ended."""
    config = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.9, "codec": "fp32", "slice_elements": 2}
    config |= {"start_peers": 2, "stop_after_epochs": STOP, "heartbeat_timeout": 5.0}

    def start(name: str, wait_s: float = 200.0, disk: str = "", **options: Any) -> Member:
        local = {"checkpoint_dir": str(tmp_path / (disk or name)), "save_every": 2, "keep": 3}
        waits = {"wait_timeout": wait_s, "restart_wait": 2.0}
        return swarm.start(name, step_s=0.25, config=config, local={**local, **waits}, **options)

    def all_die() -> None:
        for member in swarm.members:
            if member.process.poll() is None:
                member.die()
        swarm.addresses = []
        swarm.bootstrap()

    swarm.bootstrap()
    peers = [start(name) for name in "ab"]
    for name in "ab":
        until(lambda name=name: newest(tmp_path / name) > 0, 120.0, f"a checkpoint of {name}")
    all_die()
    saved = newest(tmp_path / "a")
    a = start("a", theta=99.0)  # its parameters come from the checkpoint
    entered = a.wait_for("in")
    assert (entered["epoch"], entered["step"]) == (saved, 2 * saved)
    b = start("b", disk="b2", theta=-99.0)  # it has lost its disk
    (digest,) = {peer.wait_for("finished", epoch=STOP)["digest"] for peer in (a, b)}
    assert [peer.status() for peer in (a, b)] == [0, 0]
    came = b.last("in")["epoch"]
    agree([a, b], came + 1)
    for line in [line for peer in (*peers, a, b) for what in ("in", "epoch") for line in peer.lines(what)]:
        if line["epoch"] <= came:  # a newcomer's first contribution may be carried in its next one
            assert line["value"] == pytest.approx(nesterov(line["epoch"]))

    all_die()
    shutil.rmtree(tmp_path / "a" / f"checkpoint-{STOP}")
    assert (last := start("b", disk="b2")).wait_for("finished")["digest"] == digest
    assert last.status() == 0  # it has left, and the DHT has its record of the end
    error = (hasty := start("a", 2.0)).wait_for("error")
    assert error["kind"] == "GaveUpWaiting"
    assert f"has ended at epoch {STOP} (digest {digest}" in error["sentence"]
    assert hasty.status() == 7
    for peer in (start("a"), start("b", disk="b2")):
        assert peer.wait_for("finished")["digest"] == digest
        assert peer.status() == 0
        assert not peer.lines("epoch")
