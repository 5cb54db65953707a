"""A peer that has lied counts as dead for good: nothing that it sends has an effect, and no round waits for it."""

from __future__ import annotations

from typing import Any

from p2p_diloco.core.events import Discovered, Expelled, Note, Send
from p2p_diloco.core.messages import Probe, TakeOver
from tests.core.conftest import Peer


def test_the_next_candidate_aggregates_in_the_place_of_an_expelled_one(peer: Any) -> None:
    b: Peer = peer("b")
    assert b.replica.logs[0].lead.holder == "a"
    effects = b.feed(Expelled("a", "its mean is wrong"))
    assert Note("expelled", "a is expelled: its mean is wrong") in effects
    assert b.replica.logs[0].lead.holder == "b"
    assert Send("c", TakeOver(0, b.held, 1)) in effects
    assert not any(isinstance(e, Send) and e.to == "a" for e in effects)


def test_it_is_expelled_once(peer: Any) -> None:
    b: Peer = peer("b")
    b.feed(Expelled("a", "a lie"))
    assert b.feed(Expelled("a", "another lie")) == []


def test_nothing_that_it_sends_has_an_effect(peer: Any) -> None:
    b: Peer = peer("b")
    summary = b.replica.roster.summary("a")
    b.feed(Expelled("a", "a lie"))
    for message in (Probe(summary), TakeOver(0, b.held, 3), b.contribution(b.held)):
        assert b.hear("a", message) == []
    assert not b.replica.roster.live("a")
    assert b.replica.logs[0].lead.holder == "b"


def test_it_is_neither_probed_nor_forgotten(peer: Any) -> None:
    """If it were forgotten, a plan of a peer that doesn't know could make it presumed live again."""
    b: Peer = peer("b")
    b.feed(Expelled("a", "a lie"))
    effects = b.pass_time(2 * b.rules.forgotten_after)
    effects += b.feed(Discovered("a"))
    assert not any(isinstance(e, Send) and e.to == "a" for e in effects)
    assert b.replica.roster.expelled("a")
    b.replica.roster.name("a")
    assert not b.replica.roster.presumed("a")


def test_an_unknown_peer_can_be_expelled(peer: Any) -> None:
    """Another peer's audit may end before this peer has met the liar."""
    b: Peer = peer("b")
    b.feed(Expelled("z", "a lie"))
    assert b.hear("z", Probe(b.replica.roster.summary("a"))) == []
    assert not b.replica.roster.live("z")
