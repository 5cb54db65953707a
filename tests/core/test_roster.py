"""Membership: suspicion, verdicts, their reversal, and probes whose number does not grow with the swarm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from p2p_diloco.core.messages import Summary
from p2p_diloco.core.roster import PROBED_EACH_INTERVAL, Roster
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion

RULES = Rules(run="run", fragments=((0,),), heartbeat_interval=1.0, heartbeat_timeout=10.0)


def says(incarnation: int = 1, epochs: tuple[int, ...] = (1,)) -> Summary:
    return Summary(incarnation, "worker", True, ModelVersion(), epochs, idle=False)


def roster(names: Iterable[str] = ()) -> Roster:
    """The roster of "me", which has heard all the names."""
    made = Roster("me", RULES, says())
    for name in names:
        made.heard(name)
        made.summarized(name, says())
    return made


def test_a_peer_lives_once_it_has_told_its_summary() -> None:
    """Being named by others is not enough, nor is a message without a summary."""
    r = roster()
    assert r.discovered("a")
    assert not r.live("a")
    assert r.heard("a")
    assert not r.live("a")
    r.summarized("a", says())
    assert r.live("a")
    assert r.alive() == ["a"]


def test_this_peer_is_live_and_not_among_the_others() -> None:
    """It is never discovered."""
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
    """The first refused dial is a suspicion, the second makes the peer dead; a third changes nothing."""
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
    """Two failures with a sign of life between them are two suspicions, no verdict."""
    r = roster("a")
    r.failed("a")
    assert not r.heard("a")
    assert not r.failed("a")
    assert r.live("a")


def test_being_heard_reverses_a_verdict() -> None:
    """A peer that was taken for dead and speaks is there again, and counts as new."""
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


def test_peers_that_are_gone_for_long_are_forgotten() -> None:
    """So churn leaves nothing behind."""
    r = roster("abc")
    r.failed("a")
    r.failed("a")
    r.departed("b", 1)
    r.expire(1000.0)
    r.expire(999.0 + r.rules.forgotten_after)
    assert set(r.members) == {"a", "b", "c"}
    r.expire(1000.0 + r.rules.forgotten_after)
    assert set(r.members) == {"c"}


def test_the_dead_take_no_probes_from_the_living() -> None:
    """However many are dead, each living peer is probed in its turn; of the dead, one an interval."""
    r = roster([f"dead{i}" for i in range(50)] + ["x", "y"])
    for i in range(50):
        r.failed(f"dead{i}")
        r.failed(f"dead{i}")
    asked = r.to_probe(set(), 1000.0)
    assert {"x", "y"} <= set(asked)
    assert len(asked) == 3


def test_an_unknown_peer_is_remembered_and_not_live() -> None:
    """It fails, is suspected, leaves or is probed before it was known."""
    r = roster()
    r.suspected("a")
    assert r.failed("a")
    assert not r.failed("b")
    r.departed("c", 1)
    r.probe("d", 0.0)
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


def test_a_summary_with_a_lesser_model_is_an_older_one() -> None:
    """A life never goes back to a lesser model. The summary of another life is the newer one."""
    r = roster("b")
    r.summarized("b", replace(says(7), model=ModelVersion(0, 20, 2, "two")))
    assert not r.summarized("b", says(7, epochs=()))
    assert r.holds_state("b")
    assert r.summarized("b", says(8, epochs=()))
    assert not r.holds_state("b")


def test_another_incarnation_is_a_restart() -> None:
    """The first summary of a peer is none."""
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
    """Along a lineage samples never fall: a peer that is as far in every shard, with fewer, is on another one."""
    mine = replace(says(epochs=(3, 1)), model=ModelVersion(0, 80, 7))
    theirs = replace(says(epochs=epochs), model=model)
    rules = replace(RULES, fragments=((0, 1), (2,)))
    assert Roster("me", rules, mine).elsewhere(theirs) == elsewhere
    uneven = replace(mine, model=ModelVersion(0, 80, 8))
    assert Roster("me", rules, uneven).elsewhere(theirs) == (model.generation == 1)
    assert not Roster("me", rules, says(epochs=())).elsewhere(theirs)


def test_silence_is_a_verdict_after_the_timeout() -> None:
    """Counted from the oldest unanswered probe; later probes don't put it off, and it is passed once."""
    r = roster("ab")
    r.probe("a", 5.0)
    r.probe("a", 14.0)
    assert r.expire(14.9) == []
    assert r.expire(15.0) == ["a"]
    assert not r.live("a")
    assert r.expire(16.0) == []
    assert r.live("b")  # it was asked nothing


def test_a_peer_that_is_heard_and_never_reached_is_dead() -> None:
    """A link that carries nothing one way is no link. Being heard does not reverse that; something that arrives does."""
    r = roster("ab")
    for second in range(RULES.deaf_after):
        assert r.expire(float(second)) == []
        for peer in "aabb":  # however many leave in one interval
            r.probe(peer, float(second))
            r.heard(peer)
        r.reached("b")
    assert r.expire(30.0) == ["a"]
    assert "no probe has arrived there in 20 intervals" in r.why_dead("a")
    assert not r.heard("a")
    assert not r.live("a")
    r.probe("a", 40.0)
    r.reached("a")
    assert r.heard("a")
    assert r.live("a")
    assert r.expire(41.0) == []


def test_probes_of_a_dead_peer_say_nothing_of_its_link() -> None:
    """It may be away for long; when it is heard again it is back at once."""
    r = roster("a")
    r.probe("a", 0.0)
    assert r.expire(10.0) == ["a"]
    for second in range(10, 100):
        r.probe("a", float(second))
        assert r.expire(float(second)) == []
    assert r.heard("a")
    assert r.live("a")


def test_an_answer_in_time_stops_the_clock() -> None:
    r = roster("a")
    r.probe("a", 0.0)
    r.heard("a")
    assert r.expire(100.0) == []
    r.probe("a", 100.0)
    assert r.expire(109.9) == []
    assert r.expire(110.0) == ["a"]


def test_a_peer_that_left_does_not_die() -> None:
    """Leaving is no failure, and is not reported as one."""
    r = roster("a")
    r.probe("a", 0.0)
    r.departed("a", 1)
    assert r.expire(100.0) == []


def test_a_frozen_process_forgives_silence() -> None:
    """After standing still, what was asked before proves nothing: the clock starts again for all that were asked."""
    r = roster("ab")
    r.probe("a", 0.0)
    r.forgive(50.0)
    assert r.expire(59.9) == []
    assert r.expire(60.0) == ["a"]
    assert r.members["b"].unanswered is None


def test_probes_do_not_grow_with_the_swarm() -> None:
    """An interval costs as many probes with 100 members as with 10, and each member has its turn."""
    r = Roster("me", RULES, says())
    names = [f"peer{i:03}" for i in range(100)]
    for name in names:
        r.heard(name)
        r.summarized(name, says())
    turns = Counter[str]()
    for second in range(34):
        probed = r.to_probe((), float(second))
        assert len(probed) == PROBED_EACH_INTERVAL == 3
        for peer in probed:
            r.probe(peer, float(second))
            r.heard(peer)
        turns.update(probed)
    assert set(turns) == set(names)
    assert turns.total() == 102


def test_peers_that_are_waited_for_are_probed_every_time() -> None:
    """Once each, beside the few others; this peer never."""
    r = roster("abcdef")
    for second in range(5):
        probed = r.to_probe({"f", "e", "me"}, float(second))
        assert probed[:2] == ["e", "f"]
        assert len(probed) == 5
        assert set(probed[2:]) <= set("abcd")
        for peer in probed:
            r.probe(peer, float(second))


def test_peers_that_were_not_probed_for_longest_come_first() -> None:
    r = roster("abcde")
    for time, peer in enumerate("edcba"):
        r.probe(peer, float(time))
    assert r.to_probe((), 9.0) == ["e", "d", "c"]


def test_the_dead_are_probed_again_now_and_then() -> None:
    """So that two halves of a partition find each other; but only as often as the timeout says."""
    r = roster("a")
    r.probe("a", 0.0)
    r.failed("a")
    r.failed("a")
    assert r.to_probe((), 9.9) == []
    assert r.to_probe((), 10.0) == ["a"]


@pytest.mark.parametrize("watched", [(), ("b",)])
def test_a_peer_that_left_is_probed_only_if_it_is_waited_for(watched: tuple[str, ...]) -> None:
    r = roster("ab")
    r.departed("a", 1)
    assert r.to_probe(watched, 1e9) == ["b"]
