"""Peers that come and go during a run: joiners, a bootstrap that dies, a lower limit of peers, orderly leaving."""

from __future__ import annotations

import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from swarm import START_S, Member, Swarm, agree, stall_s, until

from p2p_diloco.node.setup import SAVE_S_MAX

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

INTERVAL_S, TIMEOUT_S = 0.5, 30.0
BOUND_S = 0.4 * TIMEOUT_S
"""The longest delay by a newcomer, a death or a leave: less than the heartbeat timeout, by more than a machine stands
still."""
CONFIG = {
    "sync_every": 4,
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "codec": "fp32",
    "step_limit": 0.0,
    "aggregation": "mean",  # a newcomer's 4 beside two 1s is meant
    "heartbeat_interval": INTERVAL_S,
    "heartbeat_timeout": TIMEOUT_S,
}
JOINED_STEP_S = 0.2
"""Rounds that a newcomer joins are longer than a heartbeat interval, so that within one round all peers know of it."""
LEAVE_S = 25.0
"""After one ^C the peer must be gone within this time, which is less than a node with a checkpoint to write may
take."""


def started(
    swarm: Swarm, names: str, step_s: float = 0.02, disks: Path | None = None, fresh: str = "", **config: Any
) -> list[Member]:
    """Peers named by letters, each with a pseudo-gradient of 1, in rounds of all of them."""
    settings = {**CONFIG, "start_peers": len(names), **config}
    kept = {name: {"checkpoint_dir": str(disks / name), "save_every": 10_000} if disks else {} for name in names}
    options = {"config": settings, "step_s": step_s}
    members = [swarm.start(name, fresh=name in fresh, local=kept[name], **options) for name in names]
    for member in members:
        until(lambda member=member: len(member.lines("epoch", synced=True)) > 3, START_S, f"rounds of {member.name}")
    return members


def joined(swarm: Swarm, others: list[Member], name: str, **options: Any) -> Member:
    """A newcomer with a pseudo-gradient of 4 that only knows addresses; it must be counted."""
    at = time.time()
    before = [other.reached() for other in others]
    newcomer = swarm.start(name, step_s=JOINED_STEP_S, delta=4.0, theta=99.0, **options)
    entered = newcomer.wait_for("in")
    assert entered["epoch"] >= max(before)
    assert entered["step"] == CONFIG["sync_every"] * entered["epoch"]
    assert entered["sync_every"] == CONFIG["sync_every"]
    mean = (len(others) * 1.0 + 4.0) / (len(others) + 1)
    for other in others:
        line = other.epoch(entered["epoch"])
        if line["epoch"] == entered["epoch"]:
            assert line["value"] == entered["value"]
            if line["whole"] and entered["whole"]:  # otherwise a node had a later epoch already
                assert line["digest"] == entered["digest"]
    for member in (newcomer, *others):
        until(lambda member=member: steps(member, mean) >= 3, 60.0, f"{member.name} counts {name}")
    first = min(line["epoch"] for line in newcomer.lines("epoch", synced=True))
    assert first <= entered["epoch"] + 3  # the next commit may be drafted already; the one after it names the newcomer
    for other in others:
        assert stall_s(other, at) <= BOUND_S
        assert other.last("epoch")["peers"] == len(others) + 1
    agree([newcomer, *others], entered["epoch"] + 1)
    return newcomer


def steps(member: Member, size: float) -> int:
    """How often θ fell by this amount from one epoch to the next."""
    lines = member.lines("epoch", synced=True)
    return sum(
        later["epoch"] == earlier["epoch"] + 1 and earlier["value"] - later["value"] == pytest.approx(size, rel=1e-3)
        for earlier, later in pairwise(lines)
    )


def test_joiners_and_the_death_of_the_bootstrap(swarm: Swarm) -> None:
    """A joiner adopts the state, goes on at the run's step and is counted soon, while the others' epochs go on. Without
    the bootstrap the run is the same, and newcomers join by any peer's address. A peer that names another bootstrap,
    which doesn't answer, is not led into this run of the same name."""
    bootstrap = swarm.bootstrap()
    a, b = started(swarm, "ab", JOINED_STEP_S)
    c = joined(swarm, [a, b], "c")
    died_at = bootstrap.die()
    later = {peer: peer.reached() + 10 for peer in (a, b, c)}
    for peer, epoch in later.items():
        peer.epoch(epoch)
        assert stall_s(peer, died_at) <= BOUND_S
    assert not any(text in peer.log() for peer in (a, b, c) for text in ("INFO p2p_diloco.node.events: died", "fork:"))
    c.die()
    until(lambda: a.last("epoch")["peers"] == b.last("epoch")["peers"] == 2, 60.0, "the death of c is noticed")
    dead, swarm.addresses = swarm.addresses, b.wait_for("in")["addresses"]
    joined(swarm, [a, b], "d")
    swarm.addresses = dead
    e = swarm.start("e", step_s=0.02)  # it has only the addresses that this machine remembers
    e.wait_for("in")
    assert "trying" in e.log()
    swarm.addresses = ["/ip4/127.0.0.1/tcp/9/p2p/12D3KooWJWoaqZhDaoEFshF7Rh1bpY9ohihFhzcW6d69Lr2NASuq"]
    f = swarm.start("f")
    assert swarm.addresses[0] in f.wait_for("error", kind="NoBootstrapReached")["sentence"]
    assert f.status() == 4


def test_too_few_peers_wait_and_say_so(swarm: Swarm) -> None:
    """With min_peers=2 the survivor of two makes no outer step alone, logs what it waits for, and goes on with a
    newcomer."""
    a, b = started(swarm, "ab", min_peers=2) if swarm.bootstrap() else ()
    b.die()
    a.wait_for_log("1 of 2 (min_peers) have contributed; start more, or p2p-diloco set --min-peers 1")
    c = swarm.start("c", step_s=0.02)
    entered = c.wait_for("in")
    stuck_at = max(line["epoch"] for line in a.lines("epoch") if line["time"] < entered["time"])
    assert entered["epoch"] == stuck_at
    reached = a.epoch(stuck_at + 5)
    assert min(line["epoch"] for line in a.lines("epoch") if line["time"] > entered["time"]) == stuck_at + 1
    c.epoch(reached["epoch"])
    agree([a, c], stuck_at + 1)


def test_the_end_is_one_for_all(swarm: Swarm) -> None:
    """`stop_after_epochs` ends a run of early and late peers with one state, status 0 and nothing left behind."""
    swarm.bootstrap()
    last = 150
    settings = {**CONFIG, "start_peers": 2, "stop_after_epochs": last}
    a, b = (swarm.start(name, config=settings, step_s=0.2) for name in "ab")
    b.epoch(1)
    c = swarm.start("c", step_s=0.2)
    assert 0 < c.wait_for("in")["epoch"] < last
    # in the group: in shorter rounds one contribution may carry the progress of several
    c.wait_for("epoch", 60.0, synced=True)
    for member in (a, b, c):
        member.tell("hurry")
    ends = [member.wait_for("finished") for member in (a, b, c)]
    assert {end["epoch"] for end in ends} == {last}
    assert len({end["digest"] for end in ends}) == 1
    assert a.lines("epoch")[-1]["value"] == pytest.approx(-last, abs=0.7)  # c may be counted for two rounds at once
    assert [member.status() for member in (a, b, c)] == [0, 0, 0]
    swarm.gone()


def test_leaving_by_interrupt(swarm: Swarm, tmp_path: Path) -> None:
    """One ^C leaves the run fast, and no peer waits for the one that left; a second one ends a slow leaving at once.
    SIGTERM leaves as ^C does."""
    swarm.bootstrap()
    a, b, c = started(swarm, "abc", disks=tmp_path, fresh="c")
    left_at = a.signal(signal.SIGINT)
    assert a.status(LEAVE_S) == 130
    swarm.gone()
    for peer in (b, c):
        peer.epoch(peer.reached() + 5)
        peer.wait_for_log("left the run")
        assert stall_s(peer, left_at) <= BOUND_S
    node = next(p for p in c.family() if "p2p_diloco.node" in p.cmdline())
    node.suspend()
    first_at = c.signal(signal.SIGINT)
    c.wait_for("leaving")
    time.sleep(0.5)  # now it waits for its node, which will never answer
    assert c.process.poll() is None
    c.signal(signal.SIGINT)
    c.status(LEAVE_S)
    assert time.time() - first_at < SAVE_S_MAX  # part of what the node has for leaving
    assert not psutil.pid_exists(node.pid)
    b.epoch(b.reached() + 5)
    b.signal(signal.SIGTERM)  # as a service manager, a container or a batch system ends a peer
    b.wait_for("leaving")
    assert b.status(LEAVE_S) == 128 + signal.SIGTERM
    swarm.gone()
