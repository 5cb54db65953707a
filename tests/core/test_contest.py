"""Which claim wins, and when a peer claims again."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_diloco.core.contest import outbids, overruling, unaware, wins
from p2p_diloco.core.events import Send
from p2p_diloco.core.leadership import TERMS_AHEAD_MAX
from p2p_diloco.core.messages import Outdated, Promise, TakeOver
from tests.core.conftest import Peer, dies
from tests.core.test_leadership import leadership


@pytest.mark.parametrize(
    ("sender", "term", "holder", "overruled"),
    [
        *[("d", 3, "a", True), ("d", 2, "c", True), ("b", 0, "a", True)],
        *[("d", 0, "a", False), ("d", 2, "a", False), ("d", 1, "c", False), ("b", 0, "c", False)],
    ],
)
def test_a_claim_is_overruled_by_a_greater_one_or_by_its_own_holder(
    sender: str, term: int, holder: str, overruled: bool
) -> None:
    """Greater by term, if the term is that peer's turn. A holder that names another peer has forgotten its claim."""
    lead = leadership("e")
    lead.concede(1, "b")
    claim = (term, holder) if overruled else None
    assert overruling(lead, sender, Outdated(0, Peer.version(1), term, holder), 0.0) == claim
    assert overruling(lead, sender, Outdated(0, Peer.version(2), term, holder), 0.0) is None


def test_a_refusal_by_the_holder_that_is_older_than_its_claim_changes_nothing() -> None:
    """The holder refused another message before it claimed the term, and its refusal arrives after the claim. Another
    peer's word of a greater claim counts at any time."""
    lead = leadership("e")
    lead.concede(1, "b")
    lead.claimed_at = 5.0
    older, greater = Outdated(0, Peer.version(1), 0, "a"), Outdated(0, Peer.version(1), 2, "c")
    assert overruling(lead, "b", older, 4.0) is overruling(lead, "b", greater, 4.0) is None
    assert overruling(lead, "b", older, 5.0) == (0, "a")
    assert overruling(lead, "d", greater, 4.0) == (2, "c")


def test_what_a_holder_said_against_its_claim_is_forgotten_with_it() -> None:
    """The next holder's claim has not arrived here, so its own word against it is believed at once."""
    lead = leadership("e")
    lead.concede(1, "b")
    lead.claimed_at = 5.0
    assert overruling(lead, "b", Outdated(0, Peer.version(1), 0, "a"), 4.0) is None
    assert lead.disowned is not None
    lead.concede(2, "c")
    assert lead.disowned is None
    assert overruling(lead, "c", Outdated(0, Peer.version(1), 0, "a"), 4.0) == (0, "a")


def test_a_claim_from_outside_the_plan_that_its_holder_disowns_ends_once_a_candidate_is_back() -> None:
    """While all candidates were gone, two other peers claimed the same term, and each now takes the other one for the
    holder. With a candidate back neither may hold it, so the plan holds again."""
    lead = leadership("e")
    lead.concede(9, "x")
    refusal = Outdated(0, Peer.version(1), 9, "y")
    assert overruling(lead, "x", refusal, 0.0) == (0, "a")
    assert overruling(lead, "d", refusal, 0.0) is None
    for gone in "abcd":
        dies(lead.roster, gone)
    assert overruling(lead, "x", refusal, 0.0) == (9, "y")


def test_a_peer_that_was_passed_over_wins_nothing_from_an_able_one() -> None:
    """It could take each round anew. Once the holder is dead, its claim counts as any other."""
    lead = leadership("e")
    assert wins(lead, 2, "c")
    lead.roster.passes_over("c", 0.0)
    assert not wins(lead, 2, "c")
    assert wins(lead, 1, "b")
    assert overruling(lead, "d", Outdated(0, Peer.version(1), 2, "c"), 0.0) is None
    dies(lead.roster, "a")
    assert wins(lead, 2, "c")


def test_a_peer_that_this_round_goes_on_without_wins_no_higher_term_in_it() -> None:
    """Even if this peer knows no able holder. Its commit under a term that it has counts still."""
    lead = leadership("e")
    lead.passed_over.add("a")
    assert not wins(lead, 3, "a")
    assert lead.entitles("a", 0)


def test_the_holder_wins_no_higher_term_for_itself(peer: Any) -> None:
    """It is promised what it asks for. With a higher term it could outdo claims of peers that have passed it over."""
    b = peer("b")
    assert Send("a", Promise(0, b.held, 3)) in b.hear("a", TakeOver(0, b.held, 3))
    assert b.replica.logs[0].lead.term == 0


def test_a_claim_that_is_refused_for_a_passed_peer_is_raised(peer: Any) -> None:
    """The peer that refuses has not passed the other one over yet. It promises to the higher claim."""
    b = peer("b", group="abcd")
    b.contribute()
    b.lose("a")
    b.replica.roster.passes_over("d", b.now)
    assert Send("c", TakeOver(0, b.held, 9)) in b.hear("c", Outdated(0, b.held, 7, "d"))
    assert b.replica.logs[0].unpromised() == ["c", "d"]


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(Outdated(0, Peer.version(1), 5, "d"), id="its holder was not passed over"),
        pytest.param(Outdated(0, Peer.version(1), 1, "c"), id="no higher term"),
        pytest.param(Outdated(0, Peer.version(2), 5, "c"), id="another version"),
        pytest.param(Outdated(0, Peer.version(1), 2 + TERMS_AHEAD_MAX * 4, "c"), id="a term that no peer can hold"),
    ],
)
def test_no_other_refusal_raises_a_claim(refusal: Outdated) -> None:
    """A refusal that a hostile peer makes up could raise it beyond any bound."""
    lead = leadership("b")
    lead.claim(1)
    lead.roster.passes_over("c", 0.0)
    assert not outbids(lead, refusal)
    assert lead.term == 1


def test_a_peer_without_a_claim_raises_none() -> None:
    """It has nothing to write."""
    lead = leadership("b")
    lead.roster.passes_over("c", 0.0)
    assert not outbids(lead, Outdated(0, Peer.version(1), 5, "c"))
    assert lead.holder == "a"


def test_each_peer_is_outbid_once_in_a_round() -> None:
    """Two honest peers that have passed each other over would outbid each other for ever."""
    lead = leadership("b")
    lead.claim(1)
    lead.roster.passes_over("c", 0.0)
    assert outbids(lead, Outdated(0, Peer.version(1), 5, "c"))
    term = lead.term
    assert not outbids(lead, Outdated(0, Peer.version(1), term + 3, "c"))
    assert lead.term == term


def test_a_successor_that_missed_a_claim_is_told_of_its_own() -> None:
    """b claimed the term from a, which only d has heard, and died. So d hands its contribution to c, which is next; for
    c the term is still a's. Told of its claim, c asks for promises."""
    d, c = Peer("d", group="abcd"), Peer("c", group="abcd")
    d.contribute()
    d.hear("b", TakeOver(0, d.held, 1))
    assert Send("c", d.replica.logs[0].own.mine) in d.lose("b")
    c.lose("b")
    assert c.replica.logs[0].lead.target() == (0, "a")
    (refusal,) = c.said(c.hear("d", d.replica.logs[0].own.mine))
    assert refusal == Outdated(0, c.held, 0, "a")
    (claim,) = d.said(d.hear("c", refusal))
    assert claim == Outdated(0, c.held, 2, "c")
    c.hear("d", claim)
    assert TakeOver(0, c.held, 2) in c.said(c.pass_time(2.0))


@pytest.mark.parametrize(
    ("sender", "refusal", "told"),
    [
        ("c", Outdated(0, Peer.version(1), 0, "a"), True),
        ("a", Outdated(0, Peer.version(1), 0, "a"), False),
        ("c", Outdated(0, Peer.version(2), 0, "a"), False),
        ("c", Outdated(0, Peer.version(1), 1, "b"), False),
        ("c", Outdated(0, Peer.version(1), 2, "c"), False),
    ],
)
def test_only_the_next_aggregator_is_told_of_a_greater_claim(sender: str, refusal: Outdated, told: bool) -> None:
    """For it alone contributions wait. It is told only while the holder is gone, and only of the present round."""
    lead = leadership("d")
    lead.concede(1, "b")
    assert not unaware(lead, sender, refusal)
    assert not unaware(lead, "b", refusal)  # a holder that names another peer has forgotten its own claim
    dies(lead.roster, "b")
    assert unaware(lead, sender, refusal) is told
