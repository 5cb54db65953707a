"""Which commits and contributions may count: by author, term and numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.admission import AHEAD_MAX, in_range, latest_incarnation, objection
from p2p_diloco.core.events import Apply, Note
from p2p_diloco.core.leadership import TERMS_AHEAD_MAX, Leadership
from p2p_diloco.core.messages import Contribution, Counted
from p2p_diloco.core.version import SALT_BITS, ContributionId
from tests.core.conftest import PLAIN, Peer, commit_on, roster_of

RULES = replace(PLAIN, weight_max=8.0, samples_max=100)
STATE = Peer.state(0, 1, counted=(("a", ContributionId(50, 3)),))
"""Its plan names a, b and c."""


def lead() -> Leadership:
    return Leadership(roster_of("c", "abdz"), STATE)


def counting(weight: float = 1.0, samples: int = 5, incarnation: int = 1) -> Any:
    """A commit of a that counts one contribution of b."""
    listed = (Counted("b", ContributionId(incarnation, 1), weight, samples),)
    return replace(commit_on(STATE, "b"), contributions=listed)


@pytest.mark.parametrize(
    ("author", "term", "fits"),
    [
        *[("a", 0, True), ("b", 1, True), ("c", 2, True), ("a", 3, True)],
        *[("b", 0, False), ("a", 1, False), ("b", 2, False), ("z", 0, False), ("z", 9, False)],
    ],
)
def test_a_commit_counts_only_of_the_candidate_whose_turn_its_term_is(author: str, term: int, fits: bool) -> None:
    """z is live, but the plan does not name it."""
    commit = replace(commit_on(STATE), aggregator=author, term=term)
    told = objection(commit, STATE, lead(), RULES)
    assert told == ("" if fits else f"{author} may not write it under term {term}")


def test_a_term_far_beyond_the_known_one_is_refused() -> None:
    """After such a commit no higher term might fit into a message."""
    most = 4 * TERMS_AHEAD_MAX  # three candidates, and all others together
    for term, fits in ((most - most % 3, True), (most - most % 3 + 3, False)):
        assert (objection(replace(commit_on(STATE), term=term), STATE, lead(), RULES) == "") is fits


@pytest.mark.parametrize(
    ("numbers", "fits"),
    [
        ({"weight": 8.0}, True),
        ({"weight": 8.5}, False),
        ({"weight": 0.0}, False),
        ({"weight": -1.0}, False),
        ({"samples": 100}, True),
        ({"samples": 101}, False),
        ({"samples": -1}, False),
        ({"incarnation": 50 + AHEAD_MAX}, True),
        ({"incarnation": 51 + AHEAD_MAX}, False),
    ],
)
def test_a_commit_and_a_contribution_count_only_with_numbers_in_range(numbers: dict[str, Any], fits: bool) -> None:
    """The incarnation may be a day ahead of the highest that is known."""
    told = objection(counting(**numbers), STATE, lead(), RULES)
    assert told == ("" if fits else "the weight, the samples or the incarnation of b is out of range")
    id = ContributionId(numbers.pop("incarnation", 1), 1)
    plain = Contribution(0, STATE.version, id, id, weight=1.0, samples=5)
    assert in_range(replace(plain, **numbers), STATE, lead(), RULES) is fits


def test_a_contribution_carries_nothing_younger_than_itself() -> None:
    id = ContributionId(2, 2)
    contribution = Contribution(0, STATE.version, id, id, weight=1.0, samples=5)
    for oldest, fits in ((ContributionId(1, 9), True), (id, True), (ContributionId(2, 3), False)):
        assert in_range(replace(contribution, oldest=oldest), STATE, lead(), RULES) is fits


def test_a_replica_refuses_what_is_out_of_range_and_says_so_once(peer: Any) -> None:
    """A contribution and a commit, in both modes."""
    for mode in ("sync", "async"):
        b = peer("b", group="abc", succession="bac", weight_max=1.5, mode=mode)
        told = b.hear("a", b.contribution(b.held))
        assert [e.kind for e in told if isinstance(e, Note)] == ["refused"]
        assert b.replica.logs[0].round.inbox == {}
        c = peer("c", mode=mode)
        told = c.hear("b", c.commit(by="b"))
        assert [e.kind for e in told if isinstance(e, Note)] == ["refused"]
        assert c.hear("b", c.commit(by="b")) == []
        assert any(isinstance(e, Apply) for e in c.hear("a", c.commit()))


def test_a_contribution_may_be_of_an_incarnation_a_day_ahead_of_all_that_are_known() -> None:
    """A clock may be wrong by a day. After one far ahead was counted, no later one might fit into a message."""
    day = 86_400_000 << SALT_BITS
    counted = {"a": ContributionId(500, 1), "b": ContributionId(90, 7)}
    assert latest_incarnation(counted, 100) == 500 + day
    assert latest_incarnation(counted, 600) == 600 + day
    assert latest_incarnation({}, 100) == 100 + day
