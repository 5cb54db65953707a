"""Asynchronous mode: a submission is a commit of its own, held by its successors before anybody relies on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.election import assign
from p2p_diloco.core.events import (
    Accept,
    Applied,
    Apply,
    Average,
    Averaged,
    Carry,
    Damaged,
    Delivered,
    Effect,
    Fill,
    Filled,
    Load,
    Merge,
    Release,
    Send,
    SendFailed,
)
from p2p_diloco.core.messages import (
    Commit,
    Contribution,
    Counted,
    Fetch,
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
from p2p_diloco.core.version import ContributionId, Version, model_version


def running(peer: Any, me: str = "c", succession: str = "cb", **rules: Any) -> Any:
    """A replica of an asynchronous run of a, b and c; c aggregates, b succeeds, and both are who would be elected."""
    assert assign("run", 0, (0,), dict.fromkeys("abc", 1.0))[0][:2] == ("c", "b")
    one = peer(me, group="abc", succession=succession, **{"mode": "async", "heartbeat_timeout": 10.0, **rules})
    if succession[0] == me:
        for other in sorted({*"abc"} - {me}):
            one.hear(other, Promise(0, one.held, 0))
    return one


def to(effects: list[Effect], peer: str, kind: type = object) -> list[Any]:
    """The messages of a kind that go to a peer."""
    return [e.message for e in effects if isinstance(e, Send) and e.to == peer and isinstance(e.message, kind)]


def joined_by(one: Any, peer: str) -> list[Effect]:
    """Another peer comes, and has nothing against this one's claim."""
    return [*one.meet(peer), *one.hear(peer, Promise(0, one.held, 0))]


def commits_to(effects: list[Effect], peer: str) -> list[Commit]:
    return to(effects, peer, Commit)


def averaged(one: Any, effects: list[Effect], digest: str = "new") -> list[Effect]:
    """The node's answer to the Average among the effects."""
    [average] = [e for e in effects if isinstance(e, Average)]
    return one.feed(Averaged(average.shard, average.base, digest, "mean"))


def average_in(effects: list[Effect]) -> Average:
    [average] = [e for e in effects if isinstance(e, Average)]
    return average


def held_by(one: Any, peer: str, effects: list[Effect]) -> list[Effect]:
    """The peer says that it holds what was proposed to it."""
    return one.hear(peer, Held(0, commits_to(effects, peer)[-1].version))


def submitted(one: Any, sender: str, sequence: int = 1, base: Version | None = None, digest: str = "") -> list[Effect]:
    """Somebody's submission comes, is computed, and held by b."""
    effects = one.hear(sender, one.contribution(base or one.held, sequence))
    return held_by(one, "b", averaged(one, effects, digest or f"d{one.held.epoch + 1}"))


# -- a submission


def test_a_commit_is_held_by_the_successor_before_anybody_sees_it(peer: Any) -> None:
    """Computed, a submission goes to the successor alone; when that holds it, it is accepted and answered."""
    c = running(peer)
    effects = c.hear("a", c.contribution(c.held))
    assert c.averages(effects) == [["a"]]
    effects = averaged(c, effects)
    assert [type(e) for e in effects] == [Send]
    assert effects[0].to == "b"
    commit = effects[0].message
    assert commit.contributions == (Counted("a", ContributionId(1, 1), 1.0, 5),)
    assert c.held == c.version(1), "nobody could fetch it yet"
    effects = c.hear("b", Held(0, commit.version))
    assert effects[0] == Accept(((0, "new"),))
    assert commits_to(effects, "a") == [commit]
    assert commits_to(effects, "b") == []
    assert c.held == commit.version == Version(0, 15, 2, "new")


def test_without_successors_a_commit_is_one_at_once(peer: Any) -> None:
    """successors=0: acknowledged means held by the aggregator."""
    c = running(peer, succession="c", successors=0)
    effects = averaged(c, c.hear("a", c.contribution(c.held)))
    assert effects[0] == Accept(((0, "new"),))
    assert len(commits_to(effects, "a")) == 1


def test_each_submission_is_an_epoch_in_the_order_in_which_they_came(peer: Any) -> None:
    """Nobody is averaged with anybody; what comes while a commit is under way waits for it."""
    c = running(peer)
    effects = c.hear("b", c.contribution(c.held, 7))
    assert c.hear("a", c.contribution(c.held, 3)) == []
    effects = held_by(c, "b", averaged(c, effects, "d2"))
    assert c.averages(effects) == [["a"]]
    held_by(c, "b", averaged(c, effects, "d3"))
    assert c.held == Version(0, 20, 3, "d3")
    assert dict(c.replica.state(0).counted) == {"a": ContributionId(1, 3), "b": ContributionId(1, 7)}


def test_a_submission_on_an_earlier_version_counts(peer: Any) -> None:
    """Its author is answered with the commits since its base, in order."""
    c = running(peer)
    base = c.held
    submitted(c, "b", 1)
    effects = submitted(c, "a", 1, base=base)
    assert c.held.epoch == 3
    assert [commit.base.epoch for commit in commits_to(effects, "a")] == [1, 2]


def test_who_is_far_behind_is_answered_with_the_state(peer: Any) -> None:
    """More commits than a state's bytes are worth are not kept."""
    c = running(peer)
    base = c.held
    for sequence in range(1, 6):
        submitted(c, "b", sequence)
    effects = submitted(c, "a", 1, base=base)
    assert to(effects, "a", State) == [c.replica.state(0)]
    assert commits_to(effects, "a") == []


def test_who_computes_unlike_the_others_is_answered_with_the_state(peer: Any) -> None:
    """A commit would lead it elsewhere."""
    c = running(peer)
    c.meet("a", unlike=True)
    effects = submitted(c, "a")
    assert (to(effects, "a", State), commits_to(effects, "a")) == ([c.replica.state(0)], [])


def test_a_submitter_that_holds_the_commit_is_not_sent_it_again(peer: Any) -> None:
    """A successor's own submission is answered by the proposal."""
    assert commits_to(submitted(running(peer), "b"), "b") == []


def test_an_answer_that_did_not_arrive_goes_out_again(peer: Any) -> None:
    """As the newest state, at the next interval; a few times: then the submitter has to ask."""
    c = running(peer)
    [answer] = commits_to(submitted(c, "a"), "a")
    for _ in range(c.rules.resends):
        c.feed(SendFailed("a", answer, gone=False))
        assert to(c.pass_time(1.1), "a", State) == [c.replica.state(0)]
    c.feed(SendFailed("a", answer, gone=False))
    assert to(c.pass_time(1.1), "a", State) == []


def test_who_does_not_aggregate_tells_who_does(peer: Any) -> None:
    """A submission that comes to a successor, however often: it says who has the claim, and sends the commits since its
    base. It keeps only what stands on the present version, which it will have to count should it take over now."""
    b = running(peer, "b")
    base = b.held
    for epoch in (1, 2):
        commit = next_commit(b, epoch=epoch)
        b.hear("c", commit)
        b.feed(Applied(0, commit.base, commit.version.digest))
    for _ in range(2):
        effects = b.hear("a", b.contribution(base, 5))
        assert [commit.version.epoch for commit in commits_to(effects, "a")] == [2, 3]
        assert to(effects, "a", Outdated) == [Outdated(0, b.held, 0, "c")]
        assert b.replica.logs[0].round.inbox == {}
    for _ in range(2):
        assert to(b.hear("a", b.contribution(b.held, 5)), "a") == [Outdated(0, b.held, 0, "c")]
        assert list(b.replica.logs[0].round.inbox) == ["a"]


def test_what_was_fetched_is_answered_with_as_a_whole(peer: Any) -> None:
    """Commits from before don't lead there."""
    c = running(peer)
    base = c.held
    submitted(c, "a", 1)
    c.hear("b", c.state(0, 9, plan=Plan(tuple("abc"), tuple("cb")), counted=(("a", ContributionId(1, 1)),)))
    c.feed(Filled(0, c.version(9), "d9"))
    effects = c.hear("a", c.contribution(base, 1))
    assert (commits_to(effects, "a"), to(effects, "a", State)) == ([], [c.replica.state(0)])


def test_a_submission_counts_once(peer: Any) -> None:
    """Sent again while it is under way nothing follows; afterwards it is answered again."""
    c = running(peer)
    contribution = c.contribution(c.held)
    effects = averaged(c, c.hear("a", contribution))
    assert c.hear("a", contribution) == []
    held_by(c, "b", effects)
    effects = c.hear("a", contribution)
    assert c.averages(effects) == []
    assert len(commits_to(effects, "a")) == 1
    assert c.held.samples == 15


def test_what_is_counted_in_part_is_not_counted_again(peer: Any) -> None:
    """The second submission contains the first, which is counted: it is answered, and its author drops it."""
    c = running(peer)
    submitted(c, "a", 1)
    second = replace(c.contribution(c.held, 2), oldest=ContributionId(1, 1))
    effects = c.hear("a", second)
    assert c.averages(effects) == []
    assert len(to(effects, "a", State)) == 1


def test_submissions_weigh_alike(peer: Any) -> None:
    """Whatever weight they claim: each counts one."""
    c = running(peer)
    effects = c.hear("a", replace(c.contribution(c.held), weight=250.0))
    assert [contribution.weight for _, contribution in effects[-1].contributions] == [1.0]


def test_the_floor_counts_who_is_there(peer: Any) -> None:
    """With fewer live workers than min_peers nothing is committed; when they come, what waited is. Also if they are
    idle."""
    c = running(peer, min_peers=3)
    c.lose("a")
    assert c.averages(c.hear("b", c.contribution(c.held))) == []
    assert c.averages(c.meet("a", idle=True)) == [["b"]]


def test_the_first_outer_step_waits_for_start_peers(peer: Any) -> None:
    """As long as nothing is counted."""
    c = running(peer, start_peers=4)
    effects = c.hear("a", c.contribution(c.held))
    assert c.averages(effects) == []
    effects = joined_by(c, "d")
    assert c.averages(effects) == [["a"]]
    held_by(c, "b", averaged(c, effects))
    c.lose("d")
    assert c.averages(c.hear("b", c.contribution(c.held))) == [["b"]]


@pytest.mark.parametrize(
    "base",
    [
        pytest.param(Version(0, 10, 1, "other"), id="of another lineage"),
        pytest.param(Version(0, 0, 0, "other"), id="of another beginning"),
        pytest.param(Version(3, 10, 1, "d1"), id="of another generation"),
        pytest.param(Version(0, 10**9, 10**6, "far"), id="that nobody has"),
        pytest.param(Version(0, 10**9, 0, "d0"), id="of the past, with samples of the future"),
    ],
)
def test_a_wrong_base_harms_nobody(peer: Any, base: Version) -> None:
    """What claims to stand on it is never averaged; others' submissions are, and its author's next right one."""
    c = running(peer)
    assert c.averages(c.hear("a", c.contribution(base, 1))) == []
    for sequence in range(2, 5):
        submitted(c, "b", sequence)
        submitted(c, "a", sequence)
    assert c.held == c.version(7, samples=10 + 6 * 5)
    assert dict(c.replica.state(0).counted)["a"] == ContributionId(1, 4)


def test_a_submission_of_a_lineage_that_was_left_is_not_counted(peer: Any) -> None:
    """It waited for its window when the aggregator joined another lineage; its author will carry it over."""
    c = running(peer, async_grace=5.0)
    assert c.averages(c.hear("a", c.contribution(c.held))) == []
    other = Version(0, 70, 6, "x6")
    state = State(0, other, 0, Plan(tuple("abc"), tuple("cb")), {}, {0: "d0", 6: "x6"})
    assert to(c.replica.logs[0].adopt(state, c.now), "a", State) == [], "it could not take it yet"
    for one in "ab":
        c.hear(one, Promise(0, other, 0))
    assert c.averages(c.pass_time(6.0)) == []
    assert c.averages([*c.hear("a", c.contribution(other, 2)), *c.pass_time(6.0)]) == [["a"]]


# -- staleness


def test_a_stale_submission_is_refused_and_told_so(peer: Any) -> None:
    """Staleness is the epoch now less the epoch of its base; as far behind as max_staleness is still good."""
    c = running(peer, max_staleness=1)
    base = c.held
    submitted(c, "b", 1)
    submitted(c, "a", 1, base=base)
    effects = c.hear("a", c.contribution(base, 2))
    assert c.averages(effects) == []
    assert to(effects, "a", Stale) == [Stale(0, ContributionId(1, 2), c.held)]
    assert to(effects, "a", Commit), "what is newer comes beside"
    assert not to(effects, "b")


def test_a_joiners_staleness_starts_from_what_it_adopted(peer: Any) -> None:
    """It trains on what it has fetched; however old the run is, its first submission is as far behind as the run has
    gone on since."""
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


def refused(one: Any, sequence: int, epoch: int) -> list[Effect]:
    """The aggregator refuses the replica's submission at an epoch, and sends what it holds."""
    held = one.version(epoch)
    one.hear("c", one.state(0, epoch, plan=Plan(tuple("abc"), tuple("cb"))))
    effects = one.feed(Filled(0, held, held.digest))
    id = ContributionId(one.replica.own.incarnation, sequence)
    return [*effects, *one.hear("c", Stale(0, id, held))]


def test_a_refused_submission_is_carried_once_with_its_oldest_base(peer: Any) -> None:
    """The next one contains it and says so by its base; refused again, it is dropped, and a new one begins."""
    a = running(peer, "a", max_staleness=2)
    [first] = to(a.contribute(), "c", Contribution)
    assert first.base == a.version(1)
    assert Release(sent=True) in refused(a, 1, 5)
    [load] = a.feed(Merge())
    assert [one.carry for one in load.shards] == [Carry.KEEP]
    [second] = to(a.contribute(), "c", Contribution)
    assert (second.base, second.oldest) == (a.version(1), first.id)
    refused(a, 2, 9)
    [load] = a.feed(Merge())
    assert [one.carry for one in load.shards] == [Carry.DROP]
    [third] = to(a.contribute(), "c", Contribution)
    assert (third.base, third.oldest) == (a.version(9), third.id)


def test_what_was_refused_stays_as_old_as_it_was_said_to_be(peer: Any) -> None:
    """Also if it began on a lineage that was left: then it counts from where it was first sent on this one."""
    a = running(peer, "a", max_staleness=2)
    a.contribute()
    other = Version(0, 70, 6, "x6")
    a.replica.logs[0].adopt(State(0, other, 0, Plan(tuple("abc"), tuple("cb")), {}, {0: "d0", 6: "x6"}), a.now)
    a.feed(Merge())
    [second] = to(a.contribute(), "c", Contribution)
    assert second.base == other
    later = Version(0, 99, 9, "x9")
    state = State(0, later, 0, Plan(tuple("abc"), tuple("cb")), {}, {0: "d0", 6: "x6", 9: "x9"})
    a.hear("c", state)
    a.feed(Filled(0, later, "x9"))
    a.hear("c", Stale(0, second.id, later))
    [third] = to(a.contribute(), "c", Contribution)
    assert (third.base, third.id > second.id) == (other, True)


def test_what_is_refused_again_is_dropped_though_nobody_has_gone_on(peer: Any) -> None:
    """Else it would be refused for ever, and where all have been refused no commit would come any more."""
    a = running(peer, "a", max_staleness=2)
    a.contribute()
    refused(a, 1, 5)
    a.feed(Merge())
    [second] = to(a.contribute(), "c", Contribution)
    assert Release(sent=True) in a.hear("c", Stale(0, second.id, a.held))
    [load] = a.feed(Merge())
    assert [(one.version, one.carry) for one in load.shards] == [(a.held, Carry.DROP)]
    [third] = to(a.contribute(), "c", Contribution)
    assert (third.base, third.oldest) == (a.held, third.id)


def test_a_refusal_of_an_earlier_submission_ends_nothing(peer: Any) -> None:
    """It comes late, or twice."""
    a = running(peer, "a", max_staleness=2)
    a.contribute()
    refused(a, 1, 5)
    a.feed(Merge())
    a.contribute()
    earlier = ContributionId(a.replica.own.incarnation, 1)
    assert Release(sent=True) not in a.hear("c", Stale(0, earlier, a.held))


def test_a_refusal_alone_ends_nothing(peer: Any) -> None:
    """The exchange is over when what is newer has come, too: otherwise the next submission would be as stale."""
    a = running(peer, "a", max_staleness=2)
    a.contribute()
    id = ContributionId(a.replica.own.incarnation, 1)
    assert a.hear("c", Stale(0, id, a.version(5))) == []
    a.hear("c", a.state(0, 5, plan=Plan(tuple("abc"), tuple("cb"))))
    assert Release(sent=True) in a.feed(Filled(0, a.version(5), "d5"))


# -- grace windows and the Delayed Nesterov buffer


def test_a_window_averages_what_comes_within_grace(peer: Any) -> None:
    """It opens with the first submission, and ends when time is up; the commit counts all that came."""
    c = running(peer, async_grace=0.5)
    assert c.hear("b", c.contribution(c.held)) == []
    assert c.replica.next_wakeup() == c.now + 0.5
    assert c.hear("a", c.contribution(c.held), after=0.3) == []
    effects = c.pass_time(0.25)
    assert c.averages(effects) == [["a", "b"]]


def test_a_window_closes_early_when_everybody_has_submitted(peer: Any) -> None:
    """Every live worker that is not idle."""
    c = running(peer, async_grace=5.0)
    c.meet("b", idle=True)
    c.hear("a", c.contribution(c.held))
    assert c.averages(c.contribute()) == [["a", "c"]]


def test_a_window_closes_early_when_the_missing_have_died(peer: Any) -> None:
    """Nobody waits for the dead."""
    c = running(peer, async_grace=50.0)
    c.hear("b", c.contribution(c.held))
    assert c.averages(c.contribute()) == []
    assert c.averages(c.lose("a")) == [["b", "c"]]


def test_the_submission_that_fills_the_buffer_closes_the_window(peer: Any) -> None:
    """And a window never goes beyond it: what came later begins the next buffer."""
    c = running(peer, async_grace=5.0, dn_buffer_size=2)
    c.hear("b", c.contribution(c.held))
    effects = c.hear("a", c.contribution(c.held))
    assert c.averages(effects) == [["a", "b"]]
    assert effects[-1].buffered == 0
    c.contribute()
    held_by(c, "b", averaged(c, effects, "d2"))
    assert c.replica.state(0).buffered == 0
    assert c.averages(c.pass_time(5.5)) == [["c"]]


def test_the_buffer_fills_with_each_submission_and_is_part_of_the_state(peer: Any) -> None:
    """Its count is covered by the digest, told to whoever computes the step, and goes out with a state."""
    c = running(peer, dn_buffer_size=3)
    fills = []
    for sequence in range(1, 6):
        effects = c.hear("a", c.contribution(c.held, sequence))
        fills.append((effects[-1].buffered, effects[-1].meta))
        held_by(c, "b", averaged(c, effects, f"d{sequence + 1}"))
        state = c.replica.state(0)
        assert meta_of(state) == fills[-1][1]
        assert meta_of(state) == meta_of(replace(state, payload="any"))
        assert state.buffered == 0 or meta_of(state) != meta_of(replace(state, buffered=0))
    assert [fill for fill, _ in fills] == [0, 1, 2, 0, 1]


def test_a_fetched_state_brings_its_buffer(peer: Any) -> None:
    """Who succeeds goes on where the buffer stands."""
    a = running(peer, "a", dn_buffer_size=3)
    state = replace(a.state(0, 4), buffered=2)
    effects = a.hear("c", state)
    assert [e.meta for e in effects if isinstance(e, Fill)] == [meta_of(state)]
    a.feed(Filled(0, a.version(4), "d4"))
    assert a.replica.state(0).buffered == 2


# -- successors


def next_commit(one: Any, *, epoch: int = 1, term: int = 0, by: str = "c", plan: Plan | None = None) -> Commit:
    base, then = one.version(epoch), plan or Plan(tuple("abc"), tuple("cb"))
    counted = Counted("a", ContributionId(1, epoch), 1.0, 10)
    return Commit(0, base, one.version(epoch + 1), term, by, (counted,), then, "mean")


def test_a_successor_says_that_it_holds_a_commit_once_it_has_applied_it(peer: Any) -> None:
    """Not when it has come."""
    b = running(peer, "b")
    commit = next_commit(b)
    effects = b.hear("c", commit)
    assert [type(e) for e in effects] == [Apply]
    effects = b.feed(Applied(0, commit.base, commit.version.digest))
    assert to(effects, "c", Held) == [Held(0, commit.version)]
    assert isinstance(effects[0], Accept)


def test_who_is_not_named_says_nothing(peer: Any) -> None:
    """The commit is the answer to what it has submitted."""
    a = running(peer, "a")
    commit = next_commit(a)
    a.hear("c", commit)
    assert to(a.feed(Applied(0, commit.base, commit.version.digest)), "c", Held) == []


def test_a_successor_that_is_asked_again_says_so_again(peer: Any) -> None:
    """The aggregator has not heard it; the successor has gone no further, for nothing is accepted without it."""
    b = running(peer, "b")
    commit = next_commit(b)
    b.hear("c", commit)
    b.feed(Applied(0, commit.base, commit.version.digest))
    assert b.hear("c", commit) == [Send("c", Held(0, commit.version))]


def test_who_must_hold_a_commit_is_watched(peer: Any) -> None:
    """So that its death shows as soon as that of anybody who is waited for."""
    c = running(peer)
    assert "b" not in c.replica.logs[0].watched()
    averaged(c, c.hear("a", c.contribution(c.held)))
    assert "b" in c.replica.logs[0].watched()


def test_a_word_that_is_not_true_any_more_is_not_said_again(peer: Any) -> None:
    """The successor has gone on: its aggregator has heard of it by other ways."""
    b = running(peer, "b")
    for epoch in (1, 2):
        commit = next_commit(b, epoch=epoch)
        b.hear("c", commit)
        b.feed(Applied(0, commit.base, commit.version.digest))
        if epoch == 1:
            b.feed(SendFailed("c", Held(0, commit.version), gone=False))
    assert to(b.pass_time(1.1), "c", Held) == []


def test_changed_memory_is_mended_by_those_that_the_plan_names(peer: Any) -> None:
    """The others are behind, as a rule."""
    b = running(peer, "b")
    assert [e.to for e in b.feed(Damaged(0, b.held)) if isinstance(e, Send)] == ["c"]
    assert b.replica.logs[0].donors() == ["c"]
    b.lose("c")
    assert b.replica.logs[0].donors() == ["a"], "unless none of them lives"


def test_what_nobody_has_as_it_was_is_committed_without_waiting(peer: Any) -> None:
    """A commit of changed memory has a base that nobody could be given; its successors fetch what it made."""
    c = running(peer)
    for one in "ab":
        c.lose(one)
    [average] = [e for e in [*c.feed(Damaged(0, c.held)), *c.pass_time(1.1)] if isinstance(e, Average)]
    c.meet("b")
    assert c.feed(Averaged(0, average.base, "true", "mean"))[0] == Accept(((0, "true"),))


def test_a_word_that_did_not_arrive_is_said_again(peer: Any) -> None:
    """At the next interval, while it is true."""
    b = running(peer, "b")
    commit = next_commit(b)
    b.hear("c", commit)
    b.feed(Applied(0, commit.base, commit.version.digest))
    b.feed(SendFailed("c", Held(0, commit.version), gone=False))
    assert to(b.pass_time(1.1), "c", Held) == [Held(0, commit.version)]


def test_a_successor_that_has_missed_something_asks_for_it_at_once(peer: Any) -> None:
    """Its aggregator waits for it."""
    b = running(peer, "b")
    effects = b.hear("c", next_commit(b, epoch=4))
    assert to(effects, "c", Fetch) == [Fetch((b.version(1),), shards=(0,))]
    b.hear("c", b.state(0, 4, plan=Plan(tuple("abc"), tuple("cb"))))
    effects = b.feed(Filled(0, b.version(4), "d4"))
    assert [type(e) for e in effects if isinstance(e, Apply)] == [Apply]


def test_a_submitter_that_has_missed_something_asks_the_aggregator(peer: Any) -> None:
    """Its answer stands on commits that it has not got; what others pass on is no answer."""
    a = running(peer, "a")
    assert to(a.hear("b", next_commit(a, epoch=4)), "b", Fetch) == []
    assert to(a.hear("c", next_commit(a, epoch=4)), "c", Fetch) == [Fetch((a.version(1),), shards=(0,))]


def test_an_aggregator_that_is_behind_is_told_so(peer: Any) -> None:
    """By those that its commit names: they have gone on without it."""
    a, b = running(peer, "a"), running(peer, "b")
    for one in (a, b):
        for epoch in (1, 2):
            commit = next_commit(one, epoch=epoch)
            one.hear("c", commit)
            one.feed(Applied(0, commit.base, commit.version.digest))
    old = replace(next_commit(b), version=b.version(2, "other"))
    assert [commit.version.epoch for commit in commits_to(b.hear("c", old), "c")] == [2, 3]
    assert to(a.hear("c", old), "c") == []


def test_a_successor_whose_memory_changed_mends_it_and_then_holds_the_commit(peer: Any) -> None:
    """Its aggregator waits for it, and has nothing newer: the base is fetched anew, and the commit applied again."""
    b = running(peer, "b")
    commit = next_commit(b)
    b.hear("c", commit)
    effects = b.feed(Applied(0, commit.base, "astray"))
    assert to(effects, "c", Fetch) == [Fetch((None,))]
    b.hear("c", b.state(0, 1))
    assert [e.commit for e in b.feed(Filled(0, b.held, "d1")) if isinstance(e, Apply)] == [commit]
    assert to(b.feed(Applied(0, commit.base, commit.version.digest)), "c", Held) == [Held(0, commit.version)]


def test_what_was_proposed_of_changed_memory_is_computed_again_and_nothing_else(peer: Any) -> None:
    """Somebody may hold it already; so it is made once more as it was, though by now another plan would be made."""
    c = running(peer)
    first = average_in(c.hear("a", c.contribution(c.held)))
    c.feed(Averaged(0, first.base, "d2", "mean"))
    c.feed(Damaged(0, c.held))
    c.meet("a", idle=True)
    c.hear("b", c.state(0, 1))
    assert average_in(c.feed(Filled(0, c.held, "d1"))) == first


def test_its_own_proposal_takes_an_aggregator_nowhere(peer: Any) -> None:
    """A successor that passes it on, having accepted it, does not end the waiting for those who must hold it."""
    c = running(peer, successors=2, succession="cba")
    [proposal] = commits_to(averaged(c, c.contribute()), "b")
    assert not any(isinstance(e, Apply) for e in c.hear("b", proposal))
    assert c.hear("b", Held(0, proposal.version)) == []
    assert Release(sent=True) in c.hear("a", Held(0, proposal.version))


def test_a_proposal_goes_out_again(peer: Any) -> None:
    """At once if it did not arrive, in a while if no word of it comes back."""
    c = running(peer)
    effects = averaged(c, c.hear("a", c.contribution(c.held)))
    [proposal] = commits_to(effects, "b")
    c.feed(SendFailed("b", proposal, gone=False))
    assert commits_to(c.pass_time(1.1), "b") == [proposal]
    c.feed(Delivered("b", proposal))
    assert commits_to(c.pass_time(9.0), "b") == []
    assert commits_to(c.pass_time(2.0), "b") == [proposal]


def test_a_successor_that_dies_is_replaced_before_the_answer(peer: Any) -> None:
    """The proposal becomes a commit without it; another peer is named by a commit of its own, and the submitter is
    answered once that one holds it: no single death after the answer loses what was answered for."""
    c = running(peer)
    joined_by(c, "d")
    [proposal] = commits_to(averaged(c, c.hear("a", c.contribution(c.held)), "d2"), "b")
    effects = c.lose("b")
    assert Accept(((0, "d2"),)) in effects
    assert average_in(effects).contributions == ()
    assert not to(effects, "a", Commit)
    effects = averaged(c, effects, "d3")
    [named] = commits_to(effects, "d")
    assert named.plan.succession == ("c", "d")
    assert not to(effects, "a", Commit)
    assert commits_to(held_by(c, "d", effects), "a") == [proposal, named]


def test_a_successor_that_began_anew_from_nothing_is_replaced(peer: Any) -> None:
    """It could hold a commit only after it has fetched the whole model: nobody waits for that, and another is named."""
    c = running(peer)
    joined_by(c, "d")
    averaged(c, c.hear("a", c.contribution(c.held)), "d2")
    effects = c.meet("b", incarnation=9, **c.blank())
    assert Accept(((0, "d2"),)) in effects
    [named] = commits_to(averaged(c, effects, "d3"), "d")
    assert named.plan.succession == ("c", "d")
    assert Accept(((0, "d3"),)) in c.hear("d", Held(0, named.version)), "b need not hold what names another"


@pytest.mark.parametrize("says", [{"eligible": False}, {"unlike": True}])
def test_who_could_not_hold_or_lead_is_not_named(peer: Any, says: dict[str, bool]) -> None:
    """Nobody could reach it, or it computes otherwise: another is named, whoever is elected."""
    first, second = (p for p in assign("run", 0, (0,), dict.fromkeys("acd", 1.0))[0] if p != "c")
    c = running(peer)
    joined_by(c, "d")
    c.meet(first, **says)
    effects = c.lose("b")
    [named] = commits_to(averaged(c, effects, "d2"), second)
    assert named.plan.succession == ("c", second)


def test_a_lone_survivor_goes_on(peer: Any) -> None:
    """Where nobody can be named, the aggregator alone holds what it answers for."""
    c = running(peer)
    c.lose("a")
    c.lose("b")
    effects = averaged(c, c.contribute())
    assert effects[0] == Accept(((0, "new"),))
    assert c.replica.state(0).plan.succession == ("c", "b"), "b is named again should it come back"


def test_one_that_computes_otherwise_is_not_waited_for(peer: Any) -> None:
    """It could never hold what the others compute."""
    c = running(peer)
    averaged(c, c.hear("a", c.contribution(c.held)), "d2")
    c.meet("b", unlike=True)
    assert c.held == c.version(1)
    c.pass_time(1.1)
    assert c.held.epoch == 2


# -- handing over


def test_a_shard_is_handed_over_to_who_holds_it_already(peer: Any) -> None:
    """The elected one is named a successor first; then the old aggregator's last commit names it."""
    a = running(peer, "a", succession="ab")
    effects = a.pass_time(9.0)
    assert a.averages(effects) == [], "a shard stays for a while"
    effects = a.pass_time(2.0)
    first = next(e for e in effects if isinstance(e, Average))
    effects = a.feed(Averaged(0, first.base, "d2", "mean"))
    assert [c.plan.succession for c in commits_to(effects, "c")] == [("a", "c")]
    assert commits_to(effects, "b") == commits_to(effects, "c"), "who was named has to hold it, too"
    a.hear("b", Held(0, commits_to(effects, "b")[0].version))
    effects = held_by(a, "c", effects)
    assert average_in(effects).contributions == ()
    effects = averaged(a, effects, "d3")
    [last] = commits_to(effects, "c")
    assert last.plan.succession == ("c", "a")
    held_by(a, "c", effects)
    assert a.replica.aggregates() == ()
    assert a.replica.logs[0].assigned is None, "should it come back, it stays for a while again"
    [contribution] = to(a.contribute(), "c", Contribution)
    assert contribution.base == last.version


def test_who_has_taken_over_keeps_the_shard_for_a_while(peer: Any) -> None:
    """Though another one is elected: nothing is handed over while the dead may be back."""
    a = running(peer, "a", succession="cab", successors=2)
    a.lose("c")
    a.hear("b", Promise(0, a.held, 1))
    [commit] = commits_to(averaged(a, a.contribute()), "b")
    assert commit.plan.succession[0] == "a"


def test_what_comes_too_late_for_the_old_aggregator_goes_to_the_new_one(peer: Any) -> None:
    """A submission that waited behind the last commit is not lost: its author is told, and sends it on."""
    a = running(peer, "a", succession="ac", successors=1)
    a.pass_time(9.5)
    effects = a.pass_time(2.0)
    last = next(e for e in effects if isinstance(e, Average))
    assert a.hear("b", a.contribution(a.held)) == []
    effects = a.feed(Averaged(0, last.base, "d2", "mean"))
    effects = held_by(a, "c", effects)
    assert [commit.plan.succession for commit in commits_to(effects, "b")] == [("c", "a")]
    b = running(peer, "b", succession="ac")
    b.contribute()
    commit = commits_to(effects, "b")[0]
    b.hear("a", commit)
    effects = b.feed(Applied(0, commit.base, commit.version.digest))
    assert len(to(effects, "c", Contribution)) == 1


def test_the_new_aggregator_may_be_faster_than_its_word(peer: Any) -> None:
    """Its own next commit shows that it holds the last one of the old aggregator."""
    a = running(peer, "a", succession="ac")
    effects = a.pass_time(11.0)
    last = next(e for e in effects if isinstance(e, Average))
    effects = a.feed(Averaged(0, last.base, "d2", "mean"))
    [handed] = commits_to(effects, "c")
    base = handed.version
    commit = Commit(0, base, Version(0, 15, 3, "d3"), 0, "c", (), Plan(tuple("abc"), tuple("ca")), "mean")
    effects = a.hear("c", commit)
    assert effects[0] == Accept(((0, "d2"),))
    assert [e.commit for e in effects if isinstance(e, Apply)] == [commit]


# -- failover, and two who believe


def test_a_successor_goes_on_from_the_last_commit_it_holds(peer: Any) -> None:
    """It claims the next term, asks everybody alive, counts what was not counted, and answers for what was."""
    b = running(peer, "b", dn_buffer_size=4)
    commit = next_commit(b)
    b.hear("c", commit)
    b.feed(Applied(0, commit.base, commit.version.digest))
    effects = b.lose("c")
    assert to(effects, "a", TakeOver) == [TakeOver(0, commit.version, 1)]
    again = replace(b.contribution(b.version(1), 1), samples=10)
    assert len(commits_to(b.hear("a", again), "a")) == 1
    b.hear("a", b.contribution(commit.version, 2))
    effects = b.hear("a", Promise(0, commit.version, 1))
    assert b.averages(effects) == [["a"]]
    assert effects[-1].buffered == 1


def test_the_lower_of_two_claims_can_not_acknowledge(peer: Any) -> None:
    """What it has proposed is refused by its own successor; it yields, and hands its submission to the other."""
    c = running(peer)
    effects = averaged(c, c.contribute())
    [proposal] = commits_to(effects, "b")
    b = running(peer, "b")
    b.lose("c")
    b.hear("a", b.contribution(b.held))
    b.hear("a", Promise(0, b.held, 1))
    assert not to(b.hear("c", proposal), "c", Held)
    assert not to(b.feed(Averaged(0, b.held, "b2", "mean")), "c", Held)
    effects = c.hear("b", Outdated(0, c.held, 1, "b"))
    assert not any(isinstance(e, Accept) for e in effects)
    assert len(to(effects, "b", Contribution)) == 1
    assert c.hear("b", Held(0, proposal.version)) == [], "it is no proposal any more"
    assert c.held == c.version(1)


def test_a_claim_on_what_is_not_reached_yet_is_remembered(peer: Any) -> None:
    """Who promised while it was behind refuses the old aggregator's commit once it has caught up."""
    a = running(peer, "a")
    effects = a.hear("b", TakeOver(0, a.version(4), 1))
    assert to(effects, "b", Promise) == [Promise(0, a.version(4), 1)]
    a.hear("c", a.state(0, 4, plan=Plan(tuple("abc"), tuple("cb"))))
    a.feed(Filled(0, a.version(4), "d4"))
    effects = a.hear("c", next_commit(a, epoch=4))
    assert to(effects, "c") == [Outdated(0, a.version(4), 1, "b")]


def test_of_claims_on_what_is_not_reached_yet_the_greatest_is_remembered(peer: Any) -> None:
    """Whichever came last; and no more of them than of commits."""
    a = running(peer, "a", commits_kept=16)
    a.hear("b", TakeOver(0, a.version(4), 2))
    a.hear("c", TakeOver(0, a.version(4), 1))
    a.hear("c", a.state(0, 4, plan=Plan(tuple("abc"), tuple("cb"))))
    a.feed(Filled(0, a.version(4), "d4"))
    assert (a.replica.logs[0].lead.term, a.replica.logs[0].lead.holder) == (2, "b")
    for epoch in range(10, 60):
        a.hear("b", TakeOver(0, a.version(epoch), 1))
    assert {v.epoch for v in a.replica.logs[0].claims} == {*range(60 - a.rules.commits_kept, 60)}


def test_who_has_forgotten_its_own_claim_asks_anew(peer: Any) -> None:
    """It left the lineage and came back: then it sends to the plan's aggregator, which has promised to it. Told so, it
    commits when it has promises, and not before."""
    b = running(peer, "b")
    assert [e.to for e in b.contribute() if isinstance(e, Send)] == ["c"]
    assert b.averages(b.hear("c", Outdated(0, b.held, 1, "b"))) == []
    effects = b.pass_time(1.1)
    assert [to(effects, p, TakeOver) for p in "ac"] == [[TakeOver(0, b.held, 1)]] * 2
    assert b.averages(b.hear("a", Promise(0, b.held, 1))) == []
    assert b.averages(b.hear("c", Promise(0, b.held, 1))) == [["b"]]


def test_what_an_earlier_life_proposed_and_somebody_holds_is_the_commit(peer: Any) -> None:
    """An aggregator that was restarted takes it, rather than insisting on another one."""
    c = running(peer)
    averaged(c, c.hear("a", c.contribution(c.held)), "mine")
    held = replace(next_commit(c), contributions=())
    effects = c.hear("b", held)
    assert [e.commit for e in effects if isinstance(e, Apply)] == [held]


def test_who_starts_from_a_disk_asks_before_it_commits(peer: Any) -> None:
    """The plan that it has may be an old one: nothing is committed until all that it names have promised or are
    found dead."""
    c = peer("c", group="abc", succession="cb", mode="async", live="a")
    assert c.averages(c.contribute()) == []
    c.hear("a", Promise(0, c.held, 0))
    assert c.averages(c.meet("b")) == []
    assert c.averages(c.hear("b", Promise(0, c.held, 0))) == [["c"]]


def test_who_has_fetched_a_state_asks_before_it_commits(peer: Any) -> None:
    """Though the plan that came with it names this peer: the donor may be behind, and the others have gone on since,
    with what this peer committed in an earlier life."""
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


# -- the submitter


def test_an_exchange_ends_when_the_submission_is_counted(peer: Any) -> None:
    """Newer states that don't count it end nothing; training merges nothing meanwhile."""
    a = running(peer, "a")
    a.contribute()
    other = replace(next_commit(a), contributions=(Counted("b", ContributionId(1, 1), 1.0, 10),))
    a.hear("c", other)
    assert Release(sent=True) not in a.feed(Applied(0, other.base, other.version.digest))
    id = ContributionId(a.replica.own.incarnation, 1)
    mine = replace(next_commit(a, epoch=2), contributions=(Counted("a", id, 1.0, 10),))
    a.hear("c", mine)
    assert Release(sent=True) in a.feed(Applied(0, mine.base, mine.version.digest))
    [load] = a.feed(Merge())
    assert [(one.version, one.carry) for one in load.shards] == [(mine.version, Carry.SUBTRACT)]


def test_between_exchanges_the_base_stays(peer: Any) -> None:
    """A replica that is also a successor moves with every commit; its trainer does not, or its next submission would
    seem less stale than it is."""
    b = running(peer, "b")
    b.feed(Merge())
    commit = next_commit(b)
    b.hear("c", commit)
    b.feed(Applied(0, commit.base, commit.version.digest))
    assert b.feed(Merge()) == [Load((), (0,))]
    [contribution] = to(b.contribute(), "c", Contribution)
    assert contribution.base == b.version(1)


def test_another_lineage_ends_the_exchange_and_is_merged(peer: Any) -> None:
    """What was submitted on a lineage that is left can't be counted; its progress is carried."""
    a = running(peer, "a")
    a.contribute()
    log = a.replica.logs[0]
    other = Version(0, 70, 6, "x6")
    log.adopt(State(0, other, 0, Plan(tuple("abc"), tuple("cb")), {}, {0: "d0", 6: "x6"}), a.now)
    assert Release(sent=True) in a.feed(Merge())
    [load] = a.feed(Merge())
    assert [(one.version, one.carry) for one in load.shards] == [(other, Carry.KEEP)]


def test_an_answer_that_stays_out_is_asked_for_again_ever_more_rarely(peer: Any) -> None:
    """The submission itself is sent again; it counts once."""
    a = running(peer, "a")
    [contribution] = to(a.contribute(), "c", Contribution)
    a.feed(Delivered("c", contribution))
    assert to(a.pass_time(9.0), "c", Contribution) == []
    assert to(a.pass_time(2.0), "c", Contribution) == [contribution]
    a.feed(Delivered("c", contribution))
    assert to(a.pass_time(18.0), "c", Contribution) == []
    assert to(a.pass_time(3.0), "c", Contribution) == [contribution]


def test_fragments_take_turns(peer: Any) -> None:
    """Epochs say nothing of what a peer has to send."""
    c = running(peer, "c", succession="c", successors=0, fragments=((0,), (1,)))
    for other in "ab":
        c.hear(other, Promise(1, c.held, 0))
    due = []
    for _ in range(4):
        [load] = c.feed(Merge())
        due.append(load.due)
        effects = c.contribute(*load.due)
        averaged(c, effects, f"n{len(due)}")
    assert due == [(0,), (1,), (0,), (1,)]


def test_a_final_state_is_merged_once(peer: Any) -> None:
    """No exchange follows it."""
    a = peer("a", epoch=5, mode="async", stop_after_epochs=5)
    [load] = a.feed(Merge())
    assert [one.version for one in load.shards] == [a.held]
    assert a.feed(Merge()) == [Load((), ())]


# -- being behind is usual


def test_who_is_named_keeps_up_and_the_others_only_look(peer: Any) -> None:
    """A successor that is behind asks for the shards that it must hold; others for nothing, so that a fork shows."""
    ahead = running(peer, "c").replica.roster.mine.model
    ahead = replace(ahead, samples=ahead.samples + 10, epochs=ahead.epochs + 1)
    b, a = running(peer, "b"), running(peer, "a")
    assert to(b.meet("c", model=ahead), "c", Fetch) == [Fetch((b.version(1),), shards=(0,))]
    assert to(b.meet("c", model=ahead), "c", Fetch) == []
    assert to(a.meet("c", model=ahead), "c", Fetch) == [Fetch((a.version(1),), shards=())]
    for one, asks in ((a, 0), (b, 1)):
        one.now += one.rules.settle
        assert len(to(one.meet("c", model=ahead), "c", Fetch)) == asks
    a.now += a.rules.dead_after
    assert to(a.meet("c", model=ahead), "c", Fetch) == [Fetch((a.version(1),), shards=())]


# -- what is told of it


def test_what_a_submission_waits_for_is_told(peer: Any) -> None:
    """In one sentence, as the aggregator and as anybody else; nothing where nothing is under way."""
    a, c = running(peer, "a"), running(peer, min_peers=3)
    assert (a.replica.waiting(), c.replica.waiting()) == ("", "")
    a.contribute()
    assert a.replica.waiting() == "waiting for c to answer a submission"
    a.lose("b")
    a.lose("c")
    a.replica.roster.mine = replace(a.replica.roster.mine, eligible=False)
    assert a.replica.waiting() == "waiting for a peer that may aggregate and can be reached; of c, b, a none can"
    effects = c.contribute()
    averaged(c, effects)
    assert c.replica.waiting() == "waiting for b to hold a commit of shard 0"
    d = running(peer, min_peers=4)
    d.contribute()
    assert d.replica.waiting() == "waiting for peers: 3 of 4 (min_peers) are there"


def test_who_takes_over_says_whom_it_waits_for(peer: Any) -> None:
    """Until all have promised."""
    b = running(peer, "b")
    b.contribute()
    b.lose("c")
    assert b.replica.waiting() == "taking over shard 0, waiting for a"


def test_only_who_may_have_to_answer_keeps_commits(peer: Any) -> None:
    """The others keep the last, which is a payload each."""
    for me, kept in (("a", 1), ("b", 4)):
        one = running(peer, me)
        for epoch in range(1, 7):
            commit = next_commit(one, epoch=epoch)
            one.hear("c", commit)
            one.feed(Applied(0, commit.base, commit.version.digest))
        assert len(one.replica.logs[0].recent) == kept
