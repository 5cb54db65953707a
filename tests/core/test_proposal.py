"""A computed commit on its way to those who must hold it."""

from __future__ import annotations

from p2p_diloco.core.messages import Commit, Plan
from p2p_diloco.core.proposal import Proposal
from p2p_diloco.core.version import Version

COMMIT = Commit(0, Version(0, 0, 0, "d0"), Version(0, 5, 1, "d1"), 0, "a", (), Plan(("a",), ("a", "c")))


def test_whom_either_plan_names_must_hold_it() -> None:
    """The present one, or its own; but for this peer, and for those who say that they do."""
    proposal = Proposal(COMMIT)
    assert proposal.missing(Plan((), ("a", "b")), "a") == {"b", "c"}
    proposal.holding.add("b")
    assert proposal.missing(Plan((), ("a", "b")), "a") == {"c"}


def test_it_is_sent_once_in_a_while() -> None:
    """To each peer anew when the time is over, or when that peer has forgotten it."""
    proposal = Proposal(COMMIT)
    assert proposal.due("bc", 10.0, 4.0) == ["b", "c"]
    assert proposal.due("bcd", 13.9, 4.0) == ["d"]
    assert proposal.due("bcd", 14.0, 4.0) == ["b", "c"]
    proposal.holding.add("c")
    proposal.forgotten_by("c")
    assert "c" in proposal.missing(Plan((), ()), "a")
    assert proposal.due("bcd", 14.1, 4.0) == ["c"]
