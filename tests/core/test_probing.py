"""Probes: which peers they go to, and when silence or a one-way link makes a peer dead."""

from __future__ import annotations

from collections import Counter

import pytest

from p2p_diloco.core.probing import PROBED_EACH_INTERVAL
from p2p_diloco.core.roster import Roster
from tests.core.test_roster import RULES, roster, says


def test_peers_that_are_gone_for_long_are_forgotten() -> None:
    """So churn leaves no entries behind."""
    r = roster("abc")
    r.failed("a")
    r.failed("a")
    r.departed("b", 1)
    r.probing.expire(1000.0)
    r.probing.expire(999.0 + r.rules.forgotten_after)
    assert set(r.members) == {"a", "b", "c"}
    r.probing.expire(1000.0 + r.rules.forgotten_after)
    assert set(r.members) == {"c"}


def test_the_dead_take_no_probes_from_the_living() -> None:
    """However many are dead, each live peer is probed in its turn; one dead peer is probed an interval."""
    r = roster([f"dead{i}" for i in range(50)] + ["x", "y"])
    for i in range(50):
        r.failed(f"dead{i}")
        r.failed(f"dead{i}")
    asked = r.probing.to_probe(set(), 1000.0)
    assert {"x", "y"} <= set(asked)
    assert len(asked) == 3


def test_silence_is_a_verdict_after_the_timeout() -> None:
    """It counts from the oldest unanswered probe; later probes don't delay it, and it is reported once."""
    r = roster("ab")
    r.probing.probe("a", 5.0)
    r.probing.probe("a", 14.0)
    assert r.probing.expire(14.9) == []
    assert r.probing.expire(15.0) == ["a"]
    assert not r.live("a")
    assert r.probing.expire(16.0) == []
    assert r.live("b")  # it was sent no probe


def test_a_peer_that_is_heard_and_never_reached_is_dead() -> None:
    """A link that works only one way counts as cut. Messages from the peer do not change that; an arrival does."""
    r = roster("ab")
    for second in range(RULES.deaf_after):
        assert r.probing.expire(float(second)) == []
        for peer in "aabb":  # however many are sent in one interval
            r.probing.probe(peer, float(second))
            r.heard(peer)
        r.probing.reached("b")
    assert r.probing.expire(30.0) == ["a"]
    assert "no probe has reached it in 20 intervals" in r.probing.why_dead("a")
    assert not r.heard("a")
    assert not r.live("a")
    r.probing.probe("a", 40.0)
    r.probing.reached("a")
    assert r.heard("a")
    assert r.live("a")
    assert r.probing.expire(41.0) == []


def test_only_intervals_with_a_probe_since_the_last_arrival_speak_against_a_link() -> None:
    """In the others nothing could have arrived."""
    r = roster("ab")
    r.probing.probe("a", 0.0)
    r.heard("a")
    for second in range(2 * RULES.deaf_after):
        r.probing.reached("b")
        assert r.probing.expire(float(second)) == []
    assert [r.members[peer].unreached for peer in "ab"] == [1, 0]


def test_probes_of_a_dead_peer_say_nothing_of_its_link() -> None:
    """It may be away for long; when it is heard again it is live at once."""
    r = roster("a")
    r.probing.probe("a", 0.0)
    assert r.probing.expire(10.0) == ["a"]
    for second in range(10, 100):
        r.probing.probe("a", float(second))
        assert r.probing.expire(float(second)) == []
    assert r.heard("a")
    assert r.live("a")


def test_an_answer_in_time_stops_the_clock() -> None:
    r = roster("a")
    r.probing.probe("a", 0.0)
    r.heard("a")
    assert r.probing.expire(100.0) == []
    r.probing.probe("a", 100.0)
    assert r.probing.expire(109.9) == []
    assert r.probing.expire(110.0) == ["a"]


def test_a_peer_that_left_does_not_die() -> None:
    """Leaving is not reported as a failure."""
    r = roster("a")
    r.probing.probe("a", 0.0)
    r.departed("a", 1)
    assert r.probing.expire(100.0) == []


def test_a_frozen_process_forgives_silence() -> None:
    """After this process stood still, earlier probes prove nothing: the clock starts again for all of them."""
    r = roster("ab")
    r.probing.probe("a", 0.0)
    r.probing.forgive(50.0)
    assert r.probing.expire(59.9) == []
    assert r.probing.expire(60.0) == ["a"]
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
        probed = r.probing.to_probe((), float(second))
        assert len(probed) == PROBED_EACH_INTERVAL == 3
        for peer in probed:
            r.probing.probe(peer, float(second))
            r.heard(peer)
        turns.update(probed)
    assert set(turns) == set(names)
    assert turns.total() == 102


def test_peers_that_are_waited_for_are_probed_every_time() -> None:
    """Each once, besides a few others."""
    r = roster("abcdef")
    for second in range(5):
        probed = r.probing.to_probe({"f", "e"}, float(second))
        assert probed[:2] == ["e", "f"]
        assert len(probed) == 5
        assert set(probed[2:]) <= set("abcd")
        for peer in probed:
            r.probing.probe(peer, float(second))


def test_peers_that_were_not_probed_for_longest_come_first() -> None:
    r = roster("abcde")
    for time, peer in enumerate("edcba"):
        r.probing.probe(peer, float(time))
    assert r.probing.to_probe((), 9.0) == ["e", "d", "c"]


def test_the_dead_are_probed_again_now_and_then() -> None:
    """So that both sides of a partition find each other; but only once every timeout."""
    r = roster("a")
    r.probing.probe("a", 0.0)
    r.failed("a")
    r.failed("a")
    assert r.probing.to_probe((), 9.9) == []
    assert r.probing.to_probe((), 10.0) == ["a"]


@pytest.mark.parametrize("watched", [(), ("b",)])
def test_a_peer_that_left_is_probed_only_if_it_is_waited_for(watched: tuple[str, ...]) -> None:
    r = roster("ab")
    r.departed("a", 1)
    assert r.probing.to_probe(watched, 1e9) == ["b"]


def test_a_peer_lives_whose_answers_come_late_through_a_relay() -> None:
    """As long as an answer takes less than the timeout, in either direction."""
    r = roster("a")
    late = int(RULES.dead_after) - 1
    for second in range(60):
        r.probing.probe("a", float(second))
        if second >= late:
            r.probing.reached("a")
            r.heard("a")
        assert r.probing.expire(second + 0.5) == []
    assert r.live("a")


def test_a_peer_that_is_heard_and_reached_only_through_a_relay_is_not_deaf() -> None:
    """The receipt of a probe comes by the same way as the probe. It also revives a peer that was dead for deafness."""
    r = roster("a")
    for second in range(3 * RULES.deaf_after):
        r.probing.probe("a", float(second))
        r.heard("a")
        if second % (RULES.deaf_after - 1) == 0:
            r.probing.reached("a")
        assert r.probing.expire(float(second)) == []
    for second in range(RULES.deaf_after):
        r.probing.probe("a", 100.0 + second)
        r.heard("a")
        r.probing.expire(100.0 + second)
    assert not r.live("a")
    assert not r.heard("a")
    r.probing.reached("a")
    assert r.heard("a")
    assert r.live("a")
