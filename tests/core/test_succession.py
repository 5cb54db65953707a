"""Who has a shard after the next commit: few changes, and nobody who aggregates without holding the state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.core.messages import Plan
from p2p_diloco.core.succession import elected, hands_over, succession, worth_a_commit


def after(line: str, order: str, able: str = "", room: int = 1, *, hand_over: bool = False) -> str:
    """The succession after the next commit of the first of ``line``."""
    return "".join(succession(line[0], Plan((), tuple(line)), order, able or order, room, hand_over=hand_over))


def test_who_is_able_stays() -> None:
    """Whoever else is elected; what room there is beside them goes to the elected."""
    assert after("ab", "cdab") == "ab"
    assert after("abc", "dabc", room=3) == "abcd"


def test_who_is_gone_is_replaced_by_the_next_that_is_elected() -> None:
    """Or, if there is nobody, named still: it may come back."""
    assert after("ab", "cda") == "ac"
    assert after("ab", "a") == "ab"
    assert after("abc", "adc", room=2) == "acd"


def test_a_shard_is_handed_over_in_two_commits() -> None:
    """Who is elected is a successor first. Without successors it is sent the state with the commit that names it."""
    assert after("ab", "cab", hand_over=True) == "ac"
    assert after("ac", "cab", hand_over=True) == "ca"
    assert after("abd", "cabd", room=2, hand_over=True) == "abc"
    assert after("a", "ca", room=0, hand_over=True) == "c"


def test_it_stays_for_a_while_before() -> None:
    """And who is elected already hands nothing over."""
    assert not hands_over("a", "ba", 9.9, 10.0)
    assert hands_over("a", "ba", 10.0, 10.0)
    assert not hands_over("a", "ab", 10.0, 10.0)


def test_what_is_worth_a_commit() -> None:
    """A new name, or another aggregator; not that somebody is left out, or another order."""
    plan = Plan((), tuple("abc"))
    assert worth_a_commit("a", plan, "abd")
    assert worth_a_commit("a", plan, "ba")
    assert not worth_a_commit("a", plan, "acb")
    assert not worth_a_commit("a", plan, "ab")


PEERS = st.lists(st.sampled_from("abcdef"), unique=True, min_size=1).map("".join)


@given(line=PEERS, able=PEERS, room=st.integers(0, 3), hand_over=st.booleans())
def test_any_succession(line: str, able: str, room: int, hand_over: bool) -> None:
    """Nobody twice; the aggregator stays, or the next is one that the plan names and that is elected, unless nobody is
    to hold the state; there are as many successors as there should be, where there are peers; and it settles."""
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


def test_all_shards_are_spread_evenly() -> None:
    """As first, nobody has more than its share, rounded up; whatever links are measured."""
    firsts = [line[0] for line in elected("run", tuple(range(10)), tuple("abcd")).values()]
    assert max(map(firsts.count, "abcd")) == 3
