"""What the roles of a private run allow, and how often a member may ask for what costs much."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_diloco.core import messages as m
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.inbox import (
    ASKERS_MAX,
    FETCH_COST_MIN,
    FETCHES_AT_ONCE,
    FETCHES_PER_S,
    MESSAGES_AT_ONCE,
    MESSAGES_PER_S,
    Allowances,
    check_role,
)
from p2p_diloco.node.wire import Describe, GetSlice, ListSlices, Nudge, SliceBytes, SliceList
from tests.net.patience import awaited
from tests.node.conftest import entered, exchange

V, ID = Version(0, 0, 0, "0" * 32), ContributionId(1, 1)
READY = m.Ready(0, V, ID, ID, 1.0, 1, ())
SLICE = m.Slice(0, V, "a", ID, 0, "")


def probe(role: str) -> m.Probe:
    return m.Probe(m.Summary(1, role))


DATA = [ListSlices("a"), SliceList("a", 1), GetSlice("ab", 0), SliceBytes("ab", 0, 1)]
ALL = [Describe(), m.Ask(), m.Leave(1), m.Told((V,), ((),)), probe("worker"), probe("aggregator"), Nudge(1), *DATA]
ALL += [READY, SLICE, replace(READY, weight=0.0)]


def may_send(role: str | None, message: Any) -> bool:
    try:
        check_role(role, message)
    except Refusal:
        return False
    return True


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (None, ALL),
        ("worker", ALL),
        ("aggregator", [one for one in ALL if one not in (probe("worker"), Nudge(1), *DATA, READY, SLICE)]),
        ("observer", ALL[:3]),
        ("", []),
        ("unknown", []),
    ],
)
def test_a_role_allows_these_messages(role: str | None, allowed: list[Any]) -> None:
    """An observer changes nothing and is not seen as a peer; an aggregator neither trains nor says that it does. Only
    workers read and serve data."""
    assert [message for message in ALL if may_send(role, message)] == allowed


def test_a_newcomer_may_ask_for_everything_many_times() -> None:
    """Slice by slice, and again and again; the allowance grows back with time."""
    left, slices = Allowances(), 64
    assert all(left.fetch("p", 1 / slices, 0.0) for _ in range(slices * round(FETCHES_AT_ONCE)))
    assert not left.fetch("p", 1.0, 0.5)
    assert left.fetch("p", 1.0, 0.6 + 1 / FETCHES_PER_S)
    assert all(left.fetch("q", 0.0, 0.0) for _ in range(round(FETCHES_AT_ONCE / FETCH_COST_MIN)))
    assert not left.fetch("q", 0.0, 0.0)


def test_a_peer_brings_at_most_every_other_exchange_forward() -> None:
    """After a nudge each fragment has its early commit and a usual one, before the next nudge of that peer counts. If
    the nudge brought two exchanges forward, two usual ones follow."""
    left = Allowances()
    assert left.nudge("p", goal=12, commits=10, fragments=2)
    assert left.nudge("p", 12, 10, 2)  # what was granted; peers with one invitation may ask for the same exchange
    assert left.nudge("p", 11, 11, 2)
    assert [left.nudge("p", commits + 2, commits, 2) for commits in (11, 12, 13)] == [False] * 3
    assert left.nudge("q", 14, 12, 2)
    assert left.nudge("p", 18, 14, 2)
    assert [left.nudge("p", commits + 4, commits, 2) for commits in (16, 18, 21)] == [False] * 3
    assert left.nudge("p", 10**9, 22, 2)
    assert not left.nudge("p", 10**10, 29, 2)
    assert left.nudge("p", 10**10, 30, 2)


def test_a_group_may_send_more_messages_the_quicker_rounds_are_and_the_more_of_it_take_part() -> None:
    """Not the more peers it invents: those that no commit counts share what one peer may send. A run that begins a new
    generation, whose count of commits is lower, owes nobody anything."""
    left, most = Allowances(), round(MESSAGES_AT_ONCE)

    def allowed(peers: int, commits: int, now: float) -> int:
        return sum(left.message("grant", peers, commits, now) for _ in range(20 * most))

    assert allowed(0, 100, 0.0) == most
    assert allowed(1, 100, 2.0) == 2 * MESSAGES_PER_S
    assert allowed(1, 102, 2.0) == 2 * MESSAGES_PER_S
    assert allowed(8, 103, 2.0) == 8 * MESSAGES_PER_S
    assert allowed(8, 0, 2.0) == 0
    assert allowed(8, 1, 3.0) == 8 * 2 * MESSAGES_PER_S


@awaited
async def test_what_a_peer_may_send_follows_from_the_last_commits() -> None:
    """A peer that takes part in rounds may send as much as its part in them needs."""
    a, b = await entered("ab")
    inbox, asked = a.inbox.handler, dict[str, tuple[int, int]]()
    assert not any(inbox.hurries("b") for _ in range(2 * round(MESSAGES_AT_ONCE)))  # there was no round yet
    await exchange(a, b)

    def message(group: str, peers: int, commits: int, now: float) -> bool:
        asked[group] = peers, commits
        return group == "b"

    inbox._allowances = SimpleNamespace(message=message)
    assert [inbox.hurries(peer) for peer in ("b", "stranger")] == [False, True]
    assert asked == {"b": (1, 1), "stranger": (0, 1)}
    await b.stop()
    await a.exchange(1.0)
    assert [inbox.hurries(peer) for peer in ("b", "stranger")] == [False, True]
    assert asked == {"b": (1, 2), "stranger": (0, 2)}  # one commit without it says little


def test_allowances_take_bounded_memory() -> None:
    """However many identities ask."""
    left = Allowances()
    for number in range(ASKERS_MAX + 100):
        assert left.fetch(f"p{number}", 1.0, 0.0)
        assert left.nudge(f"p{number}", 1, 0, 1)
    assert len(left._states._left) == len(left._nudged) == ASKERS_MAX
