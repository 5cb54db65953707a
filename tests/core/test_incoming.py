"""Contributions and commits that arrive before their version: kept, bounded, and used once the version is reached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from p2p_diloco.core.events import Accept, Applied, Apply, Changed, Filled, Send
from p2p_diloco.core.incoming import Incoming
from p2p_diloco.core.messages import Commit, Leave, Outdated, Plan, Probe, Versions
from p2p_diloco.core.version import Version, model_version
from tests.core.conftest import PLAIN, Peer, commit_on, commits, dies, filled, meta, roster_of


def applied(p: Any, effects: list[Any]) -> list[Any]:
    """Carry out the one Apply among the effects, with the digest that its commit names."""
    (work,) = [e for e in effects if isinstance(e, Apply)]
    commit = work.commit
    return p.feed(Applied(commit.shard, commit.base, commit.version.digest))  # type: ignore[no-any-return]


# -- contributions


def test_an_early_contribution_is_counted_once_its_base_is_reached(peer: Any) -> None:
    """The next aggregator may hear of a round before it has the commit that opens it."""
    b = peer("b", group="ab")
    plan = Plan(("a", "b"), ("b", "a"))
    commit = Commit(0, b.held, b.version(2), 0, "a", (), plan)
    assert b.hear("a", b.contribution(b.version(2))) == []
    (apply,) = b.hear("a", commit)
    assert apply == Apply(commit, meta(commit.version, 0, plan, {}))
    effects = b.feed(Applied(0, commit.base, "d2"))
    assert effects == [Accept(((0, "d2"),)), Send("a", Probe(b.replica.roster.mine)), Changed()]
    (average,) = b.contribute()
    assert [name for name, _ in average.contributions] == ["a", "b"]


def test_an_early_contribution_on_another_commit_is_not_counted(peer: Any) -> None:
    """Two commits led to the same epoch, and this peer applied the other one."""
    b = peer("b", group="ab")
    commit = b.commit(plan=b.plan("ab", "b"))
    b.hear("a", b.contribution(Version(0, 20, 2, "other")))
    b.take(commit)
    assert b.contribute() == []


def test_a_contribution_on_a_lineage_that_wins_is_counted(peer: Any) -> None:
    """A forked sender is told so, and its contribution is kept until the lineages are compared."""
    b = peer("b", epoch=3, group="ab", succession="ba")
    theirs = Version(0, 99, 3, "other")
    b.hear("a", b.contribution(theirs))
    state = b.state(0, 3, version=theirs, plan=b.plan("ab", "ba"), history=((2, "d2"), (3, "other")))
    b.hear("a", Versions((theirs,), forked=True))
    b.hear("a", state)
    b.feed(Filled(0, theirs, "other"))
    assert b.averages(b.contribute()) == [["a", "b"]]


def test_an_early_contribution_on_an_adopted_state_opens_its_round(peer: Any) -> None:
    """The round's deadline counts from the adoption."""
    b = peer("b", group="ab", succession="ba")
    b.hear("a", b.contribution(b.version(4)))
    b.hear("a", b.state(0, 4, plan=b.plan("abc", "ba")))
    b.meet("c")
    b.now += 3.0
    filled(b, b.state(0, 4))
    assert b.replica.logs[0].waits.deadline == b.now + b.rules.round_timeout


def test_each_early_contributor_is_told_the_aggregator(peer: Any) -> None:
    """When the base is reached and another peer aggregates."""
    b = peer("b", group="abcd")
    for name in "cd":
        b.hear(name, b.contribution(b.version(2)))
    effects = b.take(b.commit(plan=b.plan("abcd")))
    assert [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Outdated)] == ["c", "d"]


def test_an_early_contribution_is_dropped_when_its_base_is_passed(peer: Any) -> None:
    """Contributions on another lineage and on later versions may still count, and stay."""
    b = peer("b", group="ab", live="acd")
    other, future = Version(0, 30, 3, "other"), b.version(5)
    for name, base in (("a", b.version(2, "passed")), ("c", other), ("d", future)):
        b.hear(name, b.contribution(base))
    assert set(b.replica.logs[0].incoming.early) == {"a", "c", "d"}
    b.hear("a", b.state(0, 3))
    b.feed(Filled(0, b.version(3), "d3"))
    assert set(b.replica.logs[0].incoming.early) == {"c", "d"}


def test_a_strangers_early_contribution_is_kept_unless_it_is_found_dead(peer: Any) -> None:
    """Its sender was told of its delivery, and need not send it again after the peers have met."""
    b = peer("b", group="ab", succession="ba", live="a")
    early = b.replica.logs[0].incoming.early
    for name in "xyz":
        b.hear(name, b.contribution(b.version(2)))
    assert set(early) == {"x", "y", "z"}
    b.meet("x")
    b.hear("y", Leave(1))
    assert set(early) == {"x", "z"}
    b.hear("y", b.contribution(b.version(2)))
    b.pass_time(12.0)
    assert set(early) == {"x"}
    b.lose("x")
    b.hear("a", b.state(0, 2, plan=b.plan("bx")))
    b.feed(Filled(0, b.version(2), "d2"))
    assert set(b.replica.logs[0].round.inbox) == {"x"}


# -- commits


def test_commits_that_come_during_a_fetch_are_applied_after_it(peer: Any) -> None:
    """They are applied in order on the fetched state, whatever order they came in."""
    n = peer("n", epoch=None, group="")
    n.meet("a", model=model_version([n.version(1)]), epochs=(1,))
    first, second, third = commits(n, 1, 4)
    for commit in (third, first, second):
        assert n.hear("a", commit) == []
    n.hear("a", n.state(0, 1))
    effects = n.feed(Filled(0, n.version(1), "d1"))
    for epoch in (2, 3, 4):
        effects = applied(n, effects)
        assert n.held == n.version(epoch)
    assert not any(isinstance(e, Apply) for e in effects)
    assert n.replica.logs[0].incoming.commits == {}


def test_the_newest_commits_are_kept_up_to_a_bound(peer: Any) -> None:
    """A long fetch must not fill the memory. Commits older than a fetched state are dropped."""
    n = peer("n", epoch=None, group="", commits_kept=2)
    n.meet("a", model=model_version([n.version(1)]), epochs=(1,))
    for commit in commits(n, 1, 5):
        n.hear("a", commit)
    assert sorted(n.replica.logs[0].incoming.commits) == [(n.version(3), "a"), (n.version(4), "a")]
    n.hear("a", n.state(0, 4))
    effects = n.feed(Filled(0, n.version(4), "d4"))
    assert n.replica.logs[0].incoming.commits == {}
    applied(n, effects)
    assert n.held == n.version(5)


# -- what is kept, by itself


def test_the_commit_on_a_version_is_taken_once_and_older_ones_are_dropped() -> None:
    incoming = Incoming(PLAIN, roster_of("b"))
    kept = {epoch: commit_on(Peer.state(0, epoch)) for epoch in (3, 1, 2)}
    for commit in kept.values():
        incoming.keep("a", commit)
    assert len(incoming) == 3
    assert incoming.take_commits(Peer.version(2, "other")) == []
    assert incoming.take_commits(Peer.version(2)) == [("a", kept[2])]
    assert incoming.take_commits(Peer.version(2)) == []
    assert list(incoming.commits.values()) == [kept[3]]


def test_the_oldest_commit_goes_when_there_are_too_many() -> None:
    incoming = Incoming(replace(PLAIN, commits_kept=2), roster_of("b"))
    for epoch in (5, 3, 4):
        incoming.keep("a", commit_on(Peer.state(0, epoch)))
    assert sorted(base.epoch for base, _ in incoming.commits) == [4, 5]


def test_the_early_contribution_of_a_dead_peer_is_kept_only_if_it_was_met() -> None:
    """A peer that was met may come back; late messages of a dead peer are not kept."""
    incoming = Incoming(PLAIN, roster_of("b", "ac"))
    for peer in "acx":
        incoming.stash(peer, Peer.contribution(Peer.version(2)))
    assert (set(incoming.early), len(incoming)) == ({*"acx"}, 3)
    incoming.roster.discovered("x")
    for peer in "ax":
        dies(incoming.roster, peer)
        incoming.lost(peer)
        incoming.stash(peer, Peer.contribution(Peer.version(2), 2))
    assert {peer: c.id.sequence for peer, c in incoming.early.items()} == {"a": 1, "c": 1}


def test_the_commits_of_one_author_displace_no_others() -> None:
    """Otherwise one peer could make this replica lose what it needs."""
    incoming = Incoming(replace(PLAIN, commits_kept=3), roster_of("b"))
    kept = commit_on(Peer.state(0, 1))
    incoming.keep("a", kept)
    for epoch in (1, 5, 6, 7):
        incoming.keep("x", commit_on(Peer.state(0, epoch), by="x"))
    assert sorted((base.epoch, author) for base, author in incoming.commits) == [(1, "a"), (6, "x"), (7, "x")]
    assert [c for _, c in incoming.take_commits(kept.base) if c is kept] == [kept]


def test_of_the_stored_commits_on_a_version_an_entitled_one_is_applied(peer: Any) -> None:
    """The plan shows only now which authors may write it."""
    n = peer("n", epoch=None, group="")
    n.meet("a", model=model_version([n.version(4)]), epochs=(4,))
    right = commit_on(n.state(0, 4))
    for author in "xay":
        n.hear(author, replace(right, aggregator=author), asked=False)
    n.hear("a", n.state(0, 4))
    effects = n.feed(Filled(0, n.version(4), "d4"))
    assert [e.commit for e in effects if isinstance(e, Apply)] == [right]


def test_a_stored_commit_is_found_by_its_base() -> None:
    incoming = Incoming(PLAIN, roster_of("b"))
    incoming.keep("a", commit_on(Peer.state(0, 2)))
    assert incoming.reaches(Peer.version(2))
    assert not incoming.reaches(Peer.version(1))
    assert not incoming.reaches(None)
