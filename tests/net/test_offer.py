"""Offers of direct connections, and their tickets."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.net.listener import (
    CERTIFICATE_BYTES_MAX,
    PORTS_MAX,
    TICKET_BYTES,
    TICKET_LIFE_S,
    TICKETS_MAX,
    TICKETS_PER_PEER_MAX,
    Offer,
    OfferError,
    Tickets,
)

OFFER = Offer(((4, 1), (6, 65535)), b"certificate", bytes(TICKET_BYTES))
CONTENT = msgpack.unpackb(OFFER.pack())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_offer_is_unpacked_as_it_was_packed() -> None:
    """With the types that it had."""
    assert Offer.unpack(OFFER.pack()) == OFFER


@pytest.mark.parametrize(
    "change",
    [
        {"ports": []},
        {"ports": [[4, 1]] * (PORTS_MAX + 1)},
        {"ports": [[5, 1]]},
        {"ports": [[4, 0]]},
        {"ports": [[4, 65536]]},
        {"ports": [[4, True]]},
        {"ports": [[4]]},
        {"ports": 4},
        {"certificate": b""},
        {"certificate": bytes(CERTIFICATE_BYTES_MAX + 1)},
        {"certificate": "text"},
        {"ticket": bytes(TICKET_BYTES - 1)},
        {"ticket": None},
    ],
    ids=str,
)
def test_an_offer_with_a_field_out_of_range_is_an_error(change: dict[str, object]) -> None:
    """One such field is enough; without the change the same map is an offer."""
    with pytest.raises(OfferError):
        Offer.unpack(msgpack.packb({**CONTENT, **change}))


@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.integers(-5, 70000) | st.binary(max_size=50) | st.sampled_from(sorted(CONTENT)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(CONTENT)), inner, max_size=3),
    max_leaves=8,
).map(msgpack.packb))  # fmt: skip
def test_other_bytes_are_an_offer_error(data: bytes) -> None:
    """No bytes raise anything else."""
    with pytest.raises(OfferError):
        Offer.unpack(data)


def test_a_ticket_names_its_peer_once() -> None:
    """A ticket's first use returns the peer for which it was drawn; a second use returns none."""
    tickets = Tickets(Clock())
    a, b = tickets.draw("a"), tickets.draw("b")
    assert tickets.redeem(b) == "b"
    assert tickets.redeem(a) == "a"
    assert [tickets.redeem(ticket) for ticket in (a, b, bytes(TICKET_BYTES))] == [None, None, None]


@pytest.mark.parametrize("place", [8, TICKET_BYTES - 1])
def test_a_wrong_secret_uses_the_ticket_up(place: int) -> None:
    """A ticket's secret can't be tried twice."""
    tickets = Tickets(Clock())
    right = bytearray(tickets.draw("a"))
    wrong = bytearray(right)
    wrong[place] ^= 1
    assert tickets.redeem(bytes(wrong)) is None
    assert tickets.redeem(bytes(right)) is None


def test_a_ticket_expires() -> None:
    """While any ticket is valid, connections are expected."""
    clock = Clock()
    tickets = Tickets(clock)
    assert not tickets
    early = tickets.draw("a")
    clock.now += TICKET_LIFE_S - 1
    late = tickets.draw("a")
    assert tickets
    clock.now += 2
    assert tickets.redeem(early) is None
    assert tickets.redeem(late) == "a"
    assert not tickets


def test_the_number_of_tickets_is_limited() -> None:
    """A peer's newest replaces its own oldest only; beyond the total limit the oldest of all goes."""
    tickets = Tickets(Clock())
    other = tickets.draw("other")
    drawn = [tickets.draw("greedy") for _ in range(TICKETS_PER_PEER_MAX + 1)]
    assert tickets.redeem(drawn[0]) is None
    assert tickets.redeem(other) == "other"
    for number in range(TICKETS_MAX):
        tickets.draw(f"peer {number}")
    assert tickets.redeem(drawn[1]) is None
    assert len(tickets._open) == TICKETS_MAX
