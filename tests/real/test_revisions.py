"""The outer rates of a run of real processes, changed by its founder while it goes on."""

from __future__ import annotations

from itertools import pairwise

import pytest
from swarm import Member, Swarm, agree, until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = {
    "sync_every": 4,
    "shard_elements": 2,  # so that there are two shards
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "codec": "fp32",
    "start_peers": 2,
    "heartbeat_interval": 0.5,
    "heartbeat_timeout": 30.0,
}


def asking(swarm: Swarm, *flags: str) -> Member:
    """`p2p-diloco set`, signed with the founder's identity, while the founder itself runs."""
    command = ["-m", "p2p_diloco", "set", "--initial-peers", *swarm.addresses, "--run-id", "test", "--json"]
    return swarm.launch("set", [*command, "--identity-path", str(swarm.folder / "identity"), *flags])


def step(member: Member, size: float) -> bool:
    """Whether θ fell by this amount in the last of its epochs, with a pseudo-gradient of 1."""
    lines = member.lines("epoch", synced=True)[-2:]
    return any(a["epoch"] + 1 == b["epoch"] and a["value"] - b["value"] == size for a, b in pairwise(lines))


def test_the_founder_changes_the_rates_of_a_run(swarm: Swarm) -> None:
    """All shards of all peers adopt the requested rates, also those of a peer that joins meanwhile, and their outer
    steps follow the formula; also if the asker is killed as soon as one peer knows the revision."""
    swarm.bootstrap()
    identity = {"identity_path": str(swarm.folder / "identity")}
    founder = swarm.start("founder", config=CONFIG, step_s=0.02, local=identity)
    founder.wait_for("in")
    other, asked = swarm.start("other", step_s=0.02), asking(swarm, "--outer-lr", "0.5")
    assert asked.status(120.0) == 0, asked.log()
    (outcome,) = asked.said
    assert (outcome["revision"], outcome["outer_lr"], outcome["outer_momentum"]) == (1, 0.5, 0.0)
    assert set(outcome["adopted_by"]) <= {"founder", "other"}
    assert outcome["adopted_by"]
    until(lambda: step(other, 0.5) and step(founder, 0.5), 30.0, "steps of half the size")

    killed = asking(swarm, "--outer-lr", "0.25")
    until(lambda: any("revision 2" in m.log() for m in (founder, other)), 60.0, "a peer that knows revision 2")
    killed.die()
    for member in (founder, other):
        member.wait_for_log("all shards now use revision 2 (outer_lr=0.25, outer_momentum=0)")
        until(lambda member=member: step(member, 0.25), 30.0, "steps of a quarter of the size")
    agree([founder, other])
