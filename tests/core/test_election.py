"""Elections: balanced, the same everywhere."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.core.plan import assign, rank, without

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
    """The first is the highest ranked one with room left, the others follow by rank, in whatever order members are
    listed."""
    plan = assign("run", tuple(range(fragments)), members)
    assert sorted(plan) == list(range(fragments))
    assert plan == assign("run", tuple(range(fragments)), members[::-1])
    assert plan[0] == rank("run/0/0", members)
    for fragment, order in plan.items():
        assert list(order[1:]) == without(rank(f"run/0/{fragment}", members), order[0])
        assert sorted(order) == sorted(members)


def test_the_order_of_an_election_is_pinned() -> None:
    """The order is part of the protocol: peers with different versions of the program must compute the same one."""
    assert rank("run/1/0", "abcde") == ["a", "d", "c", "e", "b"]


def test_an_election_without_members_names_nobody() -> None:
    assert assign("run", (0, 1), ()) == {0: [], 1: []}
