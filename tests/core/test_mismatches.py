"""Commits that lead this replica to another digest than they name: counted, reported, then replaced by states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from p2p_diloco.core.events import Applied, Send
from p2p_diloco.core.messages import Commit, Fetch, Plan, Probe, State, TakeOver
from p2p_diloco.core.mismatches import Mismatches
from tests.core.conftest import PLAIN, mismatches, roster_of


def next_commit(b: Any) -> Commit:
    """The commit of "a" on the version that b holds."""
    return Commit(0, b.held, b.version(b.held.epoch + 1), 0, "a", (), Plan(("a", "b"), ("a", "b")))


def astray(b: Any) -> list[str]:
    """A commit leads b to another digest than it names; returns the notes of b."""
    commit = next_commit(b)
    b.hear("a", commit)
    return mismatches(b.feed(Applied(0, commit.base, "astray")))


def committed(a: Any) -> list[Any]:
    """All of a, b and c contribute, and a commits; its effects."""
    for name in "bc":
        a.hear(name, a.contribution(a.held, a.held.epoch))
    return list(a.averaged(a.contribute(), f"d{a.held.epoch + 1}"))


def test_mismatches_that_go_on_are_reported_now_and_then_with_their_number(peer: Any) -> None:
    """The first one is reported at once."""
    b = peer("b", group="ab")

    plain = "shard 0: a commit on epoch 1 led to another digest than it names"
    assert astray(b) == [plain]
    assert [astray(b) for _ in range(3)] == [[], [], []]
    b.now += b.rules.say_again
    assert astray(b) == [f"{plain}, as did 3 more since the last such line"]
    b.replica.mismatches.in_a_row = 0
    assert astray(b) == []
    b.now += b.rules.say_again
    assert astray(b) == [f"{plain}, as did 1 more since the last such line"]
    b.now += b.rules.say_again
    assert astray(b) == [plain]


def test_a_peer_with_many_mismatches_in_a_row_says_that_it_is_unlike(peer: Any) -> None:
    """A commit that leads to its digest restarts the count. The line is logged once."""
    b = peer("b", group="ab")
    most = b.rules.astray_max
    for _ in range(most - 1):
        astray(b)
    right = next_commit(b)
    b.take(right)
    assert b.replica.epoch == 2
    for _ in range(most - 1):
        astray(b)
    assert not b.replica.roster.mine.unlike
    assert b.feed(Applied(0, b.version(1), "of no commit under way")) == []
    (told,) = astray(b)
    assert told == (
        "shard 0: a commit on epoch 2 led to another digest than it names, as did all of the last "
        f"{most} commits: this machine computes the outer step unlike the peers that make the commits. From now on "
        "they send it whole states, which take several times the bytes of commits, and it aggregates only if all peers "
        "are such machines. outer_optimizer=sgd gives the same result on every machine; if it is set already, test "
        "this machine's memory"
    )
    assert b.replica.roster.mine.unlike
    b.now += 2 * b.rules.say_again
    assert "more since the last such line" in "".join(astray(b))
    assert astray(b) == []


def test_commits_of_a_peer_that_has_left_make_no_peer_unlike(peer: Any) -> None:
    """It says that it leaves, and sends wrong commits: the one peer that is still live sent none of them."""
    b = peer("b", group="abc")
    roster, counted = b.replica.roster, Mismatches(b.rules, b.replica.roster, b.now)
    assert roster.departed("c", roster.summary("c").incarnation)
    for _ in range(2 * b.rules.astray_max):
        counted.found("wrong", "c", b.now)
    assert not roster.mine.unlike
    counted.found("wrong", "a", b.now)
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
        assert a.hear("b", late) == [Send("b", sent["b"])]
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
    b = peer("b", group="abcd", astray_max=4)
    for author, term in (("a", 0), ("c", 2)) * 3:
        b.hear("d", b.commit(by=author, term=term))
        b.feed(Applied(0, b.held, "another digest"))
    assert b.replica.mismatches.in_a_row == 6
    assert not b.replica.roster.mine.unlike
    b.hear("a", b.commit(by="a"))
    b.feed(Applied(0, b.held, "another digest"))
    assert b.replica.roster.mine.unlike


def test_a_mismatch_is_reported_at_once_and_then_at_intervals() -> None:
    """With the number of unreported ones."""
    found = Mismatches(replace(PLAIN, astray_max=99), roster_of("b"), 100.0)
    every = PLAIN.say_again
    told = [mismatches(found.found("text", "a", 100.0 + after)) for after in (0.0, 1.0, every - 1.0, every, 2 * every)]
    assert told == [["text"], [], [], ["text, as did 2 more since the last such line"], ["text"]]


def test_only_mismatches_in_a_row_make_a_peer_unlike() -> None:
    found = Mismatches(replace(PLAIN, astray_max=3), roster_of("b", "a"), 0.0)
    for agrees in (False, False, True, False, False):
        found.agreed() if agrees else found.found("text", "a", 0.0)
    assert not found.roster.mine.unlike
    (told,) = mismatches(found.found("text", "a", 0.0))
    assert told.startswith("text, as did all of the last 3")
    assert found.roster.mine.unlike
    assert found.found("text", "a", 0.0) == []  # it was reported


def test_wrong_commits_from_one_peer_make_no_peer_unlike() -> None:
    """That peer may be the one that computes wrongly. A commit from a second peer is proof, and so are many from the
    only other peer."""
    found = Mismatches(replace(PLAIN, astray_max=3), roster_of("b", "ac"), 0.0)
    for _ in range(9):
        found.found("text", "a", 0.0)
    assert not found.roster.mine.unlike
    found.found("text", "c", 0.0)
    assert found.roster.mine.unlike
    found = Mismatches(replace(PLAIN, astray_max=3), roster_of("b", "ac"), 0.0)
    found.found("text", "c", 0.0)
    found.agreed()
    for _ in range(3):
        found.found("text", "a", 0.0)
    assert not found.roster.mine.unlike
    alone = Mismatches(replace(PLAIN, astray_max=3), roster_of("b", "a"), 0.0)
    for _ in range(3):
        alone.found("text", "a", 0.0)
    assert alone.roster.mine.unlike
