"""Asynchronous mode: each submission becomes a commit, and its successors hold it before its submitter is answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.events import (
    Accept,
    Applied,
    Apply,
    Averaged,
    Effect,
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
    TakeOver,
    Versions,
)
from p2p_diloco.core.state import meta_of
from p2p_diloco.core.submitting import TOO_OLD
from p2p_diloco.core.version import ContributionId, Version, model_version
from tests.core.conftest import average_in, commits_to, computed, held_by, joined_by, next_commit, running, to


def submitted(one: Any, sender: str, sequence: int = 1, base: Version | None = None, digest: str = "") -> list[Effect]:
    """A submission arrives, is computed, and held by b."""
    effects = one.hear(sender, one.contribution(base or one.held, sequence))
    return held_by(one, "b", computed(one, effects, digest or f"d{one.held.epoch + 1}"))


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
    assert [effect.why for effect in effects] == ["a contribution to shard 0 is refused: a submission has the weight 1"]


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


def fetched(one: Any, epoch: int, counted: tuple[tuple[str, ContributionId], ...] = ()) -> list[Effect]:
    """A state of the same lineage, which c aggregates, comes from b and is taken."""
    one.hear("b", one.state(0, epoch, plan=Plan(tuple("abc"), tuple("cb")), counted=counted))
    return one.feed(Filled(0, one.version(epoch), f"d{epoch}"))


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


# -- failover, and two claims


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


def test_of_claims_on_a_later_version_the_greatest_is_remembered(peer: Any) -> None:
    """The order of arrival does not matter; at most as many claims are kept as commits."""
    a = running(peer, "a", commits_kept=16)
    a.hear("b", TakeOver(0, a.version(4), 4))
    a.hear("c", TakeOver(0, a.version(4), 3))
    a.hear("c", a.state(0, 4, plan=Plan(tuple("abc"), tuple("cb"))))
    a.feed(Filled(0, a.version(4), "d4"))
    assert (a.replica.logs[0].lead.term, a.replica.logs[0].lead.holder) == (4, "b")
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
