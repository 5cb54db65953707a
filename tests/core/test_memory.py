"""Other peers' payloads, over all shards: which commits are dropped, and which contributions should wait."""

from __future__ import annotations

from typing import Any

from p2p_diloco.core.events import Closed, Send
from p2p_diloco.core.messages import Commit


def take(b: Any, shard: int, maker: str = "a") -> Commit:
    """``b`` applies another peer's next commit of a shard, under the lowest term that is the maker's turn."""
    commit = b.commit(shard, by=maker, term=b.replica.logs[shard].lead.candidates().index(maker))
    b.take(commit)
    assert b.replica.versions[shard] == commit.version
    return commit


def kept(b: Any) -> list[int]:
    """The shards whose last commit is kept with its payload."""
    return [log.shard for log in b.replica.logs if log.outgoing.last is not None]


# -- commits


def test_the_newest_commits_of_others_are_kept(peer: Any) -> None:
    """As many as half of the shards, less the contributions that wait. A peer that lacks a dropped commit gets the
    state."""
    b = peer("b", group="abc", fragments=(tuple(range(8)),))
    assert b.rules.payloads_kept == 4
    base = b.held
    commits = [take(b, shard) for shard in range(5)]
    assert kept(b) == [1, 2, 3, 4]
    assert b.hear("c", b.contribution(base)) == [Send("c", b.replica.state(0))]
    assert b.hear("c", b.contribution(base, shard=1)) == [Send("c", commits[1])]
    b.hear("a", b.contribution(base, shard=6))
    assert kept(b) == [2, 3, 4]
    b.hear("c", b.contribution(base, shard=6))
    b.hear("c", b.contribution(b.version(2), shard=0))
    assert b.replica.collected == 3
    assert kept(b) == [4]
    b.contribute(6)
    assert b.replica.collected == 3  # this peer's own is in the trainer's memory
    take(b, 6)
    assert (b.replica.collected, kept(b)) == (1, [4, 6])


def test_the_commit_that_came_first_is_dropped_first(peer: Any) -> None:
    """Shard 0 has moved twice, so its last commit is newer than that of shard 1."""
    b = peer("b", group="abc", fragments=(tuple(range(6)),))
    for shard in (0, 1, 2, 0):
        take(b, shard)
    take(b, 3)
    assert kept(b) == [0, 2, 3]


def test_a_peers_own_commits_are_not_dropped(peer: Any) -> None:
    """It has to send them; other peers' commits are dropped instead."""
    a = peer("a", group="abc", fragments=((0, 1, 2, 3),))
    for name in "bc":
        a.hear(name, a.contribution(a.held))
    a.averaged(a.contribute())
    take(a, 1, "c")
    assert kept(a) == [0, 1]
    a.hear("b", a.contribution(a.version(3), shard=1))
    a.hear("c", a.contribution(a.version(3), shard=1))
    assert kept(a) == [0]


def test_the_commits_of_a_peer_that_may_be_gone_are_not_dropped(peer: Any) -> None:
    """A peer that lacks one can only get it from the peers that received it."""
    b = peer("b", group="abc", fragments=((0, 1, 2, 3),))
    take(b, 0)
    take(b, 1, "c")
    b.feed(Closed("a"))
    take(b, 2, "c")
    take(b, 3, "c")
    assert kept(b) == [0, 2, 3]
    b.meet("a")


def test_an_asynchronous_peer_drops_no_commits(peer: Any) -> None:
    """There they are answers, and limited otherwise."""
    b = peer("b", group="abc", fragments=((0, 1, 2),), mode="async", succession="ac")
    assert b.rules.payloads_kept == 1
    for shard in range(3):
        take(b, shard)
    assert kept(b) == [0, 1, 2]


# -- contributions


def test_contributions_beyond_the_room_come_later_except_to_the_first_open_shard(peer: Any) -> None:
    """Peers send in shard order, so the round of the first shard closes next and makes room. If no round waits, and in
    asynchronous mode, none should wait."""
    b = peer("b", group="abcd", fragments=((0, 1, 2, 3),))
    assert not any(b.replica.crowded(shard) for shard in range(4))
    b.hear("a", b.contribution(b.held, shard=1))
    b.hear("a", b.contribution(b.held, shard=2))
    assert [b.replica.crowded(shard) for shard in range(4)] == [False, False, True, True]
    b.hear("c", b.contribution(b.held, shard=1))
    take(b, 1)
    assert (b.replica.collected, b.replica.crowded(3)) == (1, False)
    ahead = peer("b", group="abcd", fragments=((0, 1, 2, 3),))
    for name in "acd":
        ahead.hear(name, ahead.contribution(ahead.version(2), shard=3))
    assert ahead.replica.collected == 3
    assert not ahead.replica.crowded(3)
    submits = peer("b", group="abcd", fragments=((0, 1),), mode="async")
    for name in "acd":
        submits.hear(name, submits.contribution(submits.held))
    assert not submits.replica.crowded(1)
