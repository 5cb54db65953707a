"""Which peers hold a fragment after the next commit: few changes, and no aggregator without the state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.core.plan import elected, hands_over, may_stay, succession, worth_a_commit


def after(line: str, order: str, able: str = "", room: int = 1, *, hand_over: bool = False) -> str:
    """The succession after the next commit of the first peer in ``line``."""
    return "".join(succession(line[0], tuple(line), order, able or order, room, hand_over=hand_over))


def test_an_able_successor_stays() -> None:
    """Whichever peers are elected; they only fill free places."""
    assert after("ab", "cdab") == "ab"
    assert after("abc", "dabc", room=3) == "abcd"


def test_a_successor_that_is_gone_is_replaced_by_the_next_elected() -> None:
    """Without another peer it stays named, because it may come back."""
    assert after("ab", "cda") == "ac"
    assert after("ab", "a") == "ab"
    assert after("abc", "adc", room=2) == "acd"


def test_a_fragment_is_handed_over_in_two_commits() -> None:
    """The elected peer first becomes a successor. With successors=0 it receives the state with the commit that names
    it."""
    assert after("ab", "cab", hand_over=True) == "ac"
    assert after("ac", "cab", hand_over=True) == "ca"
    assert after("abd", "cabd", room=2, hand_over=True) == "abc"
    assert after("a", "ca", room=0, hand_over=True) == "c"


def test_a_fragment_is_handed_over_after_a_while_to_another_elected_peer() -> None:
    """An aggregator that is itself elected keeps the fragment."""
    assert not hands_over("a", "ba", 9.9, 10.0)
    assert hands_over("a", "ba", 10.0, 10.0)
    assert not hands_over("a", "ab", 10.0, 10.0)


def test_a_new_name_or_another_aggregator_is_worth_a_commit() -> None:
    """A missing name or another order is not."""
    plan = tuple("abc")
    assert worth_a_commit("a", plan, "abd")
    assert worth_a_commit("a", plan, "ba")
    assert not worth_a_commit("a", plan, "acb")
    assert not worth_a_commit("a", plan, "ab")


PEERS = st.lists(st.sampled_from("abcdef"), unique=True, min_size=1).map("".join)


@given(line=PEERS, able=PEERS, room=st.integers(0, 3), hand_over=st.booleans())
def test_each_succession_is_without_repetition_and_settles(line: str, able: str, room: int, hand_over: bool) -> None:
    """The aggregator stays, or it is an elected peer that the plan names (with successors=0: any elected peer). There
    are as many successors as required, if there are enough peers."""
    me = line[0]
    able = able if me in able else able + me
    order = "".join(sorted(able, reverse=True))
    hand_over = hand_over and order[0] != me
    then = after(line, order, able, room, hand_over=hand_over)
    assert len({*then}) == len(then) <= 1 + max(room, 1)
    assert then[0] == me or (hand_over and then[0] == order[0] and (then[0] in line or not room))
    assert len(then) >= min(1 + room, len({*line, *able}))
    assert {*then[1:]} & {*able} or not room or len(able) == 1
    if not hand_over:
        assert after(then, order, able, room) == then


def test_private_peers_are_elected_after_all_reachable_ones() -> None:
    order = elected("run", (0,), ["c", "d"], ["a", "b"])[0]
    assert ({*order[:2]}, {*order[2:]}) == ({"c", "d"}, {"a", "b"})
    assert elected("run", (0,), [], ["a", "b"])[0] == order[2:]


@pytest.mark.parametrize(
    ("reachable", "room", "stay"),
    [("abc", 2, "abc"), ("ab", 2, "abp"), ("a", 2, "apq"), ("a", 1, "ap"), ("", 1, "p"), ("bc", 1, "bc")],
)
def test_private_successors_stay_only_while_reachable_ones_are_too_few(reachable: str, room: int, stay: str) -> None:
    """In the order of the plan; a, which aggregates, takes no place."""
    assert may_stay("a", tuple("apbq"), list(reachable), ["p", "q", "r"], room) == tuple(stay)
