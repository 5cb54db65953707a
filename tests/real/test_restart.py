"""A whole run that is killed goes on from its disks, momentum included."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm import Member, Swarm, agree, until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(500)]

CONFIG = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.9, "codec": "fp32", "shard_elements": 2}
TABLE = [-1.9, -4.61, -8.049, -12.1441]
"""Nesterov with η = 1, μ = 0.9 and a pseudo-gradient of 1 each round, from 0."""


def nesterov(epoch: int) -> float:
    """θ after so many such rounds."""
    theta = m = 0.0
    for _ in range(epoch):
        m = 0.9 * m + 1.0
        theta -= 1.0 + 0.9 * m
    return theta


def test_a_run_that_was_killed_goes_on_from_disk(swarm: Swarm, tmp_path: Path) -> None:
    """Both peers and the bootstrap are killed after a checkpoint; one restarts from its checkpoint, one without: the
    numbers go on from the checkpoint as in an undisturbed run, and both agree on the rest."""
    assert [nesterov(epoch) for epoch in range(1, 5)] == pytest.approx(TABLE)
    disks = {name: tmp_path / name for name in "ab"}
    swarm.bootstrap()

    def start(name: str, **options: object) -> Member:
        local = {"checkpoint_dir": str(disks[name]), "save_every": 2, "keep": 3}
        return swarm.start(name, step_s=0.4, local={**local, **options.pop("local", {})}, **options)

    peers = [start(name, config={**CONFIG, "start_peers": 2}) for name in disks]
    for folder in disks.values():
        until(lambda folder=folder: any(folder.glob("checkpoint-*/manifest*")), 120.0, f"a checkpoint in {folder}")
    for member in swarm.members:
        member.die()
    for peer in peers:
        assert [line["value"] for line in peer.lines("epoch")] == pytest.approx(
            [nesterov(line["epoch"]) for line in peer.lines("epoch")]
        )
    saved = max(int(path.name.split("-")[1]) for path in disks["a"].glob("checkpoint-*") if any(path.glob("manifest*")))
    assert saved % 2 == 0
    swarm.addresses = []
    swarm.bootstrap()
    restored = start("a", theta=99.0, local={"from_checkpoint": str(disks["a"]), "restart_wait": 1.0})
    disks["b"] = tmp_path / "new"
    entered = restored.wait_for("in")
    assert (entered["epoch"], entered["step"]) == (saved, 2 * saved)
    assert entered["value"] == pytest.approx(nesterov(saved))
    restored.epoch(saved + 2)
    fresh = start("b", theta=-99.0)
    joined_at = fresh.wait_for("in")["epoch"]
    for peer in (restored, fresh):
        peer.epoch(joined_at + 3)
    agree([restored, fresh], joined_at + 1)
    assert fresh.wait_for("in")["value"] == pytest.approx(nesterov(joined_at))
    for line in restored.lines("epoch"):
        if line["epoch"] <= joined_at:  # a newcomer's contribution before it is named is carried in its next one
            assert line["value"] == pytest.approx(nesterov(line["epoch"]))
    assert [line["epoch"] for line in restored.lines("epoch")][:2] == [saved + 1, saved + 2]
