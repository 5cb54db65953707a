"""Verdicts: a finding of one peer expels an owner only if another peer finds the same. Contact: since when a peer was
live without a break."""

from __future__ import annotations

import math

from p2p_diloco.core.messages import Choice
from p2p_diloco.core.version import Version
from p2p_diloco.node.examining import Case, Contact
from p2p_diloco.node.verdicts import CLAIMED_MAX, PROOFS_BYTES, PROOFS_MAX, Verdicts
from p2p_diloco.node.wire import OfMean


def case(owner: str, nbytes: int = 1, *, proves: bool = True) -> Case:
    """A mean of this owner."""
    mean, base = OfMean(0, f"of {owner}", 0, owner, "hash"), Version(0, 0, 2, "base")
    return Case(mean, base, b"", Choice("c", 0, ()), nbytes, proves=proves)


def found(verdicts: Verdicts, *owners: str, now: float = 0.0) -> list[str]:
    """Record findings about these owners, while others live. Returns the peers that are expelled now."""
    for owner in owners:
        verdicts.finds(case(owner), "a lie", now)
    return [case.owner for case in verdicts.settle(lambda owner: {"z"})]


def test_a_finding_expels_if_another_peer_confirms_it() -> None:
    # a finding expels once another peer has found the same
    verdicts = Verdicts(10.0)
    assert found(verdicts, "b") == []
    verdicts.accused("b", "c")
    assert found(verdicts) == ["b"]
    assert verdicts.expelled == {"b": "a lie"}
    assert found(verdicts, "b") == []

    # no accusation expels without a finding of this peer
    verdicts = Verdicts(10.0)
    verdicts.accused("b", "c")
    assert found(verdicts) == []
    assert found(verdicts, "d") == []
    assert found(verdicts, "b") == ["b"]

    # where no other peer could find it a finding expels at once
    verdicts = Verdicts(10.0)
    verdicts.finds(case("b"), "a lie", 0.0)
    assert [case.owner for case in verdicts.settle(lambda owner: set())] == ["b"]

    # a finding that is not confirmed becomes overdue and expels still when it is
    verdicts = Verdicts(10.0)
    found(verdicts, "b", "c")
    assert verdicts.overdue(10.0) == []
    assert verdicts.overdue(10.1) == ["b", "c"]
    verdicts.doubt = "this machine"
    verdicts.accused("c", "d")
    assert found(verdicts) == ["c"]
    assert verdicts.doubt == ""
    assert verdicts.overdue(10.1) == ["b"]

    # a peer that accused wrongly confirms nothing
    verdicts = Verdicts(10.0)
    verdicts.accused("b", "c")
    verdicts.accused("d", "c")
    verdicts.acquitted({"c"})
    assert verdicts.mistaken == {"c"}
    assert found(verdicts, "b", "d") == []

    # A finding that nothing proves is dropped if no other peer confirms it. Perhaps only this peer was not shown
    # what the commit was made of. It does not doubt itself for that.
    verdicts = Verdicts(10.0)
    verdicts.finds(case("b", proves=False), "it hides", 0.0)
    verdicts.finds(case("c"), "a wrong mean", 0.0)
    assert found(verdicts) == []
    assert verdicts.overdue(10.1) == ["c"]
    verdicts.accused("b", "d")
    assert found(verdicts) == []
    verdicts.accused("c", "d")
    assert found(verdicts) == ["c"]


def test_what_is_remembered_of_proofs_and_accusations_is_bounded() -> None:
    # The proofs that are kept are bounded in number and size. The newest is kept however long it is. A lie that
    # nothing shows is told only while others can find it.
    verdicts = Verdicts(10.0)
    for n in range(PROOFS_MAX + 2):
        verdicts.accused(f"p{n}", "c")
        found(verdicts, f"p{n}")
    assert [kept.owner for kept in verdicts.to_tell()] == [f"p{n}" for n in range(2, PROOFS_MAX + 2)]
    assert verdicts.proof(case("p2").mean) is not None
    assert verdicts.proof(case("p1").mean) is None
    verdicts.finds(case("long", PROOFS_BYTES + 1), "a lie", 0.0)
    verdicts.finds(case("silent", proves=False), "a lie", 0.0)
    assert [told.owner for told in verdicts.to_tell()][:2] == ["long", "silent"]
    verdicts.settle(lambda owner: set())
    assert [kept.owner for kept in verdicts.to_tell()] == ["long"]
    assert len(verdicts.expelled) == PROOFS_MAX + 4

    # Of each peer only the last accusations are remembered. A peer that accuses everybody displaces no other
    # peer's accusations, and none count of a peer that is gone.
    verdicts = Verdicts(10.0)
    verdicts.accused("b", "d")
    for n in range(CLAIMED_MAX + 1):
        verdicts.accused(f"p{n}", "c")
    assert found(verdicts, "p0") == []
    assert found(verdicts, "p1", "b") == ["p1", "b"]
    verdicts.forget(lambda peer: peer != "c")
    assert found(verdicts, "p2") == []


# -- contact


def test_contact_is_without_a_break() -> None:
    # a peer that was missing once counts anew
    contact = Contact(1.0)
    for now, alive in enumerate(["ab", "ab", "a", "ab"]):
        contact.look(alive, float(now))
    assert (contact.since("a"), contact.since("b"), contact.since("c")) == (0.0, 3.0, math.inf)

    # a suspension of this process is a break with all
    contact = Contact(1.0)
    for now in (0.0, 1.0, 2.9):  # as late as a busy machine
        contact.look("a", now)
    assert contact.since("a") == 0.0
    contact.look("a", 60.0)
    assert contact.since("a") == 60.0
