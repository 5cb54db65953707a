"""Asynchronous mode: who writes the next commit when the aggregator is gone, or does not do its part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.events import (
    Accept,
    Applied,
    Apply,
    Averaged,
    Filled,
    Send,
)
from p2p_diloco.core.messages import (
    Commit,
    Contribution,
    Fetch,
    Held,
    Outdated,
    Plan,
    Promise,
    TakeOver,
    Versions,
)
from p2p_diloco.core.version import Version, model_version
from tests.core.conftest import average_in, commits_to, computed, fetched, held_by, next_commit, running, submitted, to

# -- claims


def test_a_claim_on_an_older_version_is_answered_with_the_commits_since(peer: Any) -> None:
    """They arrive before the claimant goes on without this peer's promise. The whole state might take longer, and the
    claimant would make other versions of the same epochs."""
    b = running(peer, "b")
    commits = [next_commit(b, epoch=epoch) for epoch in range(1, 5)]
    for commit in commits:
        b.take(commit)
    assert commits_to(b.hear("a", TakeOver(0, commits[1].base, 1)), "a") == commits[1:]


def test_a_claim_that_is_answered_with_a_state_is_answered_with_versions_first(peer: Any) -> None:
    """The state takes long; the versions tell the claimant at once that it is behind."""
    b, base = running(peer, "b"), Version(0, 0, 0, "d0")
    assert [e.message for e in b.hear("a", TakeOver(0, base, 1))] == [
        Versions(b.replica.versions, forked=False),
        b.replica.state(0),
    ]


@pytest.mark.parametrize("passed_over", [False, True])
def test_a_claimant_waits_for_the_state_of_a_peer_that_is_ahead(peer: Any, passed_over: bool) -> None:
    """Its own commit would be a fork. It asks that peer for no promise any more, and does not wait without end, because
    a hostile peer may say that it is ahead."""
    b = running(peer, "b")
    b.contribute()
    lead = b.replica.logs[0].lead
    lead.claim(1)
    lead.passed_over |= {"a"} if passed_over else set()
    b.pass_time(b.rules.promises_within - 2.0)
    b.hear("a", Versions((b.version(9),), forked=False))
    effects = b.hear("c", Promise(0, b.held, 1)) + b.pass_time(b.rules.answered_within - 2.0)
    assert not b.averages(effects)
    assert to(effects, "a", TakeOver) == []
    assert b.averages(b.pass_time(4.0)) == [["b"]]


def test_a_claim_that_is_repeated_is_promised_again(peer: Any) -> None:
    """The first promise may have been lost."""
    a = running(peer, "a")
    claim, promise = TakeOver(0, a.held, 1), Promise(0, a.held, 1)
    assert [to(a.hear("b", claim), "b") for _ in range(2)] == [[promise]] * 2


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_no_promise_is_given_while_a_commit_is_being_applied(peer: Any, mode: str) -> None:
    """The claimant would write another commit on the same version. It asks again, and gets this commit."""
    b = running(peer, "b", mode=mode)
    commit, claim = next_commit(b), TakeOver(0, b.held, 2)
    b.hear("c", commit)
    assert to(b.hear("a", claim), "a") == []
    b.feed(Applied(0, commit.base, commit.version.digest))
    assert commits_to(b.hear("a", claim), "a") == [commit]


def test_a_submission_waits_for_its_window_after_a_claim_was_forgotten(peer: Any) -> None:
    """It is handed to this peer by another's word; the window opens then."""
    b = running(peer, "b", async_grace=5.0)
    b.contribute()
    b.hear("c", Outdated(0, b.held, 1, "b"))
    assert b.replica.logs[0].deadline == b.now + 5.0


def test_a_successor_goes_on_from_the_last_commit_it_holds(peer: Any) -> None:
    """It claims the next term, asks all live peers, counts uncounted submissions, and answers the counted ones
    again."""
    b = running(peer, "b", dn_buffer_size=4)
    commit = next_commit(b)
    b.take(commit)
    effects = b.lose("c")
    assert to(effects, "a", TakeOver) == [TakeOver(0, commit.version, 1)]
    again = replace(b.contribution(b.version(1), 1), samples=10)
    assert len(commits_to(b.hear("a", again), "a")) == 1
    b.hear("a", b.contribution(commit.version, 2))
    effects = b.hear("a", Promise(0, commit.version, 1))
    assert b.averages(effects) == [["a"]]
    assert effects[-1].buffered == 1


def test_a_commit_that_its_author_may_not_write_leaves_the_draft_alone(peer: Any) -> None:
    """Otherwise a member could keep the aggregator from ever committing, by commits that all peers refuse."""
    c = running(peer)
    average = average_in(c.contribute())
    forged = Commit(0, c.held, c.version(2, "forged"), 2**40, "a", (), c.plan("abc"))
    assert c.hear("a", forged) == []
    assert len(commits_to(c.averaged([average]), "b")) == 1


def test_the_answer_to_a_dropped_draft_is_not_taken_for_that_of_the_next_draft(peer: Any) -> None:
    """The next draft on the same base has another term, so the earlier digest is not that of its commit."""
    c = running(peer)
    first = average_in(c.contribute())
    c.hear("b", TakeOver(0, c.held, 1))
    second = average_in([*c.lose("a"), *c.lose("b"), *c.pass_time(1.1)])
    assert (second.base, second.meta != first.meta) == (first.base, True)
    assert c.averaged([first], "first") == []
    c.averaged([second], "second")
    assert c.held.digest == "second"


def test_an_aggregator_with_the_lesser_claim_commits_nothing(peer: Any) -> None:
    """Its successor refuses the proposal. It concedes, and sends its own submission to the successor."""
    c = running(peer)
    effects = computed(c, c.contribute())
    [proposal] = commits_to(effects, "b")
    b = running(peer, "b")
    b.lose("c")
    b.hear("a", b.contribution(b.held))
    b.hear("a", Promise(0, b.held, 1))
    assert not to(b.hear("c", proposal), "c", Held)
    assert not to(b.feed(Averaged(0, b.held, 1, "b2", "mean")), "c", Held)
    effects = c.hear("b", Outdated(0, c.held, 1, "b"))
    assert not any(isinstance(e, Accept) for e in effects)
    assert len(to(effects, "b", Contribution)) == 1
    assert c.hear("b", Held(0, proposal.version)) == [], "it is no proposal any more"
    assert c.held == c.version(1)


def test_a_claim_on_a_later_version_is_remembered(peer: Any) -> None:
    """A peer that promised while it was behind refuses the old aggregator's commit after it has caught up."""
    a = running(peer, "a")
    effects = a.hear("b", TakeOver(0, a.version(4), 1))
    assert to(effects, "b", Promise) == [Promise(0, a.version(4), 1)]
    a.hear("c", a.state(0, 4, plan=Plan(tuple("abc"), tuple("cb"))))
    a.feed(Filled(0, a.version(4), "d4"))
    effects = a.hear("c", next_commit(a, epoch=4))
    assert to(effects, "c") == [Outdated(0, a.version(4), 1, "b")]


def test_a_commit_that_came_early_is_refused_where_its_term_is_overruled(peer: Any) -> None:
    """Its base has come since, and so has another peer's claim."""
    a = running(peer, "a")
    a.hear("c", next_commit(a, epoch=4))
    a.hear("b", TakeOver(0, a.version(4), 1))
    effects = fetched(a, 4)
    assert not any(isinstance(e, Apply) for e in effects)
    assert to(effects, "c") == [Outdated(0, a.version(4), 1, "b")]


def test_a_peer_that_refuses_a_commit_asks_the_claimant_for_it(peer: Any) -> None:
    """The claimant has learnt of the commit and gone on. Without the question this peer would refuse the aggregator
    until that one goes on without it: Summaries name a fragment's lowest epoch, and the claimant may be behind in
    another of its shards."""
    a = peer("a", group="abc", succession="cb", mode="async", fragments=((0, 1),))
    a.hear("b", TakeOver(0, a.held, 1))
    commit = next_commit(a)
    effects = a.hear("c", commit)
    assert to(effects, "c") == [Outdated(0, a.held, 1, "b")]
    assert to(effects, "b") == [Fetch(a.replica.versions, shards=(0,))]
    assert to(a.hear("c", commit), "b") == [], "the answer may be refused, too: it would be asked for without end"
    assert to(a.pass_time(2 * a.rules.settle), "b", Fetch) == []
    assert to(a.hear("c", commit), "b") == [Fetch(a.replica.versions, shards=(0,))]
    assert any(isinstance(e, Apply) for e in a.hear("b", commit))


def test_of_claims_on_a_later_version_the_greatest_is_remembered(peer: Any) -> None:
    """The order of arrival does not matter; at most as many claims are kept as commits. An older message of the
    claimant's undoes the claim no more than one that arrived with the version."""
    a = running(peer, "a", commits_kept=16)
    a.hear("b", TakeOver(0, a.version(4), 4))
    a.hear("c", TakeOver(0, a.version(4), 3))
    a.hear("c", a.state(0, 4, plan=Plan(tuple("abc"), tuple("cb"))))
    a.feed(Filled(0, a.version(4), "d4"))
    assert (a.replica.logs[0].lead.term, a.replica.logs[0].lead.holder) == (4, "b")
    assert a.hear("b", Outdated(0, a.version(4), 0, "c")) == []
    assert a.replica.logs[0].lead.holder == "b"
    for epoch in range(10, 60):
        a.hear("b", TakeOver(0, a.version(epoch), 1))
    assert {v.epoch for v in a.replica.logs[0].claims} == {*range(60 - a.rules.commits_kept, 60)}


def test_a_peer_that_has_forgotten_its_claim_claims_again(peer: Any) -> None:
    """It left the lineage and came back, and sends its contribution to the plan's aggregator, which has promised to it.
    That answer makes it ask for promises again; it commits when it has them."""
    b = running(peer, "b")
    assert [e.to for e in b.contribute() if isinstance(e, Send)] == ["c"]
    assert b.averages(b.hear("c", Outdated(0, b.held, 1, "b"))) == []
    effects = b.pass_time(1.1)
    assert [to(effects, p, TakeOver) for p in "ac"] == [[TakeOver(0, b.held, 1)]] * 2
    assert b.averages(b.hear("a", Promise(0, b.held, 1))) == []
    assert b.averages(b.hear("c", Promise(0, b.held, 1))) == [["b"]]


def test_a_restarted_aggregator_takes_the_commit_of_its_earlier_life(peer: Any) -> None:
    """A successor holds that commit, so the aggregator gives up its new draft."""
    c = running(peer)
    computed(c, c.hear("a", c.contribution(c.held)), "mine")
    held = replace(next_commit(c), contributions=())
    effects = c.hear("b", held)
    assert [e.commit for e in effects if isinstance(e, Apply)] == [held]


def test_an_aggregator_that_starts_from_a_disk_asks_for_promises_first(peer: Any) -> None:
    """The restored plan may be outdated: it commits nothing until all peers that the plan names have promised or are
    found dead."""
    c = peer("c", group="abc", succession="cb", mode="async", live="a")
    assert c.averages(c.contribute()) == []
    c.hear("a", Promise(0, c.held, 0))
    assert c.averages(c.meet("b")) == []
    assert c.averages(c.hear("b", Promise(0, c.held, 0))) == [["c"]]


def test_an_aggregator_that_fetched_its_state_asks_for_promises_first(peer: Any) -> None:
    """The donor may be behind the others, which may hold a commit of this peer's earlier life."""
    c = peer("c", epoch=None, live="", mode="async", heartbeat_timeout=10.0)
    behind = c.state(0, 4, plan=Plan(tuple("abc"), tuple("cb")))
    c.meet("a", model=model_version([behind.version]), epochs=(4,))
    c.hear("a", Versions((behind.version,), forked=False))
    c.hear("a", behind)
    effects = c.feed(Filled(0, behind.version, "d4"))
    assert to(effects, "a", TakeOver) == [TakeOver(0, behind.version, 0)]
    assert c.averages([*effects, *c.contribute()]) == []
    assert c.averages(c.hear("a", Promise(0, behind.version, 0))) == [], "b is named, and not met yet"
    assert c.averages(c.hear("b", Promise(0, behind.version, 0))) == [["c"]]


def test_an_aggregator_waits_for_peers_that_only_another_shards_plan_names(peer: Any) -> None:
    """It may have fetched an old state of this shard, of a time when those peers were not in the group. They have gone
    on since, so that a commit of its own would be a fork."""
    c = peer("c", group="ac", succession="ca", mode="async", live="a")
    c.replica.roster.name("d")  # as a new round of another shard does
    assert c.averages(c.contribute()) == []
    assert c.averages(c.hear("a", Promise(0, c.held, 0))) == []
    c.meet("d")
    assert c.averages(c.hear("d", Promise(0, c.held, 0))) == [["c"]]


def test_new_names_hold_up_no_claim_without_end(peer: Any) -> None:
    """A hostile member that aggregates another shard names peers that are not there, in each commit new ones."""
    c = peer("c", group="ac", succession="ca", mode="async", live="a")
    c.replica.roster.name("nobody")
    assert c.averages(c.contribute()) == []
    effects = c.hear("a", Promise(0, c.held, 0))
    began, number = c.now, 0
    while not c.averages(effects):
        assert c.now - began < c.rules.dead_after + c.rules.settle
        c.replica.roster.name(f"nobody {number}")
        number, effects = number + 1, c.pass_time(c.rules.heartbeat_interval)
    assert number > 2


def test_an_aggregator_that_a_later_commit_names_after_a_restart_asks_for_promises_first(peer: Any) -> None:
    """In its earlier life it may have written the commit after that one. It asks once."""
    b, plan = running(peer, "b"), Plan(tuple("abc"), tuple("bc"))
    effects = b.take(next_commit(b, plan=plan))
    assert [to(effects, p, TakeOver) for p in "ac"] == [[TakeOver(0, b.version(2), 0)]] * 2
    assert b.averages(b.contribute()) == []
    b.hear("a", Promise(0, b.held, 0))
    effects = b.hear("c", Promise(0, b.held, 0))
    assert b.averages(effects) == [["b"]]
    effects = held_by(b, "c", computed(b, effects, "d3"))
    assert to(effects, "a", TakeOver) == []
    assert b.averages(b.hear("a", b.contribution(b.held, 3))) == [["a"]]


def test_a_peer_that_sends_its_commit_again_after_the_answer_is_on_another_lineage(peer: Any) -> None:
    """The first time it may only have proposed it, and is brought up to date. The second time it has appended it: an
    answer with commits would get the same answer for ever, so the lineages are compared."""
    c = running(peer)
    accepted = submitted(c, "a")
    theirs = next_commit(c, epoch=1, by="b")
    theirs = replace(theirs, version=replace(theirs.version, digest="other"))
    assert commits_to(c.hear("b", theirs), "b") == commits_to(accepted, "a")
    (answer,) = c.hear("b", theirs)
    assert isinstance(answer.message, Versions)
    assert answer.message.forked


# -- live peers for which a commit has waited too long


def test_a_live_successor_that_never_confirms_is_passed_over(peer: Any) -> None:
    """The commit is published without it, and the next plan names another successor."""
    c = running(peer)
    computed(c, c.hear("a", c.contribution(c.held)))
    assert c.held == c.version(1)
    c.pass_time(c.rules.confirms_within - 1.0)
    assert c.held == c.version(1)
    c.pass_time(3.0)
    assert c.held.epoch == 2
    assert c.replica.roster.passed("b")
    assert "b" not in c.replica.logs[0].next_plan(set(), c.now).succession


def test_a_remembered_claim_counts_only_if_it_is_the_claimants_turn(peer: Any) -> None:
    """Whether it is shows once the version is known."""
    a = running(peer, "a")
    a.hear("b", TakeOver(0, a.version(4), 2))
    fetched(a, 4)
    assert (a.replica.logs[0].lead.term, a.replica.logs[0].lead.holder) == (0, "c")


def test_a_peer_does_not_answer_itself(peer: Any) -> None:
    """It is told a commit in its own name, which an earlier incarnation may have made: it takes the commit, and tells
    only others."""
    b = peer("b", group="abc", mode="async", succession="ab")
    commit = b.commit(by="b", term=1)
    b.hear("c", commit)
    effects = b.feed(Applied(0, commit.base, commit.version.digest))
    assert b.held == commit.version
    assert not [e for e in effects if isinstance(e, Send) and e.to == "b"]
