"""Offers of direct connections, and their knocks."""

from __future__ import annotations

import pytest

from p2p_diloco.net.framing import FrameError
from p2p_diloco.net.listener import (
    KNOCK_BYTES,
    KNOCK_LIFE_S,
    KNOCKS_MAX,
    KNOCKS_PER_PEER_MAX,
    PORTS_MAX,
    Knocks,
    Offer,
)

OFFER = Offer(((4, 1), (6, 65535)), bytes(KNOCK_BYTES))


def test_an_offer_is_unpacked_as_it_was_packed() -> None:
    """Also with the most ports."""
    for offer in (OFFER, Offer(((4, 80),) * PORTS_MAX, b"k" * KNOCK_BYTES)):
        assert Offer.unpack(offer.pack()) == offer


@pytest.mark.parametrize("ports", [(), ((4, 1),) * (PORTS_MAX + 1), ((5, 1),), ((4, 0),)], ids=str)
def test_an_offer_with_ports_out_of_range_is_an_error(ports: tuple[tuple[int, int], ...]) -> None:
    """One such port is enough."""
    with pytest.raises(FrameError):
        Offer.unpack(Offer(ports, bytes(KNOCK_BYTES)).pack())


def test_a_knock_expires() -> None:
    """While any knock is valid, connections are expected."""
    now = 100.0
    knocks = Knocks(lambda: now)
    assert not knocks
    early = knocks.draw("a", sends=False)
    now += KNOCK_LIFE_S - 1
    late = knocks.draw("a", sends=False)
    assert knocks
    now += 2
    assert knocks.use(early) is None
    assert knocks.use(late) == ("a", False)
    assert not knocks


def test_the_number_of_knocks_is_limited() -> None:
    """A peer's newest replaces its own oldest only; beyond the total limit the oldest of all goes."""
    knocks = Knocks(lambda: 100.0)
    other = knocks.draw("other", sends=False)
    drawn = [knocks.draw("greedy", sends=False) for _ in range(KNOCKS_PER_PEER_MAX + 1)]
    assert knocks.use(drawn[0]) is None
    assert knocks.use(other) == ("other", False)
    for number in range(KNOCKS_MAX):
        knocks.draw(f"peer {number}", sends=False)
    assert knocks.use(drawn[1]) is None
    assert len(knocks._open) == KNOCKS_MAX
