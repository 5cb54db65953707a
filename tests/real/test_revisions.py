"""A run of real processes, changed, saved and stopped by its founder while it goes on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from swarm import Member, Swarm, agree, until

from p2p_diloco.tensors.checkpoint import epoch_of, whole

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


def asking(swarm: Swarm, *flags: str, what: str = "set") -> Member:
    """`p2p-diloco set`, or `what` else, signed with the founder's identity, while the founder itself runs."""
    command = ["-m", "p2p_diloco", what, "--initial-peers", *swarm.addresses, "--run-id", "test", "--json"]
    return swarm.launch(what, [*command, "--identity-path", str(swarm.folder / "identity"), *flags])


def answer(asked: Member) -> dict[str, Any]:
    """The outcome that a command prints, once it has ended."""
    assert asked.status(120.0) == 0, asked.log()
    (outcome,) = asked.said
    return outcome


def round_of(member: Member, steps: int) -> bool:
    """Whether a peer's last round had so many inner steps, by its own count and by the run's."""
    return any(
        (b["epoch"] - a["epoch"], b["local"] - a["local"], b["step"] - a["step"]) == (1, steps, steps)
        for a, b in pairwise(member.lines("epoch", synced=True)[-3:])
    )


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
    outcome = answer(asked)
    assert (outcome["revision"], outcome["outer_lr"], outcome["outer_momentum"]) == (1, 0.5, 0.0)
    assert set(outcome["adopted_by"]) <= {"founder", "other"}
    assert outcome["adopted_by"]
    until(lambda: step(other, 0.5) and step(founder, 0.5), 30.0, "steps of half the size")

    killed = asking(swarm, "--outer-lr", "0.25")
    until(lambda: any("revision 2" in m.log() for m in (founder, other)), 60.0, "a peer that knows revision 2")
    killed.die()
    for member in (founder, other):
        member.wait_for_log("all fragments now use revision 2 (outer_lr=0.25)")
        until(lambda member=member: step(member, 0.25), 30.0, "steps of a quarter of the size")
    agree([founder, other])


def test_the_founder_changes_h_has_the_run_saved_and_stops_it(swarm: Swarm, tmp_path: Path) -> None:
    """H is another one for both peers, at the same epoch. A checkpoint is there when the founder asks for one. The stop
    ends both peers with exit 0, the same digest, and a checkpoint of the last epoch."""
    swarm.bootstrap()
    identity = {"identity_path": str(swarm.folder / "identity")}
    disks = {name: {"checkpoint_dir": str(tmp_path / name), "save_every": 10_000} for name in ("founder", "other")}
    founder = swarm.start("founder", config=CONFIG, step_s=0.05, local={**identity, **disks["founder"]})
    founder.wait_for("in")
    other = swarm.start("other", step_s=0.05, local=disks["other"])
    members = [founder, other]
    until(lambda: all(round_of(m, 4) for m in members), 120.0, "rounds of 4 steps")

    assert answer(asking(swarm, "--sync-every", "10"))["sync_every"] == 10
    until(lambda: all(round_of(m, 10) for m in members), 60.0, "rounds of 10 steps")
    agree(members)

    saved = answer(asking(swarm, what="save"))
    assert set(saved["saved_by"]) == {"founder", "other"}
    for name in disks:
        until(lambda name=name: saved_in(tmp_path / name) != [], 30.0, f"a checkpoint of {name}")

    ends = answer(asking(swarm, "--save", what="stop"))["stop_after_epochs"]
    assert [m.status(120.0) for m in members] == [0, 0], [m.log() for m in members]
    (one, two) = [m.last("finished") for m in members]
    assert (one["epoch"], one["digest"]) == (two["epoch"], two["digest"])
    assert one["epoch"] == ends
    assert [saved_in(tmp_path / name)[-1] for name in disks] == [ends, ends]


def saved_in(folder: Path) -> list[int]:
    """The epochs of the complete checkpoints in a folder."""
    return sorted(epoch_of(path) for path in whole(folder))
