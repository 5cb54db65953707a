"""The sentence that tells a user what a replica waits for."""

from __future__ import annotations

from typing import Any

from p2p_diloco.core.events import Found
from p2p_diloco.core.messages import Held, Promise
from p2p_diloco.core.version import model_version
from tests.core.conftest import (
    TWO,
    commits_to,
    computed,
    gathering,
    held_by,
    joined_by,
    moves_on,
    round_alone,
    running,
    solo,
)

# -- synchronous


def test_the_sentence_names_the_donor_the_contributors_or_the_aggregator(peer: Any) -> None:
    n = peer("n", epoch=None, live="", fragments=TWO)
    assert n.replica.waiting() == "waiting for a peer that holds the state of the run"
    n.meet("b", model=model_version([n.version(7)] * 2), epochs=(7, 7))
    assert n.replica.waiting() == "fetching the state of the run from b: 0 of 2 shards"
    a = peer("a", group="abc")
    assert a.replica.waiting() == ""
    a.contribute()
    assert a.replica.waiting() == "waiting for the contributions of b, c"
    b = peer("b", group="abcd", fragments=((0, 1),))
    b.contribute(0, 1)
    assert b.replica.waiting() == "waiting for a commit from a; shards left: 2"
    moves_on(b, 0)
    assert b.replica.waiting() == "waiting for a commit from a; shards left: 1"
    b.lose("a")
    assert b.replica.waiting() == "taking over shard 1, waiting for a promise of c, d"


def test_the_sentence_marks_the_contributors_that_pause(peer: Any) -> None:
    a = peer("a", group="abc")
    a.meet("c", paused=True)
    a.contribute()
    assert a.replica.waiting() == "waiting for the contributions of b, c (paused)"


def test_the_sentence_names_the_setting_that_too_few_peers_meet(peer: Any) -> None:
    a = solo(peer, min_peers=3, start_peers=4)
    a.contribute()
    assert a.replica.waiting() == (
        "waiting for peers: 1 of 3 (min_peers) have contributed; start more, or p2p-diloco set --min-peers 1"
    )
    f = peer("a", epoch=None, live="", min_peers=2, start_peers=4)
    f.feed(Found(0, ("x",)))
    f.contribute()
    assert f.replica.waiting() == "waiting for peers: 1 of 4 (start_peers) have contributed; start more"
    done = solo(peer)
    round_alone(done)
    assert done.replica.waiting() == ""


def test_the_sentence_does_not_say_that_a_peer_waits_for_itself(peer: Any) -> None:
    """While the mean is computed, the aggregator says what it does. A shard aggregated by another peer does not hide
    one that this peer aggregates."""
    a = solo(peer)
    a.contribute()
    assert a.replica.waiting() == "making the commit of this round from the contributions; shards left: 1"
    b = peer("b", group="ab", fragments=((0, 1),))
    b.replica.logs[1].lead.holder = "b"
    b.contribute(0, 1)
    assert b.replica.waiting() == "waiting for the contributions of a"


def test_private_peers_wait_for_a_private_aggregator(peer: Any) -> None:
    b = peer("b", group="abd", live="a", eligible=False)
    b.contribute()
    b.lose("a")
    b.meet("d", eligible=False)
    assert b.replica.waiting() == "taking over shard 0, waiting for a promise of d"


def test_round_tells_the_contributions_of_a_round_that_this_peer_aggregates(peer: Any) -> None:
    """(fragment, contributions received, contributions expected); None if the peer aggregates no round."""
    a = peer("a", epoch=4, group="abc", fragments=TWO)
    assert a.replica.round() is None
    a.hear("b", a.contribution(a.version(4), shard=1))
    assert a.replica.round() == (1, 1, 3)
    few = solo(peer, min_peers=5)
    few.contribute()
    assert few.replica.round() == (0, 1, 5)
    b = peer("b")
    b.hear("c", b.contribution(b.held))
    assert b.replica.round() is None


# -- asynchronous


def test_the_sentence_names_what_a_submission_waits_for(peer: Any) -> None:
    """On the aggregator and on other peers; empty while no submission is under way."""
    a, c = running(peer, "a"), running(peer, min_peers=3)
    assert (a.replica.waiting(), c.replica.waiting()) == ("", "")
    a.contribute()
    assert a.replica.waiting() == "waiting for c to answer a submission"
    effects = c.contribute()
    computed(c, effects)
    assert c.replica.waiting() == "waiting for b to hold a commit of shard 0"
    d = running(peer, min_peers=4)
    d.contribute()
    assert d.replica.waiting() == (
        "waiting for peers: 3 of 4 (min_peers) are alive; start more, or p2p-diloco set --min-peers 3"
    )


def test_the_sentence_counts_the_workers_that_an_outer_step_needs(peer: Any) -> None:
    """It names the setting that asks for so many; with enough of them it is empty."""
    a, b, c = (running(peer, start_peers=start) for start in (3, 4, 5))
    for one in (a, b, c):
        one.contribute()
    c.meet("a", idle=True)
    assert a.replica.waiting() == ""
    assert b.replica.waiting() == "waiting for peers: 3 of 4 (start_peers) are alive; start more"
    assert c.replica.waiting() == "waiting for peers: 3 of 5 (start_peers) are alive; start more"


def test_the_sentence_names_all_peers_that_are_waited_for(peer: Any) -> None:
    b = running(peer, "b")
    joined_by(b, "d")
    b.contribute()
    b.lose("c")
    assert b.replica.waiting() == "taking over shard 0, waiting for a promise of a, d"
    c = running(peer, succession="cba", successors=2)
    effects = computed(c, c.contribute())
    assert c.replica.waiting() == "waiting for a, b to hold a commit of shard 0"
    held_by(c, "b", effects)
    assert c.replica.waiting() == "waiting for a to hold a commit of shard 0"
    n, _ = gathering(peer)
    assert n.replica.waiting() == "fetching the state of the run from a, c: 0 of 5 shards"


def test_the_sentence_passes_over_a_shard_whose_submission_is_counted(peer: Any) -> None:
    """Another peer's commit may be under way there."""
    c = running(peer, fragments=((0, 1),))
    for other in "ab":
        c.hear(other, Promise(1, c.held, 0))
    first, second = c.contribute(0, 1)
    for average in (first, second):
        proposed = commits_to(c.averaged([average], f"n{average.shard}"), "b")
        if average is first:
            c.hear("b", Held(0, proposed[0].version))
    c.averaged(c.hear("a", c.contribution(c.held)), "later")
    assert c.replica.logs[0].waited_for() == ["b"]
    assert c.replica.waiting() == "waiting for b to hold a commit of shard 1"


def test_the_sentence_of_a_claimant_names_the_peers_that_must_promise(peer: Any) -> None:
    b = running(peer, "b")
    b.contribute()
    b.lose("c")
    assert b.replica.waiting() == "taking over shard 0, waiting for a promise of a"
