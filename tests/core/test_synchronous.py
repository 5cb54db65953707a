"""A synchronous round: its contributions are collected and averaged, and the commit names the next plan."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_diloco.core.election import assign
from p2p_diloco.core.events import Accept, Average, Changed, Measured, Note, Release, Restore, Send
from p2p_diloco.core.messages import Commit, Counted, Leave, Outdated, Plan, Want
from p2p_diloco.core.version import ContributionId, ModelVersion, Version, model_version
from tests.core.conftest import filled, meta


def next_plan(a: Any, *contributors: str) -> Plan:
    """The plan of the commit that ``a`` writes with these contributions and its own."""
    effects = a.contribute()
    for name in contributors:
        effects = a.hear(name, a.contribution(a.held, a.replica.epoch + 1))
    effects = a.averaged(effects, f"n{a.replica.epoch}")
    return a.replica.logs[0].state.plan


# -- contributions


def test_a_round_averages_the_contributions_of_its_group(peer: Any, life: int) -> None:
    """It waits for each member that makes progress, and averages in the order of their ids."""
    a = peer("a")
    b, c = a.contribution(a.held, 1), a.contribution(a.held, 4, samples=7)
    assert a.hear("c", c) == []
    assert a.contribute() == []
    (average,) = a.hear("b", b)
    own = ContributionId(life, 1)
    counted = {"a": own, "b": b.id, "c": c.id}
    order = assign("run", 2, (0,), dict.fromkeys("abc", 1.0))[0]
    covered = meta(Version(0, 10 + 5 + 5 + 7, 2, ""), 0, Plan(("a", "b", "c"), order), counted)
    assert isinstance(average, Average)
    assert (average.shard, average.base, average.meta) == (0, a.version(1), covered)
    assert [name for name, _ in average.contributions] == ["a", "b", "c"]
    assert [c.payload for _, c in average.contributions] == ["Δ", "Δ1", "Δ4"]


def test_a_commit_counts_four_times_the_median_of_samples_for_one_contribution_at_most(peer: Any) -> None:
    """So one peer can't drive the version, or end a run after its samples. It is noted; two have nothing to compare
    with."""
    a = peer("a")
    a.hear("b", a.contribution(a.held, samples=2**20))
    a.hear("c", a.contribution(a.held, samples=7))
    note, average = a.contribute(samples=5)
    assert note == Note("samples", f"the run counts 28 of {2**20} samples that b tells of a round, because this is 4 "
                        "times the median (noted once)")  # fmt: skip
    assert a.averaged([average], "n2")[0].proposals[0][1] == "n2"
    assert a.replica.logs[0].state.version.samples == 10 + 5 + 28 + 7

    pair = peer("a", group="ab", live="b")
    pair.hear("b", pair.contribution(pair.held, samples=2**20))
    pair.averaged(pair.contribute(samples=5), "n2")
    assert pair.replica.logs[0].state.version.samples == 10 + 5 + 2**20


def test_a_contribution_from_outside_the_group_is_counted(peer: Any) -> None:
    """The round does not wait for it."""
    a = peer("a", group="a", live="d")
    a.hear("d", a.contribution(a.held))
    (average,) = a.contribute()
    assert [name for name, _ in average.contributions] == ["a", "d"]


def test_a_repeated_contribution_changes_nothing(peer: Any) -> None:
    """A newer contribution of the same peer replaces the older one."""
    a = peer("a")
    first, second = a.contribution(a.held, 1), a.contribution(a.held, 2)
    assert a.hear("b", first) == []
    assert a.hear("b", first) == []
    assert a.hear("b", second) == []
    assert a.hear("b", first) == []
    a.contribute()
    (average,) = a.hear("c", a.contribution(a.held))
    assert [c.id.sequence for name, c in average.contributions if name == "b"] == [2]


@pytest.mark.parametrize("sequence", [3, 2])
def test_a_contribution_that_the_state_counts_is_refused(peer: Any, sequence: int) -> None:
    """The table has the last counted one: that one and all before it are refused, the next one is taken."""
    a = peer("a", counted=(("b", ContributionId(1, 3)),))
    (note,) = a.hear("b", a.contribution(a.held, sequence))
    assert note.kind == "refused"
    a.contribute()
    a.hear("c", a.contribution(a.held))
    assert a.replica.logs[0].round.working is None
    (average,) = a.hear("b", a.contribution(a.held, 4))
    assert len(average.contributions) == 3


def test_a_late_contribution_is_answered_with_the_commit_that_closed_its_round(peer: Any) -> None:
    """A peer that is further behind gets the whole state."""
    a = peer("a", group="a", live="bc")
    base = a.held
    a.meet("b", idle=True)
    a.meet("c", idle=True)
    a.averaged(a.contribute(), "new")
    commit = a.replica.logs[0].outgoing.last
    assert a.hear("b", a.contribution(base)) == [Send("b", commit)]
    assert [a.replica.attendances[0].sure("b", epoch) for epoch in (2, 3)] == [True, False]
    a.hear("b", a.contribution(a.held, 2))
    a.hear("c", a.contribution(a.held, 2))
    a.averaged(a.contribute(), "newer")
    assert a.hear("b", a.contribution(base)) == [Send("b", a.replica.state(0))]


def test_a_contribution_to_the_wrong_peer_is_kept_and_answered_with_the_holder(peer: Any) -> None:
    b = peer("b")
    assert b.hear("c", b.contribution(b.held)) == [Send("c", Outdated(0, b.held, 0, "a"))]
    assert "c" in b.replica.logs[0].round.inbox


def test_missing_contributions_are_asked_for_after_a_while(peer: Any) -> None:
    """The aggregator asks the peers that it waits for, and never itself."""
    a = peer("a", group="abcd", round_timeout=50.0)
    a.hear("b", a.contribution(a.held))
    assert a.pass_time(1.9) == []
    want = Want(0, a.held)
    assert a.pass_time(1.0) == [Send("c", want), Send("d", want)]
    a.contribute()
    a.meet("d", idle=True)
    assert a.pass_time(5.0) == [Send("c", want)]


def test_missing_contributions_are_asked_for_ever_more_rarely(peer: Any) -> None:
    """A round may take minutes in which no peer has a contribution. The aggregator also asks while it has none
    itself."""
    a = peer("a", group="ab")
    asked, began = [], a.now
    while a.now < began + 60.0:
        asked += [a.now - began for _ in a.pass_time(1.0)]
    assert asked == [2.0, 6.0, 14.0, 24.0, 34.0, 44.0, 54.0]
    a.contribute()
    assert a.pass_time(2.9) == [Send("b", Want(0, a.held))]


def test_all_workers_are_asked_where_too_few_are_named(peer: Any) -> None:
    """The others of the plan are gone, and the round needs a peer that the plan does not name."""
    a = peer("a", group="ab", live="acd", min_peers=2)
    a.meet("x", epochs=(0,), model=model_version([a.version(0)]))  # behind, so that the round does not wait for it
    a.meet("c", idle=True)
    a.meet("d", role="aggregator")
    a.meet("z", **a.blank())
    for _ in range(2):
        a.refuse("b")
    a.contribute()
    assert a.replica.logs[0].waited_for() == []
    assert a.pass_time(2.9) == [Send("x", Want(0, a.held))]


@pytest.mark.parametrize("why", ["ended", "not mine", "no state"])
def test_a_peer_that_closes_no_round_asks_for_nothing(peer: Any, why: str) -> None:
    """Its run has ended, another peer aggregates, or it holds no state."""
    ends = 1 if why == "ended" else None
    b = peer("b" if why == "not mine" else "a", epoch=None if why == "no state" else 1, stop_after_epochs=ends)
    if why == "not mine":
        b.hear("c", b.contribution(b.held))
    assert b.pass_time(4.0) == []


# -- the commit


def test_a_commit_goes_to_all_peers_and_lists_its_contributions(peer: Any, life: int) -> None:
    """All get the same one: base, version, term, weights, next plan, and the computed mean."""
    a = peer("a", succession="acb")
    a.contribute(samples=3)
    a.hear("b", a.contribution(a.held))
    base = a.held
    average = a.hear("c", a.contribution(a.held))
    effects = a.averaged(average, "new")
    listed = (
        Counted("a", ContributionId(life, 1), 2.0, 3),
        Counted("b", ContributionId(1, 1), 1.0, 5),
        Counted("c", ContributionId(1, 1), 1.0, 5),
    )
    plan = Plan(("a", "b", "c"), assign("run", 2, (0,), dict.fromkeys("abc", 1.0))[0])
    commit = Commit(0, base, Version(0, 23, 2, "new"), 0, "a", listed, plan)
    assert effects == [Accept(((0, "new"),)), Send("b", commit), Send("c", commit), Changed(), Release(sent=True)]
    assert effects[1].message.payload == "mean"
    assert a.held == commit.version


def test_a_commit_goes_to_newcomers_that_still_fetch(peer: Any) -> None:
    """They apply it after the state."""
    a = peer("a", group="ab", live="bd")
    a.meet("d", idle=True)
    a.meet("n", **a.blank())
    a.meet("x", **a.blank())
    a.hear("x", a.contribution(a.held))
    a.hear("b", a.contribution(a.held))
    effects = a.averaged(a.contribute())
    assert [e.to for e in effects if isinstance(e, Send)] == ["b", "d", "n", "x"]


# -- the plan that a commit names


def test_a_newcomer_is_named_at_once_and_may_aggregate_after_a_round(peer: Any) -> None:
    """It is named once it holds a state, however far behind; it may aggregate after it has taken part."""
    a = peer("a", group="ab", epoch=100)
    a.meet("d", epochs=(3,), model=model_version([a.version(3)]))
    plan = next_plan(a, "b")
    assert plan.group == ("a", "b", "d")
    assert sorted(plan.succession) == ["a", "b"]
    a.replica.logs[0].lead.holder = "a"  # whichever peer was elected, a goes on
    plan = next_plan(a, "b", "d")
    assert plan.group == ("a", "b", "d")
    assert sorted(plan.succession) == ["a", "b", "d"]


def test_a_peer_is_elected_only_after_a_commit_counts_it(peer: Any) -> None:
    """A newcomer that a plan names may still be behind. Once counted, it may be elected, even while it pauses."""
    a = peer("a", group="abz", succession="ab")
    a.meet("z", idle=True)
    assert sorted(next_plan(a, "b").succession) == ["a", "b"]
    for contributors in ("zb", "b"):
        a.replica.logs[0].lead.holder = "a"  # whichever peer was elected, a goes on
        a.meet("z", idle=True)
        assert sorted(next_plan(a, *contributors).succession) == ["a", "b", "z"]


@pytest.mark.parametrize("early", [True, False])
def test_a_newcomer_that_holds_the_base_is_not_waited_for_but_counted(peer: Any, early: bool) -> None:
    """No plan names it yet. The next one does. It may aggregate once a commit has counted it."""
    a = peer("a", group="ab")
    a.meet("d")
    if early:
        a.hear("d", a.contribution(a.held))
    a.contribute()
    effects = a.hear("b", a.contribution(a.held))
    assert a.averages(effects) == [["a", "b", "d"] if early else ["a", "b"]]
    a.averaged(effects)
    plan = a.replica.logs[0].state.plan
    assert (plan.group, sorted(plan.succession)) == (("a", "b", "d"), list("abd" if early else "ab"))


def test_a_round_waits_for_newcomers_if_the_others_are_too_few(peer: Any) -> None:
    """Half of those that take part must contribute, and two of several."""
    a = peer("a", group="a")
    for name in "bcd":
        a.meet(name)
    assert a.averages(a.contribute()) == []
    assert a.averages(a.hear("d", a.contribution(a.held))) == [["a", "d"]]


@pytest.mark.parametrize(
    ("says", "waited_for", "succeeds"),
    [
        ({}, True, True),
        ({"epochs": (10,)}, True, True),
        ({"eligible": False}, True, True),
        ({"role": "aggregator"}, False, True),
        ({"role": "aggregator", "epochs": (7,)}, False, False),
        ({"idle": True}, False, True),
        ({"epochs": (8,)}, False, True),
        ({"epochs": (7,)}, False, False),
        ({"epochs": ()}, False, False),
    ],
)
def test_a_plan_names_busy_workers_and_near_successors(
    peer: Any, says: dict[str, Any], waited_for: bool, succeeds: bool
) -> None:
    """The group consists of workers that make progress. A successor is at most an epoch behind by its own Summary."""
    a = peer("a", group="abz", epoch=9)
    a.meet("z", idle=says.pop("idle", True), **says)
    if says == {} and waited_for:
        a.meet("z")
        a.hear("z", a.contribution(a.held))
    elif waited_for:
        a.meet("z", **says)
        a.hear("z", a.contribution(a.held))
    plan = next_plan(a, "b")
    assert ("z" in plan.group, "z" in plan.succession) == (waited_for, succeeds)


def test_a_contributor_counts_as_up_to_date(peer: Any) -> None:
    """Its contribution on the base is newer than its last Summary, which may be an epoch old."""
    a = peer("a", group="abc")
    a.meet("c", epochs=(0,))
    plan = next_plan(a, "b", "c")
    assert plan.group == ("a", "b", "c")
    assert sorted(plan.succession) == ["a", "b", "c"]


def test_a_contributor_from_outside_the_plan_may_aggregate(peer: Any) -> None:
    """It has taken part, so it is up to date."""
    a = peer("a", group="a", live="d")
    a.hear("d", a.contribution(a.held))
    a.averaged(a.contribute())
    assert sorted(a.replica.logs[0].state.plan.succession) == ["a", "d"]


def test_an_aggregator_without_trainer_comes_into_the_succession(peer: Any) -> None:
    """It never contributes, so being up to date is enough."""
    a = peer("a", group="a")
    a.meet("h", role="aggregator")
    (average,) = [e for e in a.contribute() if isinstance(e, Average)]
    commit = a.replica.logs[0].round.draft
    assert average.base == commit.base
    assert set(commit.plan.succession) == {"a", "h"}
    assert commit.plan.group == ("a",)


@pytest.mark.parametrize(("samples", "named"), [(10, True), (9, False)])
def test_a_peer_on_another_lineage_is_neither_a_newcomer_nor_named(peer: Any, samples: int, named: bool) -> None:
    """It is ahead in epochs with fewer samples."""
    a = peer("a", group="ab", live="b")
    a.meet("z", epochs=(5,), model=ModelVersion(0, samples, 5, "other"))
    log = a.replica.logs[0]
    assert log.attendance.newcomers(log.state.plan, 1) == (["z"] if named else [])
    a.contribute()
    a.averaged(a.hear("b", a.contribution(a.held)))
    assert ("z" in a.replica.logs[0].state.plan.group) == named


@pytest.mark.parametrize("gone", ["dead", "left"])
def test_a_peer_that_is_gone_is_not_named(peer: Any, gone: str) -> None:
    """Not even if its contribution is counted."""
    a = peer("a", group="abc")
    a.hear("c", a.contribution(a.held))
    a.lose("c") if gone == "dead" else a.hear("c", Leave(1))
    plan = next_plan(a, "b")
    assert plan.group == ("a", "b")
    assert sorted(plan.succession) == ["a", "b"]
    assert "c" in a.replica.logs[0].state.counted


def test_a_peer_that_is_left_out_does_not_hide_the_next(peer: Any) -> None:
    """b skips a, which is behind, and names c, which comes after a."""
    b = peer("b", group="abc", succession="bac")
    b.meet("a", epochs=(0,))
    b.meet("a", epochs=(0,), idle=True)
    effects = [*b.contribute(), *b.hear("c", b.contribution(b.held))]
    b.averaged(effects)
    assert b.replica.logs[0].state.plan.group == ("b", "c")


def test_a_peer_without_a_state_does_not_hide_the_next(peer: Any) -> None:
    b = peer("b", group="bc")
    b.meet("a", **b.blank())
    b.averaged([*b.contribute(), *b.hear("c", b.contribution(b.held))])
    assert b.replica.logs[0].state.plan.group == ("b", "c")


def test_a_log_without_a_state_waits_for_nobody(peer: Any) -> None:
    assert peer("n", epoch=None, live="ab").replica.logs[0].waited_for() == []


def test_bandwidth_weighs_in_the_succession(peer: Any) -> None:
    """The election uses the bandwidths in the peers' Summaries, and this peer's own."""
    a = peer("a", group="abc")
    a.feed(Measured(10.0))
    a.meet("b", bandwidth=50.0)
    a.meet("c", bandwidth=0.5)
    plan = next_plan(a, "b", "c")
    assert plan.succession == assign("run", 2, (0,), {"a": 10.0, "b": 50.0, "c": 0.5})[0]


def test_private_contributors_weigh_in_the_shares(peer: Any) -> None:
    """While a contributor on a slow link holds the round open, a peer on a middling link has time to aggregate."""
    links, elected = {"a": 10.0, "b": 10.0, "c": 0.25, "d": 2.0}, {}
    for group in ("abd", "abcd"):
        a = peer("a", group=group, succession="abd", live="", epoch=3)
        a.feed(Measured(links["a"]))
        for name in group[1:]:
            a.meet(name, bandwidth=links[name], eligible=name != "c")
        elected[group] = next_plan(a, *group[1:]).succession
    members = {name: links[name] for name in "abd"}
    weighed = (*assign("run", 4, (0,), members, links)[0], "c")
    assert elected == {"abd": assign("run", 4, (0,), members)[0], "abcd": weighed}
    assert [order[0] for order in elected.values()] == ["b", "d"]


def test_one_election_spreads_all_shards_of_a_fragment(peer: Any) -> None:
    """So that no peer gets all of them."""
    a = peer("a", group="a", live="", fragments=((0, 1), (2,)))
    for effect in a.contribute(0, 1):
        a.averaged([effect], f"n{effect.shard}")
    orders = assign("run", 2, (0, 1), {"a": 1.0})
    assert [log.state.plan.succession for log in a.replica.logs[:2]] == [orders[0], orders[1]]


def test_a_private_aggregator_names_itself_when_no_other_peer_can_aggregate(peer: Any) -> None:
    """A commit always names an aggregator."""
    a = peer("a", group="a", live="", eligible=False)
    assert next_plan(a) == Plan(("a",), ("a",))


def test_an_aggregator_that_lacks_other_shards_names_itself_if_it_has_met_no_other_peer(peer: Any) -> None:
    """Its own Summary names no epochs, and the contributor has not sent one."""
    a = peer("a", epoch=None, live="", fragments=((0,), (1,)))
    a.feed(Restore((a.state(0, 1, plan=a.plan("b", "a")),)))
    assert a.averages(a.hear("b", a.contribution(a.held))) == [["b"]]
    assert a.replica.logs[0].round.draft.plan.succession == ("a",)


@pytest.mark.parametrize("private", ["b", "ac", "abc"])
def test_private_peers_follow_the_reachable_ones_in_the_succession(peer: Any, private: str) -> None:
    """In each of the two parts an election decides the order. A run of private peers alone goes on."""
    a = peer("a", group="abc", live="", epoch=3, eligible="a" not in private)
    for name in "bc":
        a.meet(name, eligible=name not in private)
    reachable = "".join(sorted({*"abc"} - {*private}))
    parts = [assign("run", 4, (0,), dict.fromkeys(part, 1.0))[0] for part in (reachable, private) if part]
    assert next_plan(a, "b", "c").succession == tuple(name for part in parts for name in part)


def test_each_peer_aggregates_as_many_large_shards(peer: Any) -> None:
    """Whoever gets the small ones, at any epoch."""
    large, small = (0, 1, 2, 3), (4, 5, 6)
    for epoch in range(1, 9):
        a = peer("a", group="ab", epoch=epoch, fragments=((*large, *small),), small=small)
        plans = {shard: a.replica.logs[shard].next_plan({"a", "b"}, a.now) for shard in (*large, *small)}
        assert sorted(plans[shard].succession[0] for shard in large) == ["a", "a", "b", "b"]
        assert plans[4].succession == assign("run", epoch + 1, small, dict.fromkeys("ab", 1.0))[4]


def test_a_reachable_peer_that_comes_back_aggregates_from_the_next_plan_on(peer: Any) -> None:
    """Without it, private peers aggregate."""
    firsts = []
    for back in (False, True):
        a = peer("a", group="abc", epoch=3, eligible=False)
        a.meet("c", eligible=False)
        a.lose("b")
        if back:
            a.meet("b")
        firsts.append(next_plan(a, *("bc" if back else "c")).succession[0])
    assert firsts == [assign("run", 4, (0,), dict.fromkeys("ac", 1.0))[0][0], "b"]


def test_a_peer_that_has_just_fetched_the_base_waits_for_its_own_trainer(peer: Any) -> None:
    """The plan of the fetched state makes it aggregate without naming it in the group; a contribution came early. Its
    own Summary still has the epoch before, but it works and holds the base: it takes no step without its own data."""
    b = peer("b", group="ab", epoch=1)
    state = b.state(0, 4, plan=b.plan("a", "ba"))
    b.hear("a", b.contribution(state.version))
    b.hear("a", state)
    assert b.averages(filled(b, state)) == []
    assert b.replica.logs[0].waited_for() == ["b"]
    assert b.averages(b.contribute()) == [["a", "b"]]
