"""Real peers on the log of fragments: equal to the bit, with one that is killed and one that comes late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from swarm import Member, Swarm, agree, until

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

CONFIG = {
    "sync_every": 4,
    "outer_lr": 0.5,
    "codec": "bf16",
    "shard_elements": 500,
    "start_peers": 2,
    "heartbeat_interval": 0.25,
    "heartbeat_timeout": 3.0,
}
TRAINING = {"params": {name: [700] for name in "stuvw"}, "step_s": 0.02, "hashes": True}
ROUNDS = 5


def same_theta(members: Sequence[Member]) -> None:
    """All have the same global parameters at every epoch that they took part in, some of which they have in common."""
    agree(members)
    found: dict[int, set[str]] = {}
    for member in members:
        for line in member.lines("epoch", whole=True):
            found.setdefault(line["epoch"], set()).add(line["theta"])
    assert {epoch: hashes for epoch, hashes in found.items() if len(hashes) > 1} == {}


def rounds(members: Sequence[Member], count: int = ROUNDS) -> None:
    """Wait until all have merged so many more commits of the whole model together."""
    newest = max(member.reached() for member in members)
    for member in members:
        member.epoch(newest + count, 60.0)


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (4, 0), (1, 2), (4, 1)])
def test_peers_on_fragments_stay_equal_to_the_bit(swarm: Swarm, fragments: int, overlap: int) -> None:
    """Two, then three, of which one is killed, then a newcomer in its place. What is trained is counted."""
    swarm.bootstrap()
    config = {**CONFIG, "num_fragments": fragments, "overlap_steps": overlap}
    peers = [swarm.start(f"p{n}", delta=1.0 + n, config=config, **TRAINING) for n in range(2)]
    for peer in peers:
        peer.wait_for("in")
    rounds(peers)
    same_theta(peers)
    peers.append(swarm.start("p2", delta=3.0, config=config, **TRAINING))
    peers[2].wait_for("in")
    rounds(peers)
    until(lambda: peers[2].last("epoch")["synced"], 30.0, "the newcomer is counted")
    same_theta(peers)
    peers[1].die()
    left = [peers[0], peers[2]]
    rounds(left)
    same_theta(left)
    left.append(swarm.start("p3", delta=2.0, config=config, **TRAINING))
    left[2].wait_for("in")
    rounds(left)
    same_theta(left)
    assert not any("is dropped" in member.log() for member in left)


def test_a_run_goes_on_from_the_disks_of_its_peers(swarm: Swarm, tmp_path: Path) -> None:
    """All processes are killed at once. Started again, all stand at the greatest version that any of them has saved,
    and go on from there."""
    swarm.bootstrap()
    config = {**CONFIG, "num_fragments": 2}

    def started(life: str) -> list[Member]:
        disks = [
            {"checkpoint_dir": str(tmp_path / f"disk{n}"), "save_every": 1, "restart_wait": 60.0} for n in range(2)
        ]
        pairs = enumerate(disks)
        return [swarm.start(f"{life}{n}", delta=1.0 + n, config=config, local=disk, **TRAINING) for n, disk in pairs]

    peers = started("a")
    for peer in peers:
        peer.wait_for("in")
    rounds(peers)
    until(lambda: all(list((tmp_path / f"disk{n}").glob("checkpoint-*")) for n in range(2)), 30.0, "checkpoints")
    for peer in peers:
        peer.die()
    saved = {n: max(int(p.name.split("-")[1]) for p in (tmp_path / f"disk{n}").glob("checkpoint-?*")) for n in range(2)}
    again = started("b")
    begins = [peer.wait_for("in")["epoch"] for peer in again]
    assert begins == [max(saved.values())] * 2
    rounds(again)
    same_theta(again)
