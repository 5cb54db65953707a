"""Elections: balanced, the same everywhere."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.core.election import assign, rank, without

NAMES = tuple(f"peer{i}" for i in range(12))
MEMBERS = st.sets(st.sampled_from(NAMES), min_size=1).map(tuple)


@settings(max_examples=80, deadline=None)
@given(members=MEMBERS, fragments=st.integers(1, 40))
def test_members_are_balanced(members: tuple[str, ...], fragments: int) -> None:
    """They aggregate equally many fragments, up to the remainder of the division."""
    first = Counter(order[0] for order in assign("run", tuple(range(fragments)), members).values())
    assert all(held <= math.ceil(Fraction(fragments, len(members))) for held in first.values())


@settings(max_examples=40, deadline=None)
@given(members=MEMBERS, fragments=st.integers(1, 10))
def test_each_member_is_in_each_succession_once(members: tuple[str, ...], fragments: int) -> None:
    """The first is the highest ranked one with room left, the others follow by rank."""
    plan = assign("run", tuple(range(fragments)), members)
    assert sorted(plan) == list(range(fragments))
    for fragment, order in plan.items():
        assert list(order[1:]) == without(rank(f"run/0/{fragment}", members), order[0])
        assert sorted(order) == sorted(members)


def test_as_many_fragments_as_peers_make_a_butterfly() -> None:
    """With one fragment each, every member aggregates exactly one, in every run."""
    for run in range(50):
        plan = assign(f"run {run}", tuple(range(12)), NAMES)
        assert sorted(order[0] for order in plan.values()) == sorted(NAMES)


def test_a_member_without_room_is_passed_over_for_the_next_in_rank() -> None:
    """It has its full share, and stays in the succession."""
    for run in map(str, range(30)):
        plan = assign(run, (4, 9), ("a", "b"))
        assert {plan[4][0], plan[9][0]} == {"a", "b"}
        assert list(plan[4]) == rank(f"{run}/0/4", "ab")  # the first fragment gets its first choice


def test_removing_a_member_leaves_the_order_of_the_others() -> None:
    """So known successions stay the same when a peer comes or goes."""
    for key in map(str, range(20)):
        before = rank(key, NAMES)
        for gone in NAMES:
            assert rank(key, without(NAMES, gone)) == without(before, gone)


def test_every_key_draws_anew() -> None:
    """Over many epochs every member has its turn."""
    firsts = Counter(rank(f"run/{epoch}/0", "abcd")[0] for epoch in range(400))
    assert all(60 < n < 140 for n in firsts.values())
    assert sorted(firsts) == list("abcd")


def test_the_order_of_an_election_is_pinned() -> None:
    """The order is part of the protocol: peers with different versions of the program must compute the same one."""
    assert rank("run/1/0", "abcde") == ["a", "d", "c", "e", "b"]


def test_an_election_is_the_same_in_each_process() -> None:
    """Neither Python's hash seed nor the order in which members are listed plays a part."""
    code = (
        "import sys; from p2p_diloco.core.election import assign;"
        "names = [f'peer{i}' for i in range(12)]; names = names[::int(sys.argv[1])];"
        "print(assign('run', tuple(range(5)), tuple(names)))"
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


def test_an_election_without_members_names_nobody() -> None:
    assert assign("run", (0, 1), ()) == {0: [], 1: []}
