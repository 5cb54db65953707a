"""Commits that lead this replica to another digest than they name: counted, reported, then replaced by states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from p2p_diloco.core.events import Applied, Send
from p2p_diloco.core.messages import Commit, Fetch, Plan, Probe, State, TakeOver
from p2p_diloco.core.mismatches import Mismatches, astray
from tests.core.conftest import PLAIN, Peer, mismatches, roster_of

MANY = {"fragments": (tuple(range(PLAIN.astray_max)),)}


def next_commit(b: Any, shard: int = 0, by: str = "a") -> Commit:
    """The commit of "a" on the version that b holds."""
    base = b.replica.versions[shard]
    return Commit(shard, base, b.version(base.epoch + 1), 0, by, (), Plan(("a", "b"), ("a", "b")))


def led_astray(b: Any, shard: int = 0) -> list[str]:
    """A commit leads b to another digest than it names; returns the notes of b."""
    commit = next_commit(b, shard)
    b.hear("a", commit)
    return mismatches(b.feed(Applied(shard, commit.base, "astray")))


def committed(a: Any) -> list[Any]:
    """All of a, b and c contribute, and a commits; its effects."""
    for name in "bc":
        a.hear(name, a.contribution(a.held, a.held.epoch))
    return list(a.averaged(a.contribute(), f"d{a.held.epoch + 1}"))


def test_mismatches_that_go_on_are_reported_now_and_then_with_their_number(peer: Any) -> None:
    """The first one is reported at once."""
    b = peer("b", group="ab")

    plain = "shard 0: a commit on epoch 1 led to another digest than it names"
    assert led_astray(b) == [plain]
    assert [led_astray(b) for _ in range(3)] == [[], [], []]
    b.now += b.rules.say_again
    assert led_astray(b) == [f"{plain}, as did 3 more since the last such line"]
    assert led_astray(b) == []
    b.now += b.rules.say_again
    assert led_astray(b) == [f"{plain}, as did 1 more since the last such line"]
    b.now += b.rules.say_again
    assert led_astray(b) == [plain]


def test_a_peer_with_many_mismatches_in_a_row_says_that_it_is_unlike(peer: Any) -> None:
    """A commit that leads to its digest restarts the count. The line is logged once."""
    b = peer("b", group="ab", **MANY)
    most = b.rules.astray_max
    for shard in range(1, most):
        led_astray(b, shard)
    b.take(next_commit(b))
    assert b.replica.versions[0] == b.version(2)
    for shard in range(1, most):
        led_astray(b, shard)
    assert not b.replica.roster.mine.unlike
    assert b.feed(Applied(0, b.version(1), "of no commit under way")) == []
    (told,) = led_astray(b)
    assert told == (
        "shard 0: a commit on epoch 2 led to another digest than it names, as did the commits on each of the last "
        f"{most} versions: this machine computes the outer step unlike the peers that make the commits. From now on "
        "they send it whole states, which take several times the bytes of commits, and it aggregates only if all peers "
        "are such machines. outer_optimizer=sgd gives the same result on every machine; if it is set already, test "
        "this machine's memory"
    )
    assert b.replica.roster.mine.unlike
    b.now += 2 * b.rules.say_again
    assert "more since the last such line" in "".join(led_astray(b))
    assert led_astray(b) == []


def test_damaged_tensors_make_no_peer_unlike(peer: Any) -> None:
    """They lead every commit on them astray until they are fetched again, which may take long."""
    b = peer("b", group="ab")
    for _ in range(2 * b.rules.astray_max):
        led_astray(b)
    assert not b.replica.roster.mine.unlike


def test_commits_of_a_peer_that_has_left_make_no_peer_unlike(peer: Any) -> None:
    """It says that it leaves, and sends wrong commits: the one peer that is still live sent none of them."""
    b = peer("b", group="abc")
    roster, counted = b.replica.roster, Mismatches(b.rules, b.replica.roster, b.now)
    assert roster.departed("c", roster.summary("c").incarnation)
    for epoch in range(2 * b.rules.astray_max):
        counted.found(0, b.version(epoch), "c", b.now)
    assert not roster.mine.unlike
    counted.found(0, b.version(0), "a", b.now)
    assert roster.mine.unlike


def test_an_unlike_peer_is_sent_states_and_elected_last(peer: Any) -> None:
    """It could not apply the commits. If every peer is unlike the others, they are elected all the same."""
    a = peer("a", group="abc", succession="abc")
    a.hear("b", Probe(a.about(unlike=True)))
    base = a.held
    told = committed(a)
    sent = {e.to: e.message for e in told if isinstance(e, Send) and isinstance(e.message, (Commit, State))}
    assert isinstance(sent["b"], State)
    assert sent["b"] == a.replica.logs[0].state
    assert isinstance(sent["c"], Commit)
    assert set(sent["c"].plan.group) == set("abc")
    assert set(sent["c"].plan.succession) == set("ac")
    assert a.hear("b", Fetch((base,))) == [Send("b", sent["b"])]
    assert a.hear("c", Fetch((base,))) == [Send("c", sent["c"])]
    for late in (a.contribution(base, 2), TakeOver(0, base, 1)):
        assert a.hear("b", late)[-1] == Send("b", sent["b"])
        assert a.hear("c", late) == [Send("c", sent["c"])]
    a = peer("a", group="abc", succession="abc")
    a.replica.roster.mine = replace(a.replica.roster.mine, unlike=True)
    for name in "bc":
        a.hear(name, Probe(a.about(unlike=True)))
    told = committed(a)
    states = [e.message for e in told if isinstance(e, Send) and isinstance(e.message, State)]
    assert [set(state.plan.succession) for state in states] == [set("abc")] * 2


def test_wrong_commits_in_others_names_count_as_the_senders(peer: Any) -> None:
    """A peer that was asked answers with wrong commits in two other peers' names."""
    b = peer("b", group="abcd", **MANY)
    for shard in range(b.rules.astray_max):
        author, term = (("a", 0), ("c", 2))[shard % 2]
        b.hear("d", b.commit(shard, by=author, term=term))
        b.feed(Applied(shard, b.held, "another digest"))
    assert len(b.replica.mismatches.bases) == b.rules.astray_max
    assert not b.replica.roster.mine.unlike
    b.hear("a", b.commit(by="a"))
    b.feed(Applied(0, b.held, "another digest"))
    assert b.replica.roster.mine.unlike


def counting(others: str, **rules: int) -> tuple[Mismatches, Callable[[str], list[str]]]:
    """The Mismatches of b, and a function that records one of a sender's, each on a version of its own."""
    made = Mismatches(replace(PLAIN, **rules), roster_of("b", others), 100.0)
    epochs = itertools.count(1)
    return made, lambda sender, now=100.0: mismatches(made.found(0, Peer.version(next(epochs)), sender, now))


def test_a_mismatch_is_reported_at_once_and_then_at_intervals() -> None:
    """With the number of unreported ones."""
    found, every = Mismatches(replace(PLAIN, astray_max=99), roster_of("b"), 100.0), PLAIN.say_again
    base, text = Peer.version(1), astray(0, Peer.version(1))
    at = (0.0, 1.0, every - 1.0, every, 2 * every)
    told = [mismatches(found.found(0, base, "a", 100.0 + after)) for after in at]
    assert told == [[text], [], [], [f"{text}, as did 2 more since the last such line"], [text]]


def test_only_mismatches_in_a_row_make_a_peer_unlike() -> None:
    counted, found = counting("a", astray_max=3)
    for agrees in (False, False, True, False, False):
        counted.agreed() if agrees else found("a")
    assert not counted.roster.mine.unlike
    (told,) = found("a")
    assert ", as did the commits on each of the last 3" in told
    assert counted.roster.mine.unlike
    assert found("a") == []  # it was reported


def test_wrong_commits_from_one_peer_make_no_peer_unlike() -> None:
    """That peer may be the one that computes wrongly. A commit from a second peer is proof, and so are many from the
    only other peer."""
    counted, found = counting("ac", astray_max=3)
    for _ in range(9):
        found("a")
    assert not counted.roster.mine.unlike
    found("c")
    assert counted.roster.mine.unlike
    counted, found = counting("ac", astray_max=3)
    found("c")
    counted.agreed()
    for _ in range(3):
        found("a")
    assert not counted.roster.mine.unlike
    alone, found = counting("a", astray_max=3)
    for _ in range(3):
        found("a")
    assert alone.roster.mine.unlike
