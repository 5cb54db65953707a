"""A computed commit that is sent to the peers that must hold it, and their confirmations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.election import assign
from p2p_diloco.core.events import Accept, Applied, Apply, Delivered, Effect, Filled, Release, Send, SendFailed
from p2p_diloco.core.messages import Commit, Fetch, Held, Plan, Promise
from p2p_diloco.core.proposal import Proposal
from p2p_diloco.core.version import Version
from tests.core.conftest import average_in, commits_to, computed, held_by, joined_by, next_commit, running, to

COMMIT = Commit(0, Version(0, 0, 0, "d0"), Version(0, 5, 1, "d1"), 0, "a", (), Plan(("a",), ("a", "c")))


def test_the_peers_that_a_plan_names_lack_a_proposal_until_they_confirm_it() -> None:
    """Except the peer that made it."""
    proposal = Proposal(COMMIT)
    assert proposal.missing(Plan((), ("a", "b")), "a") == {"b"}
    assert proposal.missing(COMMIT.plan, "a") == {"c"}
    proposal.holding.add("b")
    assert proposal.missing(Plan((), ("a", "b")), "a") == set()


def test_a_proposal_is_due_again_after_a_while() -> None:
    """For each peer; at once for a peer that restarted."""
    proposal = Proposal(COMMIT)
    assert proposal.due("bc", 10.0, 4.0) == ["b", "c"]
    assert proposal.due("bcd", 13.9, 4.0) == ["d"]
    assert proposal.due("bcd", 14.0, 4.0) == ["b", "c"]
    proposal.holding.add("c")
    proposal.forgotten_by("c")
    assert proposal.missing(COMMIT.plan, "a") == {"c"}
    assert proposal.due("bcd", 14.1, 4.0) == ["c"]


def test_a_peer_that_restarts_before_it_was_offered_anything_changes_nothing() -> None:
    proposal = Proposal(COMMIT)
    proposal.forgotten_by("c")
    assert proposal.due("c", 10.0, 4.0) == ["c"]


# -- an asynchronous successor


def test_a_proposal_is_offered_to_all_present_successors_at_once(peer: Any) -> None:
    """One of them may be frozen: then another one holds the proposal if the aggregator dies."""
    c = running(peer, successors=2, succession="cba")
    effects = computed(c, c.contribute())
    assert len(commits_to(effects, "b")) == len(commits_to(effects, "a")) == 1


@pytest.mark.parametrize("ends", ["holds", "dies"])
def test_a_proposal_is_offered_to_newly_named_successors_last(peer: Any, ends: str) -> None:
    """A present successor may claim the term: it must not lack what a newly named one holds."""
    c, effects = promised(peer, "cb", live="a", successors=2)
    effects = computed(c, effects)
    [proposal] = commits_to(effects, "b")
    assert (proposal.plan.succession, commits_to(effects, "a")) == (("c", "a", "b"), [])
    assert commits_to(c.feed_tick(), "a") == []
    assert commits_to(held_by(c, "b", effects) if ends == "holds" else c.lose("b"), "a") == [proposal]


def test_a_successor_acknowledges_a_commit_once_it_has_applied_it(peer: Any) -> None:
    """Not when the commit arrives."""
    b = running(peer, "b")
    commit = next_commit(b)
    effects = b.hear("c", commit)
    assert [type(e) for e in effects] == [Apply]
    effects = b.feed(Applied(0, commit.base, commit.version.digest))
    assert to(effects, "c", Held) == [Held(0, commit.version)]
    assert isinstance(effects[0], Accept)


@pytest.mark.parametrize("me", ["a", "b"])
def test_each_peer_that_either_plan_names_acknowledges(peer: Any, me: str) -> None:
    """That of the commit, or the present one. It says so before it begins with the next commit."""
    one = running(peer, me)
    commit, then = next_commit(one, plan=Plan(tuple("abc"), tuple("ca"))), next_commit(one, epoch=2)
    one.hear("c", commit)
    one.hear("c", then)
    effects = one.feed(Applied(0, commit.base, commit.version.digest))
    assert effects[:2] == [Accept(((0, "d2"),)), Send("c", Held(0, commit.version))]
    assert [e.commit for e in effects if isinstance(e, Apply)] == [then]


def test_an_outer_step_that_comes_after_it_was_given_up_changes_nothing(peer: Any) -> None:
    """A newer state has come meanwhile."""
    b = running(peer, "b")
    commit = next_commit(b)
    b.hear("c", commit)
    b.hear("c", b.state(0, 4, plan=Plan(tuple("abc"), tuple("cb"))))
    b.feed(Filled(0, b.version(4), "d4"))
    assert b.feed(Applied(0, commit.base, commit.version.digest)) == []
    assert b.held == b.version(4)


def test_a_newcomer_keeps_a_commit_that_names_it(peer: Any) -> None:
    """It has no state yet, and so nothing to ask for."""
    n = peer("n", epoch=None, live="", mode="async")
    commit = Commit(0, n.version(4), n.version(5), 0, "c", (), Plan(tuple("acn"), tuple("cn")))
    assert n.said(n.hear("c", commit)) == []
    assert list(n.replica.logs[0].incoming.commits.values()) == [commit]


def test_a_peer_that_no_plan_names_does_not_acknowledge(peer: Any) -> None:
    """For such a peer the commit is the answer to its submission."""
    a = running(peer, "a")
    commit = next_commit(a)
    assert to(a.take(commit), "c", Held) == []


def test_a_successor_that_gets_a_commit_again_acknowledges_it_again(peer: Any) -> None:
    """The aggregator has not received the confirmation; the successor is not further, because nothing is accepted
    without it."""
    b = running(peer, "b")
    commit = next_commit(b)
    b.take(commit)
    assert b.hear("c", commit) == [Send("c", Held(0, commit.version))]


def test_an_acknowledgement_that_did_not_arrive_is_sent_again(peer: Any) -> None:
    """At the next tick, while the version is still present."""
    b = running(peer, "b")
    commit = next_commit(b)
    b.take(commit)
    b.feed(SendFailed("c", Held(0, commit.version), gone=False))
    assert to(b.pass_time(1.1), "c", Held) == [Held(0, commit.version)]


def test_an_acknowledgement_of_an_earlier_version_is_not_sent_again(peer: Any) -> None:
    """The successor has a later version, which shows its aggregator the same."""
    b = running(peer, "b")
    for epoch in (1, 2):
        commit = next_commit(b, epoch=epoch)
        b.take(commit)
        if epoch == 1:
            b.feed(SendFailed("c", Held(0, commit.version), gone=False))
    assert to(b.pass_time(1.1), "c", Held) == []


def test_a_successor_that_has_missed_a_commit_fetches_it_at_once(peer: Any) -> None:
    """Its aggregator waits for it."""
    b = running(peer, "b")
    effects = b.hear("c", next_commit(b, epoch=4))
    assert to(effects, "c", Fetch) == [Fetch((b.version(1),), shards=(0,))]
    b.hear("c", b.state(0, 4, plan=Plan(tuple("abc"), tuple("cb"))))
    effects = b.feed(Filled(0, b.version(4), "d4"))
    assert [type(e) for e in effects if isinstance(e, Apply)] == [Apply]


def test_a_submitter_that_has_missed_a_commit_asks_the_aggregator(peer: Any) -> None:
    """Its answer builds on that commit. A commit that another peer passes on is no answer."""
    a = running(peer, "a")
    assert to(a.hear("b", next_commit(a, epoch=4)), "b", Fetch) == []
    assert to(a.hear("c", next_commit(a, epoch=4)), "c", Fetch) == [Fetch((a.version(1),), shards=(0,))]


# -- an asynchronous aggregator


def test_peers_that_must_hold_a_commit_are_probed(peer: Any) -> None:
    """Their death is noticed as soon as that of any peer that is waited for."""
    c = running(peer)
    assert "b" not in c.replica.logs[0].watched()
    computed(c, c.hear("a", c.contribution(c.held)))
    assert "b" in c.replica.logs[0].watched()


def promised(peer: Any, succession: str, live: str, **settings: Any) -> tuple[Any, list[Effect]]:
    """c, which aggregates by an old plan, and what it does once the others have promised."""
    c = peer("c", group="abc", succession=succession, mode="async", live=live, **settings)
    c.hear("a", Promise(0, c.held, 0))
    return c, c.hear("b", Promise(0, c.held, 0))


def test_a_successor_that_was_named_and_not_met_must_hold_a_proposal(peer: Any) -> None:
    """It is taken to live until it is found dead."""
    c, effects = promised(peer, "cb", live="a")
    effects = computed(c, effects)
    assert len(commits_to(effects, "b")) == 1
    assert commits_to(effects, "a") == [], "its turn is after b"
    assert c.held == c.version(1)


def test_the_missing_successor_is_the_one_that_the_run_elects(peer: Any) -> None:
    """All peers elect alike."""
    [named] = commits_to(computed(*promised(peer, "c", live="ab")), "b")
    assert named.plan.succession == ("c", "b")


def test_an_elected_aggregator_keeps_its_successor(peer: Any) -> None:
    """However long it has had the shard."""
    c = running(peer)
    c.pass_time(c.rules.assigned_for + 1.0)
    [named] = commits_to(computed(c, c.contribute()), "b")
    assert named.plan.succession == ("c", "b")


def test_a_proposal_that_failed_to_arrive_twice_is_sent_again_once(peer: Any) -> None:
    """It went to two lives of one peer."""
    c = running(peer)
    [proposal] = commits_to(computed(c, c.contribute()), "b")
    c.meet("b", incarnation=9)
    for _ in range(2):
        c.feed(SendFailed("b", proposal, gone=False))
    assert commits_to(c.feed_tick(), "b") == [proposal]


def test_an_aggregator_is_watched_while_it_has_a_submission(peer: Any) -> None:
    """Nothing else of it is waited for."""
    a = running(peer, "a")
    log = a.replica.logs[0]
    assert log.watched() == set()
    a.contribute()
    assert log.watched() == {"c"}


def test_a_proposal_is_sent_again(peer: Any) -> None:
    """At the next tick if it was not delivered, after a while if it is not confirmed."""
    c = running(peer)
    effects = computed(c, c.hear("a", c.contribution(c.held)))
    [proposal] = commits_to(effects, "b")
    c.feed(SendFailed("b", proposal, gone=False))
    assert commits_to(c.pass_time(1.1), "b") == [proposal]
    c.feed(Delivered("b", proposal))
    assert commits_to(c.pass_time(9.0), "b") == []
    assert commits_to(c.pass_time(2.0), "b") == [proposal]


def test_an_aggregator_does_not_apply_its_own_proposal(peer: Any) -> None:
    """A successor that has accepted it passes it on; the other successors must still hold it."""
    c = running(peer, successors=2, succession="cba")
    [proposal] = commits_to(computed(c, c.contribute()), "b")
    assert not any(isinstance(e, Apply) for e in c.hear("b", proposal))
    assert c.hear("b", Held(0, proposal.version)) == []
    assert Release(sent=True) in c.hear("a", Held(0, proposal.version))


def test_an_aggregator_that_is_behind_is_sent_the_commits_that_follow(peer: Any) -> None:
    """By the peers that its commit names, because they have gone on without it."""
    a, b = running(peer, "a"), running(peer, "b")
    for one in (a, b):
        for epoch in (1, 2):
            commit = next_commit(one, epoch=epoch)
            one.take(commit)
    old = replace(next_commit(b), version=b.version(2, "other"))
    assert [commit.version.epoch for commit in commits_to(b.hear("c", old), "c")] == [2, 3]
    assert to(a.hear("c", old), "c") == []


def test_a_successor_that_restarts_has_to_hold_the_proposal_again(peer: Any) -> None:
    """Its copy is lost, though it has a state. The proposal is sent to it again."""
    c = running(peer, successors=2, succession="cba")
    effects = computed(c, c.contribute())
    held_by(c, "b", effects)
    again = [*c.meet("b", incarnation=9), *c.feed_tick()]
    assert commits_to(again, "b") == commits_to(effects, "b")
    assert held_by(c, "a", effects) == []
    assert Release(sent=True) in held_by(c, "b", effects)


def test_a_successor_that_dies_is_replaced_before_the_submitter_is_answered(peer: Any) -> None:
    """The proposal becomes a commit without it. The next commit names another successor, and the submitter is answered
    once that one holds it: no single death loses an answered submission."""
    c = running(peer)
    joined_by(c, "d")
    [proposal] = commits_to(computed(c, c.hear("a", c.contribution(c.held)), "d2"), "b")
    effects = c.lose("b")
    assert Accept(((0, "d2"),)) in effects
    assert average_in(effects).contributions == ()
    assert not to(effects, "a", Commit)
    effects = computed(c, effects, "d3")
    [named] = commits_to(effects, "d")
    assert named.plan.succession == ("c", "d")
    assert not to(effects, "a", Commit)
    assert commits_to(held_by(c, "d", effects), "a") == [proposal, named]
    effects = computed(c, c.hear("d", c.contribution(c.held)), "d4")
    assert commits_to(held_by(c, "d", effects), "a") == [], "it is answered once"


def test_a_successor_that_restarted_without_state_is_replaced(peer: Any) -> None:
    """It could only hold a commit after fetching the whole model."""
    c = running(peer)
    joined_by(c, "d")
    computed(c, c.hear("a", c.contribution(c.held)), "d2")
    effects = c.meet("b", incarnation=9, **c.blank())
    assert Accept(((0, "d2"),)) in effects
    [named] = commits_to(computed(c, effects, "d3"), "d")
    assert named.plan.succession == ("c", "d")
    assert Accept(((0, "d3"),)) in c.hear("d", Held(0, named.version)), "b need not hold what names another"


@pytest.mark.parametrize("says", [{"eligible": False}, {"unlike": True}])
def test_a_private_or_unlike_peer_is_not_named_a_successor_in_place_of_another(
    peer: Any, says: dict[str, bool]
) -> None:
    """The other one is named, whichever is elected."""
    first, second = (p for p in assign("run", 0, (0,), dict.fromkeys("acd", 1.0))[0] if p != "c")
    c = running(peer)
    joined_by(c, "d")
    c.meet(first, **says)
    effects = c.lose("b")
    [named] = commits_to(computed(c, effects, "d2"), second)
    assert named.plan.succession == ("c", second)


def test_a_lone_survivor_goes_on_alone(peer: Any) -> None:
    """If no other peer can be named, the aggregator alone holds the answered commits."""
    c = running(peer)
    c.lose("a")
    c.lose("b")
    effects = computed(c, c.contribute())
    assert effects[0] == Accept(((0, "new"),))
    assert c.replica.state(0).plan.succession == ("c", "b"), "b is named again should it come back"


def test_a_proposal_does_not_wait_for_an_unlike_successor(peer: Any) -> None:
    """It could never hold what the others compute."""
    c = running(peer)
    computed(c, c.hear("a", c.contribution(c.held)), "d2")
    c.meet("b", unlike=True)
    assert c.held == c.version(1)
    c.pass_time(1.1)
    assert c.held.epoch == 2
