"""What brings other peers to the present version: the last commit while a peer may lack it, and what is sent again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from p2p_diloco.core.events import Applied, Delivered, Send, SendFailed
from p2p_diloco.core.messages import Commit, Plan
from tests.core.conftest import commits

# -- the last commit


def test_a_commit_is_kept_while_a_peer_may_lack_it(peer: Any) -> None:
    """Until all live peers have taken it or show that they have it; a newcomer takes the whole state."""
    a = peer("a", group="a", live="bcd")
    log, base = a.replica.logs[0], a.held
    for name in "bcd":
        a.meet(name, idle=True)
    a.averaged(a.contribute(), "new")
    commit = log.outgoing.last
    assert commit is not None
    a.feed(Delivered("b", commit))
    a.feed(Delivered("c", replace(commit, version=base)))  # of an earlier one
    a.hear("c", a.contribution(a.held, 2))
    assert log.outgoing.last is commit
    a.meet("d", epochs=(a.held.epoch - 1,))
    assert log.outgoing.last is commit
    a.meet("d", epochs=(a.held.epoch,))
    assert log.outgoing.last is None
    assert a.hear("b", a.contribution(base)) == [Send("b", a.replica.state(0))]


def test_a_commit_that_no_third_peer_can_lack_is_not_kept(peer: Any) -> None:
    """Of two peers, the one that takes the other's commit is the last to have it. With a third one it may have to
    tell."""
    for live, kept in (("a", False), ("ac", True)):
        b = peer("b", group="ab", live=live)
        commit = Commit(0, b.held, b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")), "mean")
        b.hear("a", commit)
        b.feed(Applied(0, commit.base, commit.version.digest))
        assert b.held == commit.version
        assert (b.replica.logs[0].outgoing.last is not None) is kept


# -- what is sent again


def test_a_commit_or_state_that_did_not_arrive_is_sent_again(peer: Any) -> None:
    """With the next ticks, a bounded number of times."""
    a = peer("a", resends=2)
    for name in "bc":
        a.hear(name, a.contribution(a.held))
    effects = a.averaged(a.contribute())
    (commit,) = [e.message for e in effects if isinstance(e, Send) and e.to == "b"]
    for _ in range(2):
        assert a.feed(SendFailed("b", commit, gone=False)) == []
        assert [e for e in a.pass_time(1.0) if isinstance(e, Send)] == [Send("b", commit)]
        assert not any(isinstance(e, Send) for e in a.pass_time(1.0))
    a.feed(SendFailed("b", commit, gone=False))
    assert not any(isinstance(e, Send) for e in a.pass_time(3.0))
    a.feed(SendFailed("c", a.replica.state(0), gone=False))
    assert [e for e in a.pass_time(1.0) if isinstance(e, Send)] == [Send("c", a.replica.state(0))]


def test_an_outdated_commit_is_not_sent_again_nor_is_one_to_a_dead_peer(peer: Any) -> None:
    a = peer("a")
    old = commits(a, 0, 1)[0]
    a.feed(SendFailed("b", replace(old, version=a.version(0)), gone=False))
    assert not any(isinstance(e, Send) for e in a.pass_time(1.0))
    a.feed(SendFailed("b", old, gone=False))
    a.lose("b")
    assert not any(isinstance(e, Send) and e.message is old for e in a.pass_time(2.0))
