"""A change of lineage, by itself: what is to be taken of the other one, and whether the whole is greater then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.events import Restore
from p2p_diloco.core.switching import Switching, came_late
from p2p_diloco.core.version import Version
from tests.core.conftest import TWO, Peer

FOUR = tuple((shard,) for shard in range(4))
FORK = Version(0, 90, 3, "x3")


def switching(p: Any, *told: Version) -> Switching:
    """The change to what the peer a has told."""
    replica = p.replica
    return Switching(replica.rules, replica.logs, replica.roster, "a", told, p.now)


def changing(peer: Any, mode: str) -> Switching:
    """That of a peer at epoch 3, whose shards are forked, behind, ahead of what was told, and equal to it."""
    b = peer("b", epoch=3, fragments=FOUR, mode=mode)
    return switching(b, FORK, b.version(5), b.version(2), b.version(3))


@pytest.mark.parametrize(("mode", "differing"), [("sync", {0, 1, 2}), ("async", {0, 1})])
def test_an_asynchronous_replica_keeps_the_shards_that_are_ahead_on_the_same_lineage(
    peer: Any, mode: str, differing: set[int]
) -> None:
    """What it has submitted may be counted there. A synchronous one takes the state as it was told: its shards share
    epochs."""
    assert changing(peer, mode).differing() == differing


def test_an_asynchronous_replica_takes_no_state_of_a_shard_that_it_keeps(peer: Any) -> None:
    """Its donor may have gone on there. Of the other shards it takes what has grown from what was told."""
    change = changing(peer, "async")
    ahead, forked = peer.state(2, 4), peer.state(0, 3, version=FORK, history=((2, "x2"), (3, "x3")))
    assert [change.takes("a", state) for state in (ahead, forked)] == [False, True]
    assert changing(peer, "sync").takes("a", ahead)


def test_a_state_of_an_earlier_epoch_than_told_came_late() -> None:
    """Though it counts as many samples: a commit of no contributions lay between. More samples, or another generation,
    show another lineage."""
    earlier = Version(0, 90, 2, "x2")
    versions = [earlier, replace(earlier, samples=91), replace(earlier, generation=1), FORK]
    states = [Peer.state(0, version.epoch, version=version) for version in versions]
    assert [came_late(state, FORK) for state in states] == [True, False, False, False]


def test_the_staged_states_are_compared_together_with_the_shards_that_stay(peer: Any) -> None:
    """The whole models decide. An equal one is not greater."""
    b = peer("b", epoch=None, live="", fragments=TWO)
    b.feed(Restore((b.state(0, 3), b.state(1, 3))))
    change = switching(b, FORK, b.version(3))
    change.staged = {0: b.state(0, 3, version=b.version(3, samples=31))}
    assert change.is_greater()
    change.staged = {0: b.state(0, 3, version=b.version(3, samples=29))}
    assert not change.is_greater()
    change.staged = {0: b.state(0, 3)}
    assert not change.is_greater()
