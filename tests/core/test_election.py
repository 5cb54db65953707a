"""Elections: weighted, balanced, the same everywhere."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.core import election
from p2p_diloco.core.election import assign, rank, without
from p2p_diloco.core.shares import shares

NAMES = [f"peer{i}" for i in range(12)]
MEMBERS = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 20).map(float), min_size=1)


@settings(max_examples=80, deadline=None)
@given(members=MEMBERS, shards=st.integers(1, 40), epoch=st.integers(0, 10**6))
def test_no_member_aggregates_more_than_its_share(members: dict[str, float], shards: int, epoch: int) -> None:
    """Of the shards, rounded up."""
    first = Counter(order[0] for order in assign("run", epoch, range(shards), members).values())
    parts = shares(members, members)
    for peer, held in first.items():
        assert held <= math.ceil(shards * parts[peer])


@settings(max_examples=40, deadline=None)
@given(names=st.sets(st.sampled_from(NAMES), min_size=1), weight=st.floats(1.0, 1e12), shards=st.integers(1, 40))
def test_equal_members_are_balanced(names: set[str], weight: float, shards: int) -> None:
    """Equal members aggregate equally many shards, up to the remainder of the division, whatever their bandwidth."""
    first = Counter(order[0] for order in assign("run", 7, range(shards), dict.fromkeys(names, weight)).values())
    assert all(held <= math.ceil(Fraction(shards, len(names))) for held in first.values())


def test_a_peer_on_a_slow_link_aggregates_nothing() -> None:
    """At a fifth of the others' bandwidth its link is busy with its own contribution: the others have all shards."""
    members = {"a": 100.0, "b": 100.0, "c": 20.0}
    for epoch in range(20):
        first = Counter(order[0] for order in assign("run", epoch, range(24), members).values())
        assert first == {"a": 12, "b": 12}


def test_an_unknown_bandwidth_counts_as_the_median() -> None:
    """A peer without a measurement has a median peer's share; without any measurement all shares are equal."""
    known = {"a": 100.0, "b": 100.0, "c": 20.0}
    assert assign("run", 3, range(24), {**known, "d": 0.0}) == assign("run", 3, range(24), {**known, "d": 100.0})
    unknown = dict.fromkeys("abc", 0.0)
    assert assign("run", 3, range(24), unknown) == assign("run", 3, range(24), dict.fromkeys("abc", 1.0))


def test_a_contributor_that_may_not_aggregate_leaves_the_others_time() -> None:
    """While its link is busy, the others need not share in proportion to their links: they share equally."""
    first = Counter(
        order[0]
        for order in assign("run", 3, range(24), {"a": 100.0, "b": 50.0}, {"a": 100.0, "b": 50.0, "c": 5.0}).values()
    )
    assert first == {"a": 12, "b": 12}


@settings(max_examples=40, deadline=None)
@given(members=MEMBERS, shards=st.integers(1, 10))
def test_each_member_is_in_each_succession_once(members: dict[str, float], shards: int) -> None:
    """The first is the highest ranked one with room left, the others follow by rank."""
    plan = assign("run", 7, range(shards), members)
    assert sorted(plan) == list(range(shards))
    for shard, order in plan.items():
        by_rank = rank(f"run/7/{shard}", members)
        assert list(order[1:]) == without(by_rank, order[0])
        assert sorted(order) == sorted(members)


def test_as_many_shards_as_peers_make_a_butterfly() -> None:
    """With equal weights and one shard each, every member aggregates exactly one, at every epoch."""
    members = dict.fromkeys(NAMES, 1.0)
    for epoch in range(50):
        plan = assign("run", epoch, range(12), members)
        assert sorted(order[0] for order in plan.values()) == sorted(NAMES)


@pytest.mark.parametrize("weight", [0.1, 0.3, 1.7])
def test_equal_members_share_exactly_whatever_their_weight(weight: float) -> None:
    """The share is exact: ten equal members have one of ten shards each, whatever their weight is."""
    for epoch in range(50):
        plan = assign("run", epoch, range(10), dict.fromkeys(NAMES[:10], weight))
        assert sorted(order[0] for order in plan.values()) == sorted(NAMES[:10])


def test_a_member_without_room_is_passed_over_for_the_next_in_rank() -> None:
    """It has its full share, and stays in the succession."""
    members = {"a": 1.0, "b": 1.0}
    for epoch in range(30):
        plan = assign("run", epoch, (4, 9), members)
        assert {plan[4][0], plan[9][0]} == {"a", "b"}
        assert plan[4] == tuple(rank(f"run/{epoch}/4", members))  # the first shard gets its first choice


def test_a_member_of_twice_the_weight_comes_first_twice_as_often() -> None:
    draws = 6000
    members = {"light": 1.0, "middle": 2.0, "heavy": 3.0}
    first = Counter(rank(f"key {i}", members)[0] for i in range(draws))
    for peer, weight in members.items():
        share, expected = first[peer] / draws, weight / 6
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / draws), (peer, share)


def test_removing_a_member_leaves_the_order_of_the_others() -> None:
    """So known successions stay the same when a peer comes or goes."""
    members = {name: 1.0 + i % 3 for i, name in enumerate(NAMES)}
    for key in map(str, range(20)):
        before = rank(key, members)
        for gone in NAMES:
            rest = {p: w for p, w in members.items() if p != gone}
            assert rank(key, rest) == [p for p in before if p != gone]


def test_every_epoch_and_shard_draws_anew() -> None:
    """Over many epochs every member has its turn, and no two shards always have the same aggregator."""
    members = dict.fromkeys("abcd", 1.0)
    by_epoch = Counter(assign("run", epoch, (0,), members)[0][0] for epoch in range(400))
    assert all(60 < n < 140 for n in by_epoch.values())
    assert assign("run", 1, (0, 1), members) != assign("other run", 1, (0, 1), members)
    assert len({rank(f"run/1/{shard}", members)[0] for shard in range(20)}) == 4


def test_the_order_of_an_election_is_pinned() -> None:
    """The order is part of the protocol: peers with different versions of the program must compute the same one."""
    assert rank("run/1/0", dict.fromkeys("abcde", 1.0)) == ["a", "d", "c", "e", "b"]
    assert rank("run/1/0", {"a": 5.0, "b": 1.0, "c": 1.0, "d": 0.5, "e": 9.0}) == ["a", "e", "c", "d", "b"]


def test_an_election_is_the_same_in_each_process() -> None:
    """Neither Python's hash seed nor the order in which members are listed plays a part."""
    code = (
        "import sys; from p2p_diloco.core.election import assign;"
        "names = [f'peer{i}' for i in range(12)]; names = names[::int(sys.argv[1])];"
        "print(assign('run', 3, range(5), {n: 1.0 + len(n) for n in names}))"
    )
    path = os.pathsep.join([os.getcwd(), *sys.path])
    printed = {
        subprocess.run(
            [sys.executable, "-c", code, order],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed, order in (("1", "1"), ("2", "-1"))
    }
    assert len(printed) == 1
    assert "peer11" in printed.pop()


def test_an_election_without_members_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one member"):
        assign("run", 0, (0,), {})


def test_a_plan_for_many_shards_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shard asks for it again; another epoch, member or bandwidth needs another plan."""
    made, plain = list[object](), election.assign

    def counting(*given: Any) -> dict[int, tuple[str, ...]]:
        made.append(given)
        return plain(*given)

    monkeypatch.setattr(election, "assign", counting)
    members, shards = (("a", 1.0), ("b", 3.0)), tuple(range(40, 60))
    for _ in shards:
        assert election.assigned("once", 7, shards, members) == plain("once", 7, shards, dict(members))
    assert len(made) == 1
    group = (*members, ("c", 0.1))
    others = [(8, members, ()), (7, (*members, ("c", 1.0)), ()), (7, (("a", 1.0), ("b", 4.0)), ()), (7, members, group)]
    for epoch, able, all_of_it in others:
        plan = election.assigned("once", epoch, shards, able, all_of_it)
        assert plan == plain("once", epoch, shards, dict(able), dict(all_of_it))
    assert len(made) == 5
