"""Asynchronous mode: each submission becomes a commit, and its successors hold it before its submitter is answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.events import (
    Accept,
    Apply,
    Fill,
    Filled,
    Note,
    Release,
    Restore,
    Send,
    SendFailed,
)
from p2p_diloco.core.messages import (
    Commit,
    Contribution,
    Counted,
    Held,
    Outdated,
    Plan,
    Promise,
    Stale,
    State,
    Versions,
)
from p2p_diloco.core.state import meta_of
from p2p_diloco.core.submitting import TOO_OLD
from p2p_diloco.core.version import ContributionId, Version, model_version
from tests.core.conftest import commits_to, computed, fetched, held_by, joined_by, next_commit, running, submitted, to

# -- a submission


def test_a_commit_is_held_by_its_successor_before_it_is_accepted(peer: Any) -> None:
    """Only then is it accepted here and its submitter answered."""
    c = running(peer)
    effects = c.hear("a", c.contribution(c.held))
    assert c.averages(effects) == [["a"]]
    effects = computed(c, effects)
    assert [type(e) for e in effects] == [Send]
    assert effects[0].to == "b"
    commit = effects[0].message
    assert commit.contributions == (Counted("a", ContributionId(1, 1), 1.0, 5),)
    assert c.held == c.version(1), "no peer could fetch it yet"
    effects = c.hear("b", Held(0, commit.version))
    assert effects[0] == Accept(((0, "new"),))
    assert commits_to(effects, "a") == [commit]
    assert commits_to(effects, "b") == []
    assert c.held == commit.version == Version(0, 15, 2, "new")


def test_without_successors_a_commit_is_accepted_at_once(peer: Any) -> None:
    """With successors=0 an answer means that the aggregator holds the commit."""
    c = running(peer, succession="c", successors=0)
    effects = computed(c, c.hear("a", c.contribution(c.held)))
    assert effects[0] == Accept(((0, "new"),))
    assert len(commits_to(effects, "a")) == 1


def test_each_submission_is_an_epoch_in_the_order_of_arrival(peer: Any) -> None:
    """No two are averaged. A submission that comes while a commit is under way waits for it."""
    c = running(peer)
    effects = c.hear("b", c.contribution(c.held, 7))
    assert c.hear("a", c.contribution(c.held, 3)) == []
    effects = held_by(c, "b", computed(c, effects, "d2"))
    assert c.averages(effects) == [["a"]]
    held_by(c, "b", computed(c, effects, "d3"))
    assert c.held == Version(0, 20, 3, "d3")
    assert dict(c.replica.state(0).counted) == {"a": ContributionId(1, 3), "b": ContributionId(1, 7)}


def test_submissions_that_wait_are_committed_in_the_order_of_arrival(peer: Any) -> None:
    """Whatever their authors are called. Each author is answered when its own commit is made, not when none waits."""
    c = running(peer, successors=0, succession="c")
    effects = c.contribute()
    c.hear("b", c.contribution(c.held), after=0.1)
    c.hear("a", c.contribution(c.held), after=0.1)
    effects = computed(c, effects, "d2")
    assert c.averages(effects) == [["b"]]
    effects = computed(c, effects, "d3")
    assert c.averages(effects) == [["a"]]
    assert [commit.version.epoch for commit in commits_to(effects, "b")] == [2, 3]


def test_a_submission_counts_once(peer: Any) -> None:
    """Sent again before its commit it changes nothing; sent again after it, it is answered again."""
    c = running(peer)
    contribution = c.contribution(c.held)
    effects = computed(c, c.hear("a", contribution))
    assert c.hear("a", contribution) == []
    held_by(c, "b", effects)
    effects = c.hear("a", contribution)
    assert c.averages(effects) == []
    assert len(commits_to(effects, "a")) == 1
    assert c.held.samples == 15


def test_a_submission_that_contains_a_counted_one_is_not_counted(peer: Any) -> None:
    """It is answered, and its author drops it."""
    c = running(peer)
    submitted(c, "a", 1)
    second = replace(c.contribution(c.held, 2), oldest=ContributionId(1, 1))
    effects = c.hear("a", second)
    assert c.averages(effects) == []
    assert len(to(effects, "a", State)) == 1


@pytest.mark.parametrize("weight", [250.0, 0.5])
def test_submissions_weigh_alike(peer: Any, weight: float) -> None:
    """One that claims another weight is refused. If it counted as 1, the commit would not fit to its seal, and audits
    would take the aggregator for a liar."""
    c = running(peer)
    effects = c.hear("a", replace(c.contribution(c.held), weight=weight))
    assert [effect.why for effect in effects] == [
        "a contribution to shard 0 is refused: the weight of a submission must be 1"
    ]


def test_a_submission_on_an_earlier_version_counts(peer: Any) -> None:
    """Its author is answered with the commits since its base, in order."""
    c = running(peer)
    base = c.held
    submitted(c, "b", 1)
    effects = submitted(c, "a", 1, base=base)
    assert c.held.epoch == 3
    assert [commit.base.epoch for commit in commits_to(effects, "a")] == [1, 2]


@pytest.mark.parametrize(
    "base",
    [
        pytest.param(Version(0, 10, 1, "other"), id="of another lineage"),
        pytest.param(Version(0, 0, 0, "other"), id="of another beginning"),
        pytest.param(Version(3, 10, 1, "d1"), id="of another generation"),
        pytest.param(Version(0, 10**9, 10**6, "far"), id="that no peer has"),
        pytest.param(Version(0, 10**9, 0, "d0"), id="of the past, with samples of the future"),
    ],
)
def test_a_submission_on_a_wrong_base_is_not_counted(peer: Any, base: Version) -> None:
    """Other submissions are, and its author's next right one is."""
    c = running(peer)
    assert c.averages(c.hear("a", c.contribution(base, 1))) == []
    for sequence in range(2, 5):
        submitted(c, "b", sequence)
        submitted(c, "a", sequence)
    assert c.held == c.version(7, samples=10 + 6 * 5)
    assert dict(c.replica.state(0).counted)["a"] == ContributionId(1, 4)


def test_a_submission_on_a_lineage_that_was_left_is_not_counted(peer: Any) -> None:
    """Its aggregator joined another lineage while the window was open; the author carries its progress."""
    c = running(peer, async_grace=5.0)
    assert c.averages(c.hear("a", c.contribution(c.held))) == []
    other = Version(0, 70, 6, "x6")
    state = State(0, other, 0, Plan(tuple("abc"), tuple("cb")), {}, {0: "d0", 6: "x6"})
    assert to(c.replica.logs[0].adopt(state, c.now), "a", State) == [], "it could not take it yet"
    for one in "ab":
        c.hear(one, Promise(0, other, 0))
    assert c.averages(c.pass_time(6.0)) == []
    assert c.averages([*c.hear("a", c.contribution(other, 2)), *c.pass_time(6.0)]) == [["a"]]


def test_a_submission_that_came_early_is_counted_once_its_base_is_reached(peer: Any) -> None:
    """Its window opens then. One whose base is an ancestor by then is counted, too; one of another lineage is not."""
    c = running(peer, async_grace=5.0)
    joined_by(c, "d")
    for sender, base in (("a", c.version(4)), ("b", c.version(3)), ("d", c.version(3, "other"))):
        assert c.hear(sender, c.contribution(base)) == []
    fetched(c, 4)
    log = c.replica.logs[0]
    assert (log.deadline, log.incoming.early) == (c.now + 5.0, {})
    for one in "abd":
        c.hear(one, Promise(0, c.held, 0))
    assert c.averages(c.pass_time(5.5)) == [["a", "b"]]


def test_a_fetched_state_answers_the_submissions_that_wait_elsewhere(peer: Any) -> None:
    """They are their aggregator's to count. What came early is answered as well, and the commit that follows the state
    is applied."""
    b = running(peer, "b")
    commit = next_commit(b, epoch=4)
    b.hear("c", commit)
    b.hear("a", b.contribution(b.held))
    joined_by(b, "d")
    b.hear("d", b.contribution(b.version(4)))
    effects = fetched(b, 4)
    assert [e.commit for e in effects if isinstance(e, Apply)] == [commit]
    assert to(effects, "a", State) == [b.replica.state(0)]
    assert to(effects, "d") == [Outdated(0, b.held, 0, "c")]


def test_a_submission_that_a_fetched_state_counts_is_answered_not_counted_again(peer: Any) -> None:
    """It waited for its window at an aggregator that was behind."""
    c = running(peer, async_grace=5.0)
    c.hear("a", c.contribution(c.held))
    effects = fetched(c, 4, counted=(("a", ContributionId(1, 1)),))
    assert to(effects, "a", State) == [c.replica.state(0)]
    for one in "ab":
        c.hear(one, Promise(0, c.held, 0))
    assert c.averages(c.pass_time(6.0)) == []


def test_no_submission_is_committed_while_fewer_than_min_peers_are_there(peer: Any) -> None:
    """Idle workers count. Once enough are alive, the waiting submission is committed."""
    c = running(peer, min_peers=3)
    c.lose("a")
    assert c.averages(c.hear("b", c.contribution(c.held))) == []
    assert c.averages(c.meet("a", idle=True)) == [["b"]]


@pytest.mark.parametrize("says", ["aggregates", "is blank"])
def test_a_peer_that_does_not_train_here_is_none_of_min_peers(peer: Any, says: str) -> None:
    """It has no trainer, or no state yet."""
    c = running(peer, min_peers=3)
    c.meet("a", **({"role": "aggregator"} if says == "aggregates" else {"incarnation": 9, **c.blank()}))
    assert c.averages(c.hear("b", c.contribution(c.held))) == []


def test_the_first_outer_step_waits_for_start_peers(peer: Any) -> None:
    """The wait lasts only until a submission is counted."""
    c = running(peer, start_peers=4)
    effects = c.hear("a", c.contribution(c.held))
    assert c.averages(effects) == []
    effects = joined_by(c, "d")
    assert c.averages(effects) == [["a"]]
    held_by(c, "b", computed(c, effects))
    c.lose("d")
    assert c.averages(c.hear("b", c.contribution(c.held))) == [["b"]]


# -- the answer


def test_a_submitter_that_is_far_behind_is_answered_with_the_state(peer: Any) -> None:
    """The aggregator keeps no more commits than have a state's bytes."""
    c = running(peer)
    base = c.held
    for sequence in range(1, 6):
        submitted(c, "b", sequence)
    effects = submitted(c, "a", 1, base=base)
    assert to(effects, "a", State) == [c.replica.state(0)]
    assert commits_to(effects, "a") == []


def test_only_peers_that_may_have_to_answer_keep_several_commits(peer: Any) -> None:
    """The others keep the last one."""
    for me, kept in (("a", 1), ("b", 4)):
        one = running(peer, me)
        for epoch in range(1, 7):
            one.take(next_commit(one, epoch=epoch))
        assert len(one.replica.logs[0].outgoing.recent) == kept


def test_a_submitter_that_is_unlike_is_answered_with_the_state(peer: Any) -> None:
    """A commit would lead it to another digest."""
    c = running(peer)
    c.meet("a", unlike=True)
    effects = submitted(c, "a")
    assert (to(effects, "a", State), commits_to(effects, "a")) == ([c.replica.state(0)], [])


def test_an_aggregator_that_fetched_its_state_answers_with_the_state(peer: Any) -> None:
    """Commits from before do not lead there."""
    c = running(peer)
    base = c.held
    submitted(c, "a", 1)
    c.hear("b", c.state(0, 9, plan=Plan(tuple("abc"), tuple("cb")), counted=(("a", ContributionId(1, 1)),)))
    c.feed(Filled(0, c.version(9), "d9"))
    effects = c.hear("a", c.contribution(base, 1))
    assert (commits_to(effects, "a"), to(effects, "a", State)) == ([], [c.replica.state(0)])


def test_a_submitter_that_holds_the_commit_is_not_sent_it_again(peer: Any) -> None:
    """A successor's own submission is answered by the proposal."""
    assert commits_to(submitted(running(peer), "b"), "b") == []


def test_an_answer_that_did_not_arrive_is_sent_again_as_the_newest_state(peer: Any) -> None:
    """At the next tick, a few times; then the submitter has to ask."""
    c = running(peer)
    [answer] = commits_to(submitted(c, "a"), "a")
    for _ in range(c.rules.resends):
        c.feed(SendFailed("a", answer, gone=False))
        assert to(c.pass_time(1.1), "a", State) == [c.replica.state(0)]
    c.feed(SendFailed("a", answer, gone=False))
    assert to(c.pass_time(1.1), "a", State) == []


def test_a_state_that_did_not_arrive_is_sent_again_as_the_newest(peer: Any) -> None:
    """A commit may follow before the next tick."""
    c = running(peer)
    submitted(c, "a")
    c.feed(SendFailed("a", c.replica.state(0), gone=False))
    submitted(c, "b")
    assert to(c.pass_time(1.1), "a", State) == [c.replica.state(0)]


def test_a_successor_answers_a_submission_with_the_aggregator_and_the_commits(peer: Any) -> None:
    """It answers each time. It keeps only a submission on the present version, which it would count after a
    takeover."""
    b = running(peer, "b")
    base = b.held
    for epoch in (1, 2):
        commit = next_commit(b, epoch=epoch)
        b.take(commit)
    for _ in range(2):
        effects = b.hear("a", b.contribution(base, 5))
        assert [commit.version.epoch for commit in commits_to(effects, "a")] == [2, 3]
        assert to(effects, "a", Outdated) == [Outdated(0, b.held, 0, "c")]
        assert b.replica.logs[0].round.inbox == {}
    for _ in range(2):
        assert to(b.hear("a", b.contribution(b.held, 5)), "a") == [Outdated(0, b.held, 0, "c")]
        assert list(b.replica.logs[0].round.inbox) == ["a"]


def test_a_replica_does_not_answer_itself(peer: Any) -> None:
    """Its trainer merges what its own state counts."""
    c = running(peer, counted=(("c", ContributionId(1, 1)),))
    assert c.replica.logs[0].collect("c", c.contribution(c.held), c.now) == []


# -- staleness


def test_a_refused_submission_is_noted_and_the_others_are_looked_at(peer: Any) -> None:
    """A fresh one that is looked at first does not hide a stale one."""
    c = running(peer, succession="c", successors=0, max_staleness=0)
    effects = c.contribute()
    c.hear("b", c.contribution(c.held))
    c.hear("a", c.contribution(Version(0, 15, 2, "d2")))
    effects = computed(c, effects, "d2")
    assert c.averages(effects) == [["a"]]
    text = "shard 0: refused a submission of b, because its base is 1 epochs behind"
    assert [e for e in effects if isinstance(e, Note)] == [Note("stale", text)]
    assert to(effects, "b", Stale) == [Stale(0, ContributionId(1, 1), c.held)]


def test_an_aggregator_refuses_its_own_stale_submission(peer: Any) -> None:
    """Its exchange is over, and it sends itself nothing."""
    c = running(peer, succession="c", successors=0, max_staleness=0)
    effects = c.hear("a", c.contribution(c.held))
    c.contribute()
    effects = computed(c, effects, "d2")
    assert Release(sent=True) in effects
    assert to(effects, "c") == []
    assert c.replica.own.uncounted((0,)) == [TOO_OLD]


def test_a_submission_beyond_max_staleness_is_refused(peer: Any) -> None:
    """Staleness is the present epoch less the epoch of its base; one as far behind as max_staleness is counted."""
    c = running(peer, max_staleness=1)
    base = c.held
    submitted(c, "b", 1)
    submitted(c, "a", 1, base=base)
    effects = c.hear("a", c.contribution(base, 2))
    assert c.averages(effects) == []
    assert to(effects, "a", Stale) == [Stale(0, ContributionId(1, 2), c.held)]
    assert to(effects, "a", Commit), "what is newer comes beside"
    assert not to(effects, "b")


def test_a_joiners_staleness_counts_from_the_state_that_it_adopted(peer: Any) -> None:
    """Its first submission's staleness is the number of epochs since the adopted state, however old the run is."""
    n = peer("n", epoch=None, live="", mode="async", max_staleness=2)
    state = n.state(0, 40, plan=Plan(tuple("abc"), tuple("cb")))
    n.meet("c", model=model_version([state.version]), epochs=(40,))
    n.hear("c", Versions((state.version,), forked=False))
    n.hear("c", state)
    n.feed(Filled(0, state.version, "d40"))
    [first] = to(n.contribute(), "c", Contribution)
    assert first.base == state.version
    for epochs_since, counts in ((2, True), (3, False)):
        c = peer("c", epoch=40 + epochs_since, succession="cb", mode="async", max_staleness=2)
        for other in "ab":
            c.hear(other, Promise(0, c.held, 0))
        assert (c.averages(c.hear("n", first)) == [["n"]]) is counts


# -- grace windows and the Delayed Nesterov buffer


def test_a_window_averages_the_submissions_of_async_grace(peer: Any) -> None:
    """The window opens with the first submission. The commit counts all that arrived."""
    c = running(peer, async_grace=0.5)
    assert c.hear("b", c.contribution(c.held)) == []
    assert c.replica.next_wakeup() == c.now + 0.5
    assert c.hear("a", c.contribution(c.held), after=0.3) == []
    effects = c.pass_time(0.25)
    assert c.averages(effects) == [["a", "b"]]


def test_a_window_closes_early_when_each_busy_worker_has_submitted(peer: Any) -> None:
    c = running(peer, async_grace=5.0)
    c.meet("b", idle=True)
    c.hear("a", c.contribution(c.held))
    assert c.averages(c.contribute()) == [["a", "c"]]


def test_a_window_closes_early_when_the_missing_have_died(peer: Any) -> None:
    c = running(peer, async_grace=50.0)
    c.hear("b", c.contribution(c.held))
    assert c.averages(c.contribute()) == []
    assert c.averages(c.lose("a")) == [["b", "c"]]


def test_the_submission_that_fills_the_buffer_closes_the_window(peer: Any) -> None:
    """Submissions that come later begin the next buffer."""
    c = running(peer, async_grace=5.0, dn_buffer_size=2)
    c.hear("b", c.contribution(c.held))
    effects = c.hear("a", c.contribution(c.held))
    assert c.averages(effects) == [["a", "b"]]
    assert effects[-1].buffered == 0
    c.contribute()
    held_by(c, "b", computed(c, effects, "d2"))
    assert c.replica.state(0).buffered == 0
    assert c.averages(c.pass_time(5.5)) == [["c"]]


def test_a_window_closes_early_for_the_room_that_is_left_in_the_buffer(peer: Any) -> None:
    """A submission of an earlier window is in there already."""
    c = running(peer, async_grace=5.0, dn_buffer_size=3, succession="c", successors=0)
    c.hear("a", c.contribution(c.held))
    computed(c, c.pass_time(5.5))
    assert c.replica.state(0).buffered == 1
    assert c.averages(c.hear("a", c.contribution(c.held, 2))) == []
    assert c.averages(c.hear("b", c.contribution(c.held, 2))) == [["a", "b"]]


def test_a_buffer_of_one_submission_closes_no_window(peer: Any) -> None:
    """It is none."""
    c = running(peer, async_grace=5.0, dn_buffer_size=1)
    assert c.hear("a", c.contribution(c.held)) == []
    assert c.averages([*c.hear("b", c.contribution(c.held)), *c.pass_time(5.5)]) == [["a", "b"]]


def test_the_buffer_fills_with_each_submission_and_is_part_of_the_state(peer: Any) -> None:
    """The digest covers its count, and tensor work and fetched states carry it."""
    c = running(peer, dn_buffer_size=3)
    fills = []
    for sequence in range(1, 6):
        effects = c.hear("a", c.contribution(c.held, sequence))
        fills.append((effects[-1].buffered, effects[-1].meta))
        held_by(c, "b", computed(c, effects, f"d{sequence + 1}"))
        state = c.replica.state(0)
        assert meta_of(state) == fills[-1][1]
        assert meta_of(state) == meta_of(replace(state, payload="any"))
        assert state.buffered == 0 or meta_of(state) != meta_of(replace(state, buffered=0))
    assert [fill for fill, _ in fills] == [0, 1, 2, 0, 1]


def test_a_fetched_state_brings_the_count_of_its_buffer(peer: Any) -> None:
    """A successor goes on where the buffer stands."""
    a = running(peer, "a", dn_buffer_size=3)
    state = replace(a.state(0, 4), buffered=2)
    effects = a.hear("c", state)
    assert [e.meta for e in effects if isinstance(e, Fill)] == [meta_of(state)]
    a.feed(Filled(0, a.version(4), "d4"))
    assert a.replica.state(0).buffered == 2


def test_a_commit_is_applied_with_the_count_of_the_buffer(peer: Any) -> None:
    a = peer("a", epoch=None, live="", mode="async", dn_buffer_size=3)
    a.feed(Restore((replace(a.state(0, 1, plan=a.plan("abc", "cb")), buffered=2),)))
    assert [e.buffered for e in a.hear("c", next_commit(a)) if isinstance(e, Apply)] == [2]
