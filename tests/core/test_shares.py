"""Shares of the reduction: they sum to one, equal links share equally, and no other shares end a round sooner."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.core.plan import STEP, filled, rooms, rounded, shares

NAMES = [f"peer{i}" for i in range(6)]
MEMBERS = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 20).map(float), min_size=1)


def busy(peer: str, share: Fraction, links: Mapping[str, Fraction], idle: Collection[str] = ()) -> Fraction:
    """How long a peer's link is busy, counted message by message; ``idle`` peers contribute nothing."""
    others = [other for other in links if other != peer]
    contributed = Fraction(0) if peer in idle else 1 - share
    sent = contributed + sum(share for _ in others)
    received = (1 - share) + sum(share for other in others if other not in idle)
    return max(sent, received) / links[peer]


def makespan(parts: Mapping[str, Fraction], links: Mapping[str, Fraction], idle: Collection[str] = ()) -> Fraction:
    """How long the round takes: until the last link is done."""
    return max(busy(peer, parts.get(peer, Fraction(0)), links, idle) for peer in links)


def divisions(slices: int, peers: int) -> Iterator[tuple[int, ...]]:
    """All ways to give this many slices to this many peers."""
    if peers == 1:
        yield (slices,)
        return
    for first in range(slices + 1):
        yield from ((first, *rest) for rest in divisions(slices - first, peers - 1))


@settings(max_examples=200, deadline=None)
@given(members=MEMBERS, group=MEMBERS)
def test_shares_divide_the_whole_among_the_members(members: dict[str, float], group: dict[str, float]) -> None:
    """None is negative, and their sum is 1, exactly."""
    parts = shares({**group, **members}, members)
    assert sorted(parts) == sorted(members)
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == 1


@settings(max_examples=80, deadline=None)
@given(members=MEMBERS, others=MEMBERS, slices=st.integers(1, 4), one_is_idle=st.booleans())
def test_no_other_division_ends_the_round_sooner(
    members: dict[str, float], others: dict[str, float], slices: int, one_is_idle: bool
) -> None:
    """No distribution of a few slices is faster than the shares, which need not be whole slices: neither if all
    contribute, nor if one aggregator does not."""
    bandwidths = {**others, **members}
    links, idle = rounded(bandwidths), sorted(members)[:1] if one_is_idle and len(bandwidths) > 1 else []
    best = makespan(shares(bandwidths, members), links, idle)
    for counts in divisions(slices, len(members)):
        parts = {peer: Fraction(count, slices) for peer, count in zip(members, counts, strict=True)}
        assert makespan(parts, links, idle) >= best


@settings(max_examples=100, deadline=None)
@given(members=MEMBERS, others=MEMBERS, slices=st.integers(1, 40))
def test_a_plan_is_within_one_slice_of_the_optimum(
    members: dict[str, float], others: dict[str, float], slices: int
) -> None:
    """No link is busy for longer than the longest one under the best shares, plus one slice."""
    bandwidths = {**others, **members}
    room = rooms(slices, bandwidths, members)
    links = rounded({**others, **members})
    best = makespan(shares(bandwidths, members), links)
    for peer in members:
        one_more = max(busy(peer, Fraction(1), links) - busy(peer, Fraction(0), links), 0)
        assert busy(peer, Fraction(room[peer], slices), links) <= best + one_more / slices


@pytest.mark.parametrize("others", [1, 2, 5])
@pytest.mark.parametrize("ratio", [1.0, 1.1, 0.9])
def test_links_that_are_nearly_equal_share_equally(others: int, ratio: float) -> None:
    """Measurements vary: less than a tenth from the median counts as the median."""
    members = {"a": 37e6 * ratio, **dict.fromkeys(NAMES[:others], 37e6)}
    assert set(shares(members, members).values()) == {Fraction(1, 1 + others)}


def test_bandwidths_are_steps_from_the_median() -> None:
    """Differences of half a step are rounded away, whole steps stay; the median is 1, in any unit."""
    found = rounded({"a": 1e6, "b": 1e6, "c": 1e6 * STEP, "d": 0.6e6, "e": 1e18})
    assert found == {"a": 1, "b": 1, "c": Fraction(STEP), "d": Fraction(STEP) / 2, "e": 2**20}


def test_an_unknown_bandwidth_is_filled_with_the_median() -> None:
    """The median of the known ones; if none is known, all are equal."""
    assert filled({"a": 9.0, "b": 0.0, "c": 1.0, "d": 5.0}) == {"a": 9.0, "b": 5.0, "c": 1.0, "d": 5.0}
    assert filled({"a": 0.0, "b": 0.0}) == {"a": 1.0, "b": 1.0}
