"""A peer's own contribution on its way: sent once, sent again where it was lost, and withdrawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from p2p_diloco.core.carry import Carried as Carried
from p2p_diloco.core.events import Delivered, Merge, Send, SendFailed
from p2p_diloco.core.messages import Want
from p2p_diloco.core.sending import Sending
from p2p_diloco.core.version import ContributionId
from tests.core.conftest import PLAIN, Peer


def test_a_contribution_is_sent_once(peer: Any, life: int) -> None:
    """When it is ready; again at the next tick only if it was not delivered."""
    b = peer("b", group="ab", round_timeout=60.0)
    (send,) = b.contribute()
    assert send == Send("a", b.replica.logs[0].own.mine)
    assert (send.message.base, send.message.id, send.message.weight) == (b.held, ContributionId(life, 1), 2.0)
    assert (send.message.samples, send.message.payload) == (5, "Δ")
    assert b.pass_time(2.0) == []
    assert b.feed(SendFailed("a", send.message, gone=False)) == []
    assert b.pass_time(1.0) == [send]
    assert b.feed(Delivered("a", send.message)) == []
    assert b.pass_time(30.0) == []


def test_a_receipt_for_another_contribution_or_from_another_peer_is_ignored(peer: Any) -> None:
    b = peer("b", group="ab")
    (send,) = b.contribute()
    old = b.contribution(b.held, 9)
    b.feed(SendFailed("a", old, gone=False))
    b.feed(SendFailed("c", send.message, gone=False))
    assert b.pass_time(1.0) == []
    b.feed(Delivered("c", send.message))
    b.feed(SendFailed("a", send.message, gone=False))
    assert b.pass_time(1.0) == [send]


def test_an_aggregator_that_restarted_is_sent_the_contribution_again(peer: Any) -> None:
    """Its process lost it, even if its death was not noticed."""
    b = peer("b", group="ab")
    (send,) = b.contribute()
    b.feed(Delivered("a", send.message))
    assert b.meet("a", incarnation=2) == [send]


def test_a_contribution_that_is_asked_for_is_sent_again(peer: Any) -> None:
    """It was lost, or came too early. A request on another base is not answered."""
    b = peer("b")
    (send,) = b.contribute()
    assert b.hear("a", Want(0, b.held)) == []  # it is being sent
    b.feed(Delivered("a", send.message))
    assert b.hear("a", Want(0, b.version(2))) == []
    assert b.hear("a", Want(0, b.held)) == [send]


def test_a_contribution_is_withdrawn_before_its_memory_is_overwritten(peer: Any) -> None:
    """A fork ends the exchange before the contribution is counted. From then on the trainer's memory holds the next
    one."""
    a = peer("a", fragments=((0,), (1,)))
    a.contribute(0)
    assert (a.replica.logs[0].own.mine is not None, list(a.replica.logs[0].round.inbox)) == (True, ["a"])
    a.replica.own.flight = None  # as after the fork
    assert a.feed(Merge())[0].due == (0,)
    assert (a.replica.logs[0].own.mine, a.replica.logs[0].round.inbox) == (None, {})


# -- the record of one contribution, by itself


def sending() -> Sending:
    """The record of b's first contribution, on epoch 1."""
    own = Sending("b", PLAIN)
    own.begin(Peer.contribution(Peer.version(1)))
    return own


def test_a_contribution_is_sent_to_a_peer_that_neither_has_it_nor_will_soon() -> None:
    own = sending()
    assert own.send_to("a") == [Send("a", own.mine)]
    assert own.send_to("a") == []  # it is being sent
    own.delivered("a", own.mine, ok=True)
    assert own.send_to("a") == []  # it was delivered
    assert own.send_to("c") == [Send("c", own.mine)]
    own.delivered("c", own.mine, ok=False)
    assert own.send_to("c") == [Send("c", own.mine)]


def test_a_contribution_is_sent_again_when_its_receiver_lost_it_or_an_aggregator_lacks_it() -> None:
    for happens in (lambda own: own.wanted(), lambda own: own.forgotten_by("a"), lambda own: own.begin(own.mine)):
        own = sending()
        own.send_to("a")
        own.delivered("a", own.mine, ok=True)
        own.forgotten_by("c")
        assert own.send_to("a") == []
        happens(own)
        assert own.send_to("a") == [Send("a", own.mine)]


def test_a_peer_that_dies_while_a_contribution_is_under_way_has_not_got_it() -> None:
    own = sending()
    own.send_to("a")
    own.lost("c")
    assert own.send_to("a") == []
    own.lost("a")
    assert own.send_to("a") == [Send("a", own.mine)]


def test_an_aggregators_own_contribution_is_not_handed_over_again() -> None:
    own = sending()
    own.handed = "b"
    own.wanted()
    assert own.handed == "b"


def test_an_exchange_goes_on_while_the_version_stays_and_the_shard_is_due() -> None:
    own, state, base = sending(), Peer.state(0, 1), Peer.version(1)
    assert own.goes_on(state, base, due=True)
    assert not own.goes_on(state, base, due=False)
    assert not own.goes_on(state, Peer.version(0), due=True)
    assert not own.goes_on(None, base, due=True)
    assert [own.sendable(version) for version in (base, Peer.version(2), None)] == [True, False, False]


def test_progress_is_given_up_after_carry_rounds_more_sendings() -> None:
    own = Sending("b", replace(PLAIN, carry_rounds=2))
    assert [own.gives_up(Carried(sends=sends)) for sends in (1, 2, 3)] == [False, False, True]
