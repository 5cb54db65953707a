"""Membership: suspicion, death, return, and probes whose number does not grow with the swarm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from p2p_diloco.core.messages import Summary
from p2p_diloco.core.roster import Roster
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion
from tests.core.conftest import dies, roster_of

RULES = Rules(run="run", fragments=((0,),), heartbeat_interval=1.0, heartbeat_timeout=10.0)


def says(incarnation: int = 1, epochs: tuple[int, ...] = (1,)) -> Summary:
    return Summary(incarnation, "worker", True, ModelVersion(), epochs, idle=False)


def roster(names: Iterable[str] = ()) -> Roster:
    """The roster of "me", which has heard all the named peers."""
    made = Roster("me", RULES, says())
    for name in names:
        made.heard(name)
        made.summarized(name, says())
    return made


def test_a_peer_lives_once_it_has_told_its_summary() -> None:
    """Neither a name in a plan nor a message without a Summary is enough."""
    r = roster()
    assert r.discovered("a")
    assert not r.live("a")
    assert r.heard("a")
    assert not r.live("a")
    r.summarized("a", says())
    assert r.live("a")
    assert r.alive() == ["a"]


def test_this_peer_is_live_and_not_among_the_others() -> None:
    """It can't be discovered."""
    r = roster("ba")
    assert r.live("me")
    assert not r.discovered("me")
    assert r.alive() == ["a", "b"]
    assert list(r.summaries()) == ["a", "b", "me"]
    assert r.summary("me") is r.mine


def test_a_peer_is_discovered_once() -> None:
    r = roster("a")
    assert not r.discovered("a")
    assert r.discovered("b")
    assert not r.discovered("b")


def test_a_second_failure_is_a_verdict() -> None:
    """The first refused dial makes the peer suspect, the second makes it dead; a third changes nothing."""
    r = roster("a")
    assert [r.failed("a"), r.live("a")] == [False, True]
    assert [r.failed("a"), r.live("a")] == [True, False]
    assert [r.failed("a"), r.live("a")] == [False, False]


def test_a_broken_link_and_a_refused_dial_are_a_verdict() -> None:
    r = roster("a")
    r.suspected("a")
    assert r.live("a")
    assert r.failed("a")


def test_being_heard_clears_a_suspicion() -> None:
    """Two failures with a sign of life between them make the peer suspect twice, but not dead."""
    r = roster("a")
    r.failed("a")
    assert not r.heard("a")
    assert not r.failed("a")
    assert r.live("a")


def test_being_heard_reverses_a_verdict() -> None:
    """A peer that counted as dead and sends a message is live again, and counts as new."""
    r = roster("abc")
    r.failed("a")
    r.failed("a")
    assert r.alive() == ["b", "c"]
    assert [r.heard("a"), r.heard("c")] == [True, False]
    assert r.alive() == ["a", "b", "c"]


def test_a_peer_that_left_is_away_until_its_next_life() -> None:
    """A message of the life that left does not bring it back."""
    r = roster("ab")
    known = says()
    r.departed("b", 1)
    assert not r.heard("b")
    assert not r.summarized("b", known)
    assert r.alive() == ["a"]
    assert r.summarized("b", replace(known, incarnation=known.incarnation + 1))
    assert r.alive() == ["a", "b"]


def test_a_peer_that_left_before_it_was_met_is_away_until_its_next_life() -> None:
    """A summary of the life that left does not bring it back."""
    r = roster()
    r.discovered("a")
    assert r.departed("a", 1)
    r.heard("a")
    assert not r.summarized("a", says())
    assert r.alive() == []
    assert r.summarized("a", says(incarnation=2))
    assert r.alive() == ["a"]


def test_a_late_goodbye_of_an_earlier_life_is_ignored() -> None:
    r = roster("a")
    assert r.summarized("a", says(incarnation=2))
    assert not r.departed("a", 1)
    assert r.alive() == ["a"]


def test_an_unknown_peer_is_remembered_and_not_live() -> None:
    """It fails, is suspected, leaves or is probed before it was known."""
    r = roster()
    r.suspected("a")
    assert r.failed("a")
    assert not r.failed("b")
    r.departed("c", 1)
    r.probing.probe("d", 0.0)
    assert sorted(r.members) == ["a", "b", "c", "d"]
    assert r.alive() == []
    assert r.summary("e") is None
    assert not r.live("e")


def test_the_summary_of_a_peer_that_is_gone_does_not_count() -> None:
    r = roster("ab")
    r.departed("a", 1)
    assert r.summary("a") is None
    assert not r.holds_state("a")
    assert sorted(r.summaries()) == ["b", "me"]


def test_a_live_peer_that_names_its_epochs_holds_a_state() -> None:
    r = roster("ab")
    r.summarized("b", says(epochs=()))
    assert [r.holds_state(p) for p in ("a", "b", "stranger")] == [True, False, False]


def test_the_state_is_shared_once_another_peer_has_held_it() -> None:
    """A peer without a state does not count; one that has held it counts also after it has left."""
    r = roster()
    assert not r.shared()
    r.heard("a")
    r.summarized("a", says(epochs=()))
    assert not r.shared()
    r.summarized("a", says())
    assert r.shared()
    r.departed("a", 1)
    assert r.shared()


def test_a_summary_with_a_lesser_model_is_an_older_one() -> None:
    """A life never goes back to a lesser model. A Summary of another life is always newer."""
    r = roster("b")
    r.summarized("b", replace(says(7), model=ModelVersion(0, 20, 2, "two")))
    assert not r.summarized("b", says(7, epochs=()))
    assert r.holds_state("b")
    assert r.summarized("b", says(8, epochs=()))
    assert not r.holds_state("b")


def test_another_incarnation_is_a_restart() -> None:
    """The first Summary of a peer is not a restart."""
    r = roster()
    r.heard("a")
    assert not r.summarized("a", says(7))
    assert not r.summarized("a", says(7, epochs=(2,)))
    assert r.summarized("a", says(8))


@pytest.mark.parametrize(
    ("epochs", "model", "elsewhere"),
    [
        ((3, 1), ModelVersion(0, 80, 7), False),
        ((3, 1), ModelVersion(0, 79, 7), True),
        ((9, 9), ModelVersion(0, 79, 27), True),
        ((9, 0), ModelVersion(0, 79, 18), False),  # behind in a shard
        ((3, 1), ModelVersion(1, 80, 7), True),
        ((), ModelVersion(), False),
    ],
)
def test_another_lineage_shows_by_its_samples(epochs: tuple[int, ...], model: ModelVersion, elsewhere: bool) -> None:
    """Along a lineage samples never fall: a peer as far in every shard, with fewer samples, is on another one."""
    mine = replace(says(epochs=(3, 1)), model=ModelVersion(0, 80, 7))
    theirs = replace(says(epochs=epochs), model=model)
    rules = replace(RULES, fragments=((0, 1), (2,)))
    assert Roster("me", rules, mine).elsewhere(theirs) == elsewhere
    assert not Roster("me", rules, says(epochs=())).elsewhere(theirs)


def test_another_lineage_shows_while_the_shards_here_are_at_unlike_epochs() -> None:
    """By what this peer held when they were last at one epoch, until it takes a state of another lineage itself."""
    r = Roster("me", replace(RULES, fragments=((0, 1), (2,))), says(epochs=()))
    theirs = replace(says(epochs=(3, 1)), model=ModelVersion(0, 79, 7))
    r.says(epochs=(3, 1), model=ModelVersion(0, 90, 8))
    assert not r.elsewhere(theirs)  # nothing tells what this lineage counted at these epochs
    r.says(epochs=(3, 1), model=ModelVersion(0, 80, 7))
    r.says(epochs=(3, 1), model=ModelVersion(0, 90, 8))
    assert r.elsewhere(theirs)
    assert not r.elsewhere(replace(theirs, model=ModelVersion(0, 80, 7)))
    r.says(epochs=(3, 1), model=ModelVersion(0, 80, 7))
    r.leaves_lineage()
    r.says(speed=1.0)  # of its state it says what it said before
    assert not r.elsewhere(theirs)


def test_changes_are_counted_that_rounds_hang_on() -> None:
    """A peer comes, moves on, changes its role or goes; or this one moves on. Speeds change nothing."""
    roster = roster_of("a", "b")
    summary = roster.summary("b")
    assert summary is not None
    seen = [roster.changes]
    words: list[dict[str, Any]] = [{"bandwidth": 7.0}, {"epochs": ()}, {"epochs": (2,)}, {"role": "aggregator"}]
    for word in words:
        roster.summarized("b", replace(summary, **word))
        seen.append(roster.changes)
    dies(roster, "b")
    seen.append(roster.changes)
    roster.says(epochs=())
    seen.append(roster.changes)
    assert [one == before for before, one in pairwise(seen)] == [True, False, False, False, False, False]


def standing(roster: Roster) -> object:
    """What rounds hang on: who is here, with which role, and whether it holds a state."""
    here = {peer: (m.presumed, m.live) + ((m.summary.role, bool(m.summary.epochs)) if m.live and m.summary else ())
            for peer, m in roster.members.items()}  # fmt: skip
    return roster.mine.role, bool(roster.mine.epochs), {peer: how for peer, how in here.items() if any(how)}


def happens(r: Roster, rng: Random, now: float) -> None:
    """Anything that a roster may be told."""
    peer, epochs, life = rng.choice("abcd"), rng.choice([(), (1,)]), rng.choice([1, 2])
    summary = replace(says(life, epochs), role=rng.choice(["worker", "aggregator"]))
    rng.choice([
        lambda: r.discovered(peer), lambda: r.name(peer), lambda: r.heard(peer),
        lambda: r.heard(peer) and r.summarized(peer, summary), lambda: r.failed(peer), lambda: r.suspected(peer),
        lambda: r.departed(peer, life), lambda: r.probing.probe(peer, now), lambda: r.probing.reached(peer),
        lambda: r.expire(now), lambda: r.says(epochs=epochs), lambda: r.passes_over(peer, now),
        lambda: rng.random() < 0.02 and r.expel(peer),
    ])()  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_no_change_that_rounds_hang_on_is_missed(seed: int) -> None:
    """Whatever happens to the roster, in any order."""
    rng, r, now = Random(seed), roster("a"), 0.0
    for _ in range(300):
        before, counted = standing(r), r.changes
        now += rng.choice([0.0, 1.0, 5.0])
        happens(r, rng, now)
        assert standing(r) == before or r.changes != counted


def test_a_peer_that_a_round_went_on_without_is_passed_for_a_while() -> None:
    """Unknown peers are not remembered for this."""
    r = roster("a")
    for peer in ("a", "x"):
        r.passes_over(peer, 100.0)
    r.probing.expire(99.0 + RULES.forgotten_after)
    assert r.passed("a")
    assert not r.passed("x")
    assert not r.passed("me")
    r.probing.expire(100.0 + RULES.forgotten_after)
    assert not r.passed("a")
