"""Catching up: the least that closes the gap, one comparison that ends a fork, and donors that fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.events import (
    Accept,
    Applied,
    Average,
    Changed,
    Fill,
    Filled,
    Moving,
    Note,
    Ready,
    Restore,
    Send,
    SendFailed,
)
from p2p_diloco.core.messages import Commit, Fetch, Leave, Plan, Probe, State, Versions
from p2p_diloco.core.state import meta_of
from p2p_diloco.core.version import ModelVersion, Version, model_version

TWO = ((0,), (1,))
"""Two fragments of one shard each."""


def ahead(p: Any, epoch: int) -> ModelVersion:
    """The model of a peer whose shards are all at this epoch of the same lineage."""
    return model_version([p.version(epoch)] * p.rules.shards)


def fill(p: Any, state: State) -> Fill:
    return Fill(state, meta_of(state))


def filled(p: Any, state: State, digest: str = "") -> list[Any]:
    return p.feed(Filled(state.shard, state.version, digest or state.version.digest))


# -- a newcomer


def test_a_newcomer_asks_the_first_that_holds_state(peer: Any) -> None:
    """As soon as somebody says that it holds something, what that is; once."""
    n = peer("n", epoch=None, live="")
    n.meet("a", **n.blank())
    assert n.replica.catchup.donors() == []
    model = model_version([n.version(7)])
    effects = n.meet("b", model=model, epochs=(7,))
    assert effects[-1] == Send("b", Fetch((None,), shards=()))
    assert not n.said(n.meet("c", model=model, epochs=(7,)))
    assert n.replica.catchup.donors() == ["b"]


def test_a_newcomer_fills_in_and_is_ready(peer: Any) -> None:
    """A shard is adopted when the tensors are there and their digest is right; with the last one training may start.
    All are told, those included that a plan names and that were not met yet: they may be about to wait for it."""
    n = peer("n", epoch=None, live="", fragments=TWO)
    n.meet("b", model=model_version([n.version(7)] * 2), epochs=(7, 7))
    n.hear("b", Versions((n.version(7),) * 2, forked=False))
    one, two = n.state(0, 7), n.state(1, 7)
    assert n.hear("b", one) == [fill(n, one)]
    assert n.hear("b", two) == [fill(n, two)]
    assert filled(n, one) == [Accept(((0, "d7"),))]
    assert n.replica.versions == (n.version(7), None)
    assert (n.replica.has_state, n.replica.epoch) == (False, 0)
    effects = filled(n, two)
    assert effects == [
        Accept(((1, "d7"),)),
        *[Send(name, Probe(n.replica.roster.mine)) for name in "abc"],
        Ready(),
        Changed(),
    ]
    assert n.replica.roster.mine.epochs == (7, 7)
    assert n.replica.catchup.donors() == []
    assert n.replica.state(0) == one


def late_newcomer(peer: Any, **rules: Any) -> Any:
    """Rounds were faster than the state came: it is of epoch 1, and the first commit that was heard is on epoch 3."""
    n = peer("n", epoch=None, live="", **rules)
    n.meet("a", model=model_version([n.version(1)]), epochs=(1,))
    n.hear("a", Versions((n.version(1),), forked=False))
    plan = Plan(tuple("abc"), tuple("abc"))
    n.hear("a", Commit(0, n.version(3), n.version(4), 0, "a", (), plan))
    n.meet("a", model=model_version([n.version(4)]), epochs=(4,))
    n.hear("a", n.state(0, 1))
    return n


def test_a_hole_between_what_was_gathered_and_what_was_kept_is_fetched_at_once(peer: Any) -> None:
    """None of the commits in between will come any more. Training does not start before."""
    n = late_newcomer(peer)
    effects = filled(n, n.state(0, 1))
    assert Send("a", Fetch((n.version(1),), shards=())) in effects
    assert Ready() not in effects
    n.hear("a", Versions((n.version(4),), forked=False))
    n.hear("a", n.state(0, 4))
    assert Ready() in filled(n, n.state(0, 4))


def test_training_starts_when_the_commits_that_were_kept_are_applied(peer: Any) -> None:
    """And not on what they are applied to: its first contribution would come too late."""
    n = late_newcomer(peer)
    filled(n, n.state(0, 1))
    n.hear("a", n.state(0, 3))
    assert Ready() not in filled(n, n.state(0, 3))
    assert Ready() in n.feed(Applied(0, n.version(3), "d4"))


def test_where_commits_follow_what_was_gathered_nothing_more_is_fetched(peer: Any) -> None:
    """They are applied one after another."""
    n = peer("n", epoch=None, live="")
    n.meet("a", model=model_version([n.version(1)]), epochs=(1,))
    n.hear("a", Versions((n.version(1),), forked=False))
    n.hear("a", Commit(0, n.version(1), n.version(2), 0, "a", (), Plan(tuple("abc"), tuple("abc"))))
    n.hear("a", n.state(0, 1))
    assert not any(isinstance(e, Send) and isinstance(e.message, Fetch) for e in filled(n, n.state(0, 1)))


def test_a_hole_whose_aggregator_is_gone_is_left_to_the_next_that_is_seen_ahead(peer: Any) -> None:
    """There is nobody to ask."""
    n = late_newcomer(peer)
    n.lose("a")
    assert not any(isinstance(e, Send) and isinstance(e.message, Fetch) for e in filled(n, n.state(0, 1)))


def test_the_same_state_twice_is_filled_in_once(peer: Any) -> None:
    """A duplicate on the wire costs no second copy of a shard."""
    n = peer("n", epoch=None, live="")
    n.meet("b", model=model_version([n.version(7)]), epochs=(7,))
    state = n.state(0, 7)
    assert n.hear("b", state) == [fill(n, state)]
    assert n.hear("b", state) == []
    filled(n, state)
    assert n.hear("b", state) == []


def test_a_fetched_state_with_another_digest_is_not_taken(peer: Any) -> None:
    """It is noted, and the next that holds state is asked."""
    n = peer("n", epoch=None, live="")
    model = model_version([n.version(7)])
    n.meet("b", model=model, epochs=(7,))
    state = n.state(0, 7)
    n.hear("b", state)
    (note,) = filled(n, state, "wrong")
    assert note.kind == "mismatch"
    assert n.replica.versions == (None,)
    assert n.meet("c", model=model, epochs=(7,))[-1] == Send("c", Fetch((None,), shards=()))


def test_an_answer_for_a_state_given_up_is_void(peer: Any) -> None:
    """Nothing is accepted that is no longer being filled in."""
    n = peer("n", epoch=None, live="")
    assert filled(n, n.state(0, 7)) == []
    n.meet("b", model=model_version([n.version(7)]), epochs=(7,))
    n.hear("b", n.state(0, 7))
    n.hear("b", n.state(0, 8))
    filled(n, n.state(0, 8))
    assert filled(n, n.state(0, 7)) == []
    assert n.held == n.version(8)


# -- answering


@pytest.mark.parametrize(("have", "answer"), [(2, []), (1, ["commit"]), (0, ["state"]), (None, ["state"])])
def test_the_least_that_closes_the_gap(peer: Any, have: int | None, answer: list[str]) -> None:
    """Nothing for an equal, the last commit for who lacks just that, the whole state for all others."""
    b = peer("b", group="abc")
    commit = Commit(0, b.held, b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    b.hear("a", commit)
    b.feed(Applied(0, commit.base, "d2"))
    known = {"commit": commit, "state": b.replica.state(0)}
    effects = b.hear("a", Fetch((None if have is None else b.version(have),)))
    assert effects == [Send("a", known[kind]) for kind in answer]


def test_a_fetched_state_has_no_last_commit(peer: Any) -> None:
    """Who has adopted a state can pass on only that, to one that is a single commit behind too."""
    b = peer("b", epoch=3, group="ab")
    assert b.hear("a", Fetch((b.version(2),))) == [Send("a", b.replica.state(0))]


def test_only_what_is_newer_is_sent(peer: Any) -> None:
    """Shard by shard: equal ones cost nothing."""
    b = peer("b", epoch=3, group="ab", fragments=TWO)
    assert b.hear("a", Fetch((b.version(3), b.version(1)))) == [Send("a", b.replica.state(1))]


def test_who_is_ahead_in_part_is_told_what_is_held(peer: Any) -> None:
    """The asker may be on another lineage where it is ahead: it gets what it lacks, and something to compare with."""
    b = peer("b", epoch=3, group="ab", fragments=TWO)
    versions = Versions((b.version(3), b.version(3)), forked=False)
    assert b.hear("a", Fetch((b.version(4), b.version(1)))) == [Send("a", b.replica.state(1)), Send("a", versions)]


def test_who_holds_only_a_part_answers_nothing(peer: Any) -> None:
    """A newcomer half way is no donor; and a question about another number of shards is none of this run."""
    n = peer("n", epoch=None, live="", fragments=TWO)
    n.meet("b", model=model_version([n.version(7)] * 2), epochs=(7, 7))
    n.hear("b", n.state(0, 7))
    filled(n, n.state(0, 7))
    assert n.hear("b", Fetch((None, None))) == []
    assert peer("b", fragments=TWO).hear("a", Fetch((None,))) == []


def test_a_forked_asker_is_told_the_whole_model(peer: Any) -> None:
    """One shard on another lineage is enough: no shard is handed out before the models are compared."""
    b = peer("b", epoch=3, group="ab", fragments=TWO)
    effects = b.hear("a", Fetch((b.version(1), b.version(3, "other"))))
    assert effects == [Send("a", Versions((b.version(3), b.version(3)), forked=True))]


@pytest.mark.parametrize("ask", ["contribution", "takeover"])
def test_a_forked_round_is_answered_with_the_whole_model(peer: Any, ask: str) -> None:
    """A contribution to, or a takeover of, a round of another lineage opens the comparison."""
    from p2p_diloco.core.messages import TakeOver

    b = peer("b", epoch=3, group="ab")
    other = b.version(3, "other")
    message = b.contribution(other) if ask == "contribution" else TakeOver(0, other, 1)
    assert b.hear("a", message) == [Send("a", Versions((b.version(3),), forked=True))]


def test_all_that_differs_is_sent_when_the_asker_knows_of_the_fork(peer: Any) -> None:
    b = peer("b", epoch=3, group="ab", fragments=((0,), (1,), (2,)))
    have = (b.version(3), b.version(3, "other"), b.version(5, "other"))
    effects = b.hear("a", Fetch(have, whole=True))
    assert effects == [Send("a", b.replica.state(1)), Send("a", b.replica.state(2))]


def test_what_is_missing_is_sent_though_it_differs_no_more(peer: Any) -> None:
    """The asker has begun to take the lineage as it was told: what it holds of it by now is part of that."""
    b = peer("b", epoch=3, group="ab", fragments=((0,), (1,), (2,)))
    have = (b.version(3), b.version(3, "other"), b.version(5, "other"))
    effects = b.hear("a", Fetch(have, whole=True, shards=(0, 2)))
    assert effects == [Send("a", b.replica.state(0)), Send("a", b.replica.state(2))]


# -- asking


def test_a_commit_on_its_way_is_waited_for(peer: Any) -> None:
    """A peer seen ahead is usually ahead by the commit that is just arriving: its state isn't fetched at once."""
    b = peer("b", group="ab")
    assert not b.said(b.meet("a", model=ahead(b, 2), epochs=(2,)))
    b.now += 1.9
    assert not b.said(b.meet("a", model=ahead(b, 2), epochs=(2,)))
    b.now += 0.1
    assert b.said(b.meet("a", model=ahead(b, 2), epochs=(2,))) == [Fetch((b.version(1),))]


def test_having_moved_the_waiting_begins_anew(peer: Any) -> None:
    """Who keeps getting its commits is never overdue, however long another stays ahead of it."""
    b = peer("b", group="ab")
    for epoch in range(1, 6):
        assert not b.said(b.meet("a", model=ahead(b, epoch + 1), epochs=(epoch + 1,)))
        commit = Commit(0, b.held, b.version(epoch + 1), 0, "a", (), Plan(("a", "b"), ("a", "b")))
        b.now += 1.5
        b.hear("a", commit)
        b.feed(Applied(0, commit.base, commit.version.digest))
        b.now += 0.6
        assert not b.said(b.meet("a", model=ahead(b, epoch + 2), epochs=(epoch + 2,)))


def test_a_gap_that_does_not_close_is_fetched_though_other_shards_move(peer: Any) -> None:
    """Contributions to a base that isn't known tell of a commit that got lost; the rest of the model may go on."""
    b = peer("b", group="ab", fragments=TWO)
    b.hear("a", b.contribution(b.version(2)))
    b.now += 1.5
    commit = Commit(1, b.version(1), b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    b.hear("a", commit)
    b.feed(Applied(1, commit.base, "d2"))
    b.hear("a", b.contribution(b.version(2)))  # seen again: the gap is as old as it was
    b.now += 0.5
    assert b.said(b.meet("a", model=ahead(b, 2), epochs=(2, 2))) == [Fetch((b.version(1), b.version(2)))]


def test_a_commit_on_an_unknown_base_is_a_gap_too(peer: Any) -> None:
    b = peer("b", group="ab")
    b.hear("a", Commit(0, b.version(2), b.version(3), 0, "a", (), Plan(("a", "b"), ("a", "b"))))
    assert b.replica.catchup.missed == {0: (b.version(1), b.now)}
    b.now += 2.0
    assert b.said(b.meet("a", model=ahead(b, 3), epochs=(3,))) == [Fetch((b.version(1),), shards=())]


def test_a_gap_that_has_closed_is_none(peer: Any) -> None:
    """Once the shard has moved, an old gap hurries nothing."""
    b = peer("b", group="ab")
    b.hear("a", b.contribution(b.version(2)))
    commit = Commit(0, b.held, b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    b.hear("a", commit)
    b.feed(Applied(0, commit.base, "d2"))
    b.now += 5.0
    assert not b.said(b.meet("a", model=ahead(b, 3), epochs=(3,)))


@pytest.mark.parametrize("epoch", [1, 0])
def test_who_is_not_ahead_is_not_asked(peer: Any, epoch: int) -> None:
    b = peer("b", group="ab")
    for _ in range(3):
        assert not b.said(b.meet("a", model=ahead(b, epoch), epochs=(epoch,)))
        b.now += 5.0


def test_catching_up_by_the_commit_ends_the_fetch(peer: Any) -> None:
    """When the model has reached what was asked for, another may be asked again."""
    b = peer("b", group="abc")
    b.replica.catchup.fetch("a", ahead(b, 2), b.now)
    commit = Commit(0, b.held, b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    b.hear("c", commit)
    b.feed(Applied(0, commit.base, "d2"))
    assert b.replica.catchup.donor is None


def test_a_state_that_descends_from_mine_is_taken_from_anybody(peer: Any) -> None:
    """Its ancestors contain what is held: no comparison is needed. No commit on the way counts this peer, so all are
    told that it is there."""
    b = peer("b", group="ab")
    state = b.state(0, 4, plan=b.plan("ab"))
    assert b.hear("a", state) == [fill(b, state)]
    assert filled(b, state) == [Accept(((0, "d4"),)), Send("a", Probe(b.replica.roster.mine)), Changed()]
    assert b.held == b.version(4)


@pytest.mark.parametrize("other", ["older", "fork", "oldest", "generation"])
def test_a_state_that_does_not_is_not(peer: Any, other: str) -> None:
    """Neither an older one nor one of another lineage is taken by itself."""
    b = peer("b", epoch=3, group="ab")
    match other:
        case "older":
            state = b.state(0, 2)
        case "oldest":
            state = b.state(0, 5, history=((3, "other"), (4, "x"), (5, "d5")))
        case "fork":
            state = b.state(0, 5, history=((2, "d2"), (3, "other"), (4, "x"), (5, "d5")))
        case _:
            state = b.state(0, 5, version=b.version(5, generation=1))
    assert b.hear("a", state) == []


def test_a_state_whose_memory_does_not_reach_back_is_taken(peer: Any) -> None:
    """When it has forgotten the epoch that is held here, there is nothing to tell a fork by."""
    b = peer("b", epoch=3, group="ab")
    state = b.state(0, 900, history=((800, "x"), (900, "d900")))
    assert b.hear("a", state) == [fill(b, state)]


def test_a_state_whose_memory_does_not_reach_back_and_that_has_fewer_samples_is_not(peer: Any) -> None:
    """Samples never fall along a lineage, so it is of another one."""
    b = peer("b", epoch=3, group="ab")
    history = ((800, "x"), (900, "d900"))
    assert b.hear("a", b.state(0, 900, version=b.version(900, samples=29), history=history)) == []
    level = b.state(0, 900, version=b.version(900, samples=30), history=history)
    assert b.hear("a", level) == [fill(b, level)]


@pytest.mark.parametrize("theirs", [Version(0, 29, 900, "x"), Version(0, 31, 1, "x")])
def test_a_fork_older_than_the_memory_is_seen(peer: Any, theirs: Version) -> None:
    """More epochs of fewer samples, or fewer epochs of more: whoever asks is told the whole model."""
    b = peer("b", epoch=None, group="ab", live="a")
    b.feed(Restore((b.state(0, 3, history=((2, "d2"), (3, "d3"))),)))
    assert b.hear("a", Fetch((theirs,))) == [Send("a", Versions((b.version(3),), forked=True))]


def test_a_state_overtaken_while_it_was_filled_in_is_void(peer: Any) -> None:
    """A commit came first: the proposal was made for another present state."""
    b = peer("b", group="ab")
    state = b.state(0, 4)
    b.hear("a", state)
    commit = Commit(0, b.held, b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    b.hear("a", commit)
    b.feed(Applied(0, commit.base, "d2"))
    assert filled(b, state) == []
    assert b.held == b.version(2)


# -- donors that fail


def fetching(peer: Any) -> Any:
    """A peer one commit behind in each of two shards, that has asked a, and knows c as well."""
    n = peer("n", epoch=6, group="acn", fragments=TWO)
    n.now += 2.0
    n.meet("a", model=ahead(n, 7), epochs=(7, 7))
    n.now += 2.0
    assert n.said(n.meet("a", model=ahead(n, 7), epochs=(7, 7))) == [Fetch((n.version(6), n.version(6)))]
    assert n.replica.catchup.donor == "a"
    n.meet("c", model=ahead(n, 7), epochs=(7, 7))
    return n


def fetches(effects: list[Any]) -> list[Any]:
    return [(e.to, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, Fetch)]


def test_a_silent_donor_is_replaced(peer: Any) -> None:
    """It answers probes, but no state comes: after the timeout, another is asked."""
    n = fetching(peer)
    assert fetches(n.pass_time(29.5)) == []
    assert [message for _, message in fetches(n.pass_time(2.5))] == [Fetch((n.version(6), n.version(6)))]


def test_a_donor_that_keeps_sending_is_kept(peer: Any) -> None:
    """Progress counts, not the time since the question; what others send is no progress of the donor's."""
    n = fetching(peer)
    n.pass_time(28.0)
    n.hear("a", n.state(0, 7))
    n.hear("c", n.state(0, 8))
    assert fetches(n.pass_time(29.5)) == []
    assert n.replica.catchup.donor == "a"
    n.hear("c", n.state(0, 9))
    assert len(fetches(n.pass_time(2.0))) == 1


@pytest.mark.parametrize("gone", [True, False])
def test_a_donor_that_could_not_be_asked_is_replaced(peer: Any, gone: bool) -> None:
    n = fetching(peer)
    have = (n.version(6), n.version(6))
    n.feed(SendFailed("c", Fetch(have), gone=False))
    assert n.replica.catchup.donor == "a"
    n.feed(SendFailed("a", Fetch(have), gone=gone))
    assert n.replica.catchup.donor is None
    n.meet("c", model=ahead(n, 7), epochs=(7, 7))
    n.now += 2.0
    assert fetches(n.meet("c", model=ahead(n, 7), epochs=(7, 7))) == [("c", Fetch(have))]


def test_a_dead_donor_is_replaced_and_what_it_sent_is_kept(peer: Any) -> None:
    """The next is asked for the rest only."""
    n = fetching(peer)
    n.hear("a", n.state(0, 7))
    filled(n, n.state(0, 7))
    n.lose("a")
    n.meet("c", model=ahead(n, 7), epochs=(7, 7))
    n.now += 2.0
    assert fetches(n.meet("c", model=ahead(n, 7), epochs=(7, 7))) == [("c", Fetch((n.version(7), n.version(6))))]


# -- gathering from several donors

FIVE = tuple((shard,) for shard in range(5))


def gathering(peer: Any, donors: str = "ac", **rules: Any) -> tuple[Any, list[Any]]:
    """A newcomer that has been told what a holds, of five shards, and what it asks of whom."""
    n = peer("n", epoch=None, live="", fragments=FIVE, **rules)
    n.meet("a", model=ahead(n, 7), epochs=(7,) * 5)
    for name in donors[1:]:
        n.meet(name, model=ahead(n, 7), epochs=(7,) * 5)
    effects = n.hear("a", Versions((n.version(7),) * 5, forked=False))
    return n, [(to, message.shards) for to, message in fetches(effects)]


def take(n: Any, sender: str, shard: int, epoch: int = 7) -> list[Any]:
    """A shard's state comes, right."""
    state = n.state(shard, epoch)
    assert n.hear(sender, state) == [fill(n, state)]
    return [(to, message.shards) for to, message in fetches(filled(n, state))]


def test_shards_are_asked_of_all_donors(peer: Any) -> None:
    """Of each so many at a time; whoever has delivered one is asked for the next, until all have come."""
    n, asked = gathering(peer, fetch_window=2)
    assert asked == [("a", (0, 1)), ("c", (2, 3))]
    assert n.replica.catchup.donors() == ["a", "c"]
    assert take(n, "c", 3) == [("c", (4,))]
    assert [take(n, "a", 0), take(n, "a", 1), take(n, "c", 2)] == [[], [], []]
    assert not n.replica.has_state
    take(n, "c", 4)
    assert n.replica.has_state
    assert n.replica.catchup.donors() == []


def test_a_donor_that_comes_later_takes_its_part(peer: Any) -> None:
    n, asked = gathering(peer, "a", fetch_window=1)
    assert asked == [("a", (0,))]
    later = n.meet("d", model=ahead(n, 8), epochs=(8,) * 5)
    assert [(to, message.shards) for to, message in fetches(later)] == [("d", (1,))]
    assert not fetches(n.meet("e", model=ahead(n, 6), epochs=(6,) * 5))  # has less than was told


def test_a_donors_death_costs_what_it_was_asked_for(peer: Any) -> None:
    """It is asked of the others, and nothing that has come is asked again."""
    n, _ = gathering(peer, fetch_window=1)
    assert take(n, "a", 0) == [("a", (2,))]
    effects = n.lose("a")
    assert fetches(effects) == []  # c is busy
    assert take(n, "c", 1) == [("c", (3,))]
    assert take(n, "c", 3) == [("c", (4,))]
    assert take(n, "c", 4) == [("c", (2,))]


def test_a_donor_that_restarts_has_forgotten(peer: Any) -> None:
    n, _ = gathering(peer, fetch_window=5)
    effects = n.meet("a", incarnation=9, **n.blank())
    assert [(to, message.shards) for to, message in fetches(effects)] == [("c", (0, 1, 2, 3, 4))]


def test_a_request_that_got_lost_is_made_of_another(peer: Any) -> None:
    """At once; of the same one only if there is no other, and not before the next tick."""
    n, _ = gathering(peer, fetch_window=5)
    lost = Fetch((None,) * 5, shards=(0, 1, 2, 3, 4))
    effects = n.feed(SendFailed("a", lost, gone=False))
    assert [(to, message.shards) for to, message in fetches(effects)] == [("c", (0, 1, 2, 3, 4))]
    alone, _ = gathering(peer, "a", fetch_window=5)
    assert fetches(alone.feed(SendFailed("a", lost, gone=False))) == []
    assert [to for to, _ in fetches(alone.pass_time(1.5))] == ["a"]


def test_a_donor_that_never_delivers_is_passed_over(peer: Any) -> None:
    """After a while its shards are asked of the others."""
    n, asked = gathering(peer, fetch_window=3)
    assert asked == [("a", (0, 1, 2)), ("c", (3, 4))]
    for shard in (3, 4):
        take(n, "c", shard)
    assert fetches(n.pass_time(n.rules.fetch_again - 1.5)) == []
    assert [(to, m.shards) for to, m in fetches(n.pass_time(2.5))] == [("c", (0, 1, 2))]


def test_a_donor_with_nothing_newer_says_so(peer: Any) -> None:
    """Then its shards are settled, for what is held is as new."""
    b = peer("b", epoch=3, group="ab", fragments=TWO)
    assert b.hear("a", Fetch((b.version(3), b.version(1)), shards=(0,))) == [
        Send("a", Versions((b.version(3),) * 2, forked=False))
    ]
    assert b.hear("a", Fetch((b.version(3), b.version(1)), shards=())) == [
        Send("a", Versions((b.version(3),) * 2, forked=False))
    ]
    assert b.said(b.hear("a", Fetch((b.version(2), b.version(1)), shards=(1,)))) == [b.replica.state(1)]
    n = peer("n", epoch=7, group="an", fragments=FIVE)
    n.meet("a", model=ahead(n, 20), epochs=(20,) * 5)
    n.now += 2.0
    assert fetches(n.meet("a", model=ahead(n, 20), epochs=(20,) * 5)) == [("a", Fetch((n.version(7),) * 5, shards=()))]
    told = Versions((n.version(7), *[n.version(20)] * 4), forked=False)
    assert [m.shards for _, m in fetches(n.hear("a", told))] == [(0, 1)]
    assert [m.shards for _, m in fetches(n.hear("a", told))] == [(2,)]  # 0 is as new as told
    assert n.replica.catchup.gathering.of("a") == [1, 2]
    older = Versions((n.version(7), n.version(5), *[n.version(20)] * 3), forked=False)
    assert [m.shards for _, m in fetches(n.hear("a", older))] == [(3,)]  # of 1 it holds less
    assert n.replica.catchup.gathering.of("a") == [2, 3]


def test_no_two_lineages_mix(peer: Any) -> None:
    """What doesn't descend from what the first donor told is not taken, and the gathering begins anew."""
    n, _ = gathering(peer)
    other = n.state(0, 8, version=n.version(8, "other"), history=((6, "d6"), (7, "other7"), (8, "other")))
    assert n.hear("c", other) == []
    effects = n.meet("c", model=ahead(n, 8), epochs=(8,) * 5)
    assert fetches(effects) == [("c", Fetch((None,) * 5, shards=()))]
    n, _ = gathering(peer)
    assert isinstance(n.hear("c", n.state(0, 8))[0], Fill)


def behind(peer: Any) -> tuple[Any, list[Any]]:
    """A newcomer whom b told of epoch 9 of shard 1, of which a holds epoch 8; what it asks of whom."""
    n = peer("n", epoch=None, live="", fragments=TWO)
    n.meet("b", model=ahead(n, 7), epochs=(7, 7))
    n.meet("a", model=ahead(n, 8), epochs=(8, 8))
    n.meet("c", model=ahead(n, 9), epochs=(8, 8))
    effects = n.hear("b", Versions((n.version(7), n.version(9)), forked=False))
    return n, [(to, message.shards) for to, message in fetches(effects)]


def test_a_shard_is_asked_of_who_holds_what_was_told(peer: Any) -> None:
    """Not of whoever comes first: what a has of shard 1 could not be taken."""
    assert behind(peer)[1] == [("a", (0,)), ("b", (1,))]


def test_a_donor_that_is_behind_is_passed_over_at_once(peer: Any) -> None:
    """Its state can't be taken; then another is asked. When nobody is left that may have it, all begins anew with
    what there is."""
    n, _ = behind(peer)
    effects = n.lose("b")
    assert [(to, m.shards) for to, m in fetches(effects)] == [("a", (1,))]
    effects = n.hear("a", n.state(1, 8))
    assert [(to, m.shards) for to, m in fetches(effects)] == [("c", (1,))]
    assert n.hear("a", n.state(1, 8)) == [], "nobody has asked for that"
    take(n, "a", 0, 8)
    assert n.hear("c", n.state(1, 8)) == []
    assert [m.shards for _, m in fetches(n.meet("a", model=ahead(n, 8), epochs=(8, 8)))] == [()]
    n.hear("a", Versions((n.version(8),) * 2, forked=False))
    take(n, "a", 1, 8)
    assert n.replica.has_state


def test_a_first_donor_that_restarts_holds_what_it_says_now(peer: Any) -> None:
    """What it sends then may be less than it told; all begins anew when nobody else has more."""
    n, _ = behind(peer)
    n.meet("b", incarnation=9, model=ahead(n, 8), epochs=(8, 8))
    for donor in "abc":
        n.hear(donor, n.state(1, 8))
    take(n, "a", 0, 8)
    assert [m.shards for _, m in fetches(n.meet("a", model=ahead(n, 8), epochs=(8, 8)))] == [()]


def test_what_a_donor_sent_before_it_told_is_no_sign_that_it_is_behind(peer: Any) -> None:
    """An older state of one that holds what was told was asked for before; the newer one comes."""
    n, _ = behind(peer)
    assert n.hear("b", n.state(1, 8)) == []
    take(n, "b", 1, 9)


def test_when_all_that_held_so_much_are_gone_less_is_taken(peer: Any) -> None:
    """The greatest version may be lost with its holders; a newcomer doesn't wait for it."""
    n, _ = gathering(peer, "a")
    n.meet("e", model=ahead(n, 6), epochs=(6,) * 5)
    n.lose("a")
    assert fetches(n.meet("e", model=ahead(n, 6), epochs=(6,) * 5)) == [("e", Fetch((None,) * 5, shards=()))]


def test_a_first_donor_that_does_not_tell_is_replaced(peer: Any) -> None:
    n = peer("n", epoch=None, live="", fragments=FIVE)
    n.meet("a", model=ahead(n, 7), epochs=(7,) * 5)
    n.silent.add("a")
    n.pass_time(n.rules.settle + 1.0)
    assert n.replica.catchup.donors() == []
    assert [to for to, _ in fetches(n.meet("c", model=ahead(n, 7), epochs=(7,) * 5))] == ["c"]


@pytest.mark.parametrize("how", ["dies", "could not be asked"])
def test_a_first_donor_that_is_gone_is_replaced(peer: Any, how: str) -> None:
    n = peer("n", epoch=None, live="", fragments=FIVE)
    n.meet("a", model=ahead(n, 7), epochs=(7,) * 5)
    if how == "dies":
        n.lose("a")
    else:
        n.feed(SendFailed("a", Fetch((None,) * 5, shards=()), gone=False))
    assert [to for to, _ in fetches(n.meet("c", model=ahead(n, 7), epochs=(7,) * 5))] == ["c"]


# -- forks


def fork(peer: Any, **more: Any) -> tuple[Any, Versions, tuple[State, State]]:
    """A peer at epoch 3, and what a greater lineage holds, forked off at epoch 2, with its two states."""
    b = peer("b", epoch=3, group="ab", fragments=TWO, **more)
    theirs = Version(0, 99, 5, "other")
    history = ((2, "d2"), (3, "x3"), (4, "x4"), (5, "other"))
    states = (b.state(0, 5, version=theirs, history=history), b.state(1, 5, version=theirs, history=history))
    return b, Versions((theirs, theirs), forked=True), states


def test_the_lesser_lineage_asks_for_all_that_differs(peer: Any) -> None:
    """Compared once for the whole model."""
    b, theirs, _ = fork(peer)
    assert b.hear("a", theirs) == [Send("a", Fetch((b.version(3), b.version(3)), whole=True))]


def test_the_greater_lineage_says_what_it_holds(peer: Any) -> None:
    """So that the other side, which is the lesser, asks."""
    b, _, _ = fork(peer)
    lesser = Versions((Version(0, 20, 9, "x"), Version(0, 20, 9, "x")), forked=True)
    assert b.hear("a", lesser) == [Send("a", Versions((b.version(3), b.version(3)), forked=True))]


def test_samples_decide_not_epochs(peer: Any) -> None:
    """A lineage of fewer but larger outer steps is the greater one."""
    b, _, _ = fork(peer)
    fewer_epochs = Versions((Version(0, 31, 1, "x"), Version(0, 30, 1, "x")), forked=True)
    assert b.said(b.hear("a", fewer_epochs)) == [Fetch((b.version(3), b.version(3)), whole=True)]


def test_the_whole_models_are_compared_not_shards(peer: Any) -> None:
    """A lineage that is ahead in one shard and behind in the other wins or loses as a whole."""
    b, _, _ = fork(peer)
    mixed = Versions((Version(0, 70, 6, "x"), Version(0, 10, 1, "x")), forked=True)
    assert b.said(b.hear("a", mixed)) == [Fetch((b.version(3), b.version(3)), whole=True)]
    b, _, _ = fork(peer)
    mixed = Versions((Version(0, 40, 6, "x"), Version(0, 10, 1, "x")), forked=True)
    assert b.said(b.hear("a", mixed)) == [Versions((b.version(3), b.version(3)), forked=True)]


def test_equal_models_are_no_fork(peer: Any) -> None:
    """Nor is a difference that the same lineage explains, or a vector of another length."""
    b, _, _ = fork(peer)
    assert b.hear("a", Versions(b.replica.versions, forked=True)) == []
    assert b.hear("a", Versions((b.version(9), b.version(2)), forked=False)) == []
    assert b.hear("a", Versions((Version(0, 99, 5, "x"),), forked=True)) == []


def test_a_fork_is_seen_by_who_is_told_the_versions(peer: Any) -> None:
    """Even if the teller could not see it: it is behind where the lineages part."""
    b, _, _ = fork(peer)
    theirs = Versions((Version(0, 99, 2, "other"), b.version(3)), forked=False)
    assert b.said(b.hear("a", theirs)) == [Fetch((b.version(3), b.version(3)), whole=True)]


def test_all_shards_or_none(peer: Any) -> None:
    """The first of two shards changes nothing; with the last, both become the present state in one effect. The donor is
    asked at once for what has come there since it told what it holds."""
    b, theirs, (one, two) = fork(peer)
    b.hear("a", theirs)
    assert b.hear("a", one) == [fill(b, one)]
    assert filled(b, one) == []
    assert b.replica.versions == (b.version(3), b.version(3))
    assert b.hear("a", two) == [fill(b, two)]
    effects = filled(b, two)
    assert effects[0] == Accept(((0, "other"), (1, "other")))
    assert [e.kind for e in effects if isinstance(e, Note)] == ["fork"]
    assert [e for e in effects if isinstance(e, Send) and isinstance(e.message, Fetch)] == [
        Send("a", Fetch(theirs.versions))
    ]
    assert effects[-1] == Changed()
    assert b.replica.versions == theirs.versions
    assert b.replica.state(1) == two


def test_a_staged_state_is_not_filled_in_twice(peer: Any) -> None:
    b, theirs, (one, _) = fork(peer)
    b.hear("a", theirs)
    b.hear("a", one)
    filled(b, one)
    assert b.hear("a", one) == []


def asked_again(b: Any, seconds: float) -> list[Fetch]:
    """What is asked of the donor in this time, which says that it holds more."""
    b.meet("a", model=model_version([Version(0, 99, 5, "other")] * 2), epochs=(5, 5))
    return [message for to, message in fetches(b.pass_time(seconds)) if to == "a"]


def test_what_is_missing_of_a_lineage_is_asked_for_again(peer: Any) -> None:
    """A state may take longer than a fetch that stands still: what has come is kept, the rest comes all the same."""
    b, theirs, (one, two) = fork(peer)
    b.hear("a", theirs)
    b.now += 20.0
    b.hear("a", one)
    filled(b, one)
    assert asked_again(b, 29.0) == []
    assert asked_again(b, 2.0) == [Fetch((b.version(3), b.version(3)), whole=True, shards=(1,))]
    b.hear("a", two)
    assert filled(b, two)[0] == Accept(((0, "other"), (1, "other")))


def test_what_one_does_not_send_another_is_asked_for(peer: Any) -> None:
    """A donor may be unable: whoever holds as much is asked in turn, and what any of them sends is taken."""
    b, theirs, (one, two) = fork(peer, live="ac")
    b.hear("a", theirs)
    b.hear("a", one)
    filled(b, one)
    for name in "ac":
        b.meet(name, model=model_version(theirs.versions), epochs=(3, 3))
    asked = fetches(b.pass_time(62.0))
    assert [(to, message.shards) for to, message in asked] == [("c", (1,)), ("a", (1,))]
    assert b.hear("c", two) == [fill(b, two)]
    assert filled(b, two)[0] == Accept(((0, "other"), (1, "other")))


def test_a_donor_of_a_lineage_is_asked_so_often(peer: Any) -> None:
    """Then it is given up; whatever it sends begins the count anew."""
    b, theirs, (one, _) = fork(peer, fetch_repeats=2)
    b.hear("a", theirs)
    assert [m.shards for m in asked_again(b, 65.0)] == [(0, 1), (0, 1)]
    b.hear("a", one)
    filled(b, one)
    assert [m.shards for m in asked_again(b, 65.0)] == [(1,), (1,)]
    assert b.replica.catchup.donor is not None
    assert not any(m.whole for m in asked_again(b, 30.0))
    assert b.replica.catchup.donor is None
    assert not any(log.frozen for log in b.replica.logs)


def test_a_donor_that_holds_no_more_than_this_peer_is_given_up(peer: Any) -> None:
    """It has left the lineage that it told of."""
    b, theirs, _ = fork(peer)
    b.hear("a", theirs)
    b.meet("a", model=ahead(b, 3), epochs=(3, 3))
    assert fetches(b.pass_time(32.0)) == []
    assert b.replica.catchup.donor is None


def test_the_donor_of_a_lineage_is_watched(peer: Any) -> None:
    """So that its death shows as soon as that of anybody who is waited for."""
    b, theirs, _ = fork(peer, live="acdefghij")
    b.hear("a", theirs)
    for _ in range(5):
        assert Send("a", Probe(b.replica.roster.mine)) in b.feed_tick()


def test_what_does_not_differ_need_not_be_sent(peer: Any) -> None:
    """A shard that both lineages hold alike is left as it is."""
    b, theirs, (one, _) = fork(peer)
    b.hear("a", Versions((theirs.versions[0], b.version(3)), forked=True))
    b.hear("a", one)
    assert filled(b, one)[0] == Accept(((0, "other"),))
    assert b.replica.versions == (one.version, b.version(3))


def test_only_the_donors_states_are_staged(peer: Any) -> None:
    """A mixture of two peers' shards would be no lineage's state."""
    b, theirs, (one, _) = fork(peer)
    b.meet("c")
    b.hear("a", theirs)
    assert b.hear("c", one) == []
    assert b.hear("c", b.state(0, 4)) == []


def test_nothing_is_appended_while_the_lineage_changes(peer: Any) -> None:
    """Neither by this peer's own rounds nor by commits of the old lineage, nor by work under way."""
    b, theirs, _ = fork(peer)
    b.feed_tick()
    working = Commit(1, b.held, b.version(4), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    b.hear("a", working)
    b.hear("a", theirs)
    assert b.feed(Applied(1, working.base, "d4")) == []
    assert b.hear("a", replace(working, shard=0)) == []
    own, theirs, _ = fork(peer)
    own.replica.logs[0].lead.holder = "b"
    own.hear("a", theirs)
    effects = [*own.contribute(0), *own.hear("a", own.contribution(own.held))]
    assert not [e for e in effects if isinstance(e, Average)]
    assert own.averages(own.pass_time(8.0)) == []


def test_a_mean_that_comes_back_while_the_lineage_changes_is_not_committed(peer: Any) -> None:
    b, theirs, _ = fork(peer)
    b.replica.logs[0].lead.holder = "b"
    b.contribute(0)
    effects = b.hear("a", b.contribution(b.held))
    b.hear("a", theirs)
    assert b.averaged(effects) == []
    assert b.replica.versions == (b.version(3), b.version(3))


def test_given_up_the_old_lineage_goes_on(peer: Any) -> None:
    """If the donor dies before the last shard came, nothing has changed, and rounds are closed again."""
    b, theirs, (one, _) = fork(peer)
    b.replica.logs[0].lead.holder = "b"
    b.hear("a", theirs)
    b.contribute(0)
    b.hear("a", one)
    filled(b, one)
    effects = b.lose("a")
    assert b.replica.versions == (b.version(3), b.version(3))
    assert b.averages(effects) == [["b"]]
    assert filled(b, one) == []


def test_one_lineage_is_taken_at_a_time(peer: Any) -> None:
    """A second, greater one is not begun before the first is done or given up."""
    b, theirs, _ = fork(peer)
    b.meet("c")
    b.hear("a", theirs)
    greater = Versions((Version(0, 500, 9, "y"), Version(0, 500, 9, "y")), forked=True)
    assert b.hear("c", greater) == []
    assert b.replica.catchup.donor == "a"


def test_a_plain_fetch_gives_way_to_the_lineage(peer: Any) -> None:
    """Learning that it is forked, a replica doesn't wait for the answer to its first question."""
    b, theirs, _ = fork(peer)
    b.replica.catchup.fetch("c", ahead(b, 4), b.now)
    assert b.said(b.hear("a", theirs)) == [Fetch((b.version(3), b.version(3)), whole=True)]


def test_a_donor_that_went_on_is_taken_as_it_is(peer: Any) -> None:
    """Its states may be newer than what it told; they are greater all the same."""
    b, theirs, (one, two) = fork(peer)
    b.hear("a", theirs)
    newer = replace(one, version=Version(0, 120, 6, "newer"), history={**one.history, 6: "newer"})
    for state in (newer, two):
        b.hear("a", state)
        effects = filled(b, state)
    assert effects[0] == Accept(((0, "newer"), (1, "other")))


def test_a_donor_that_fell_back_is_not_followed(peer: Any) -> None:
    """What arrives must be what it told or newer; when it says itself that it holds less, the change is called off."""
    b, theirs, _ = fork(peer)
    b.hear("a", theirs)
    poor = [b.state(s, 1, version=Version(0, 1, 1, "poor"), history=((1, "poor"),)) for s in (0, 1)]
    assert [b.hear("a", state) for state in poor] == [[], []]
    b.meet("a", model=ModelVersion(0, 2, 2, "poor"), epochs=(1, 1))
    b.pass_time(32.0)
    assert b.replica.versions == (b.version(3), b.version(3))
    assert not any(log.frozen for log in b.replica.logs)


def test_a_lineage_taken_must_be_greater(peer: Any) -> None:
    """Or the change is called off: more samples in one shard don't make up for what another has lost."""
    b, _, (one, _) = fork(peer)
    b.hear("a", Versions((Version(0, 99, 5, "other"), Version(1, 0, 0, "new")), forked=True))
    assert b.replica.catchup.donor is not None
    b.replica.logs[1].state = replace(b.replica.state(1), version=Version(1, 70, 9, "newer"))
    b.hear("a", one)
    filled(b, one)
    new = b.state(1, 0, version=Version(1, 0, 0, "new"))
    b.hear("a", new)
    assert filled(b, new) == []
    assert not any(log.frozen for log in b.replica.logs)


def test_a_state_that_comes_late_ends_no_fetch(peer: Any) -> None:
    """It was asked for before its donor told what it holds now, and says nothing of its lineage."""
    b, theirs, (one, _) = fork(peer)
    b.hear("a", theirs)
    old = b.state(0, 4, version=Version(0, 80, 4, "x4"), history=((2, "d2"), (3, "x3"), (4, "x4")))
    assert b.hear("a", old) == []
    assert b.hear("a", one) == [fill(b, one)]
    n, _ = gathering(peer)
    assert n.hear("a", n.state(0, 6)) == []  # whose ancestor it may be, it can't tell
    assert n.replica.catchup.gathering is not None
    assert n.hear("a", n.state(0, 7)) == [fill(n, n.state(0, 7))]
    far = peer("n", epoch=1, fragments=FIVE)
    far.now += 2.0
    far.meet("a", model=ahead(far, 20), epochs=(20,) * 5)
    far.now += 2.0
    far.meet("a", model=ahead(far, 20), epochs=(20,) * 5)
    far.hear("a", Versions((far.version(20),) * 5, forked=False))
    assert far.replica.catchup.gathering.vector is not None
    assert far.hear("a", far.state(0, 15)) == [fill(far, far.state(0, 15))]
    assert far.replica.catchup.gathering is not None


def test_a_newcomer_half_way_takes_one_lineage_whole(peer: Any) -> None:
    """A part of one lineage and the rest of another never become a state."""
    n = peer("n", epoch=None, live="", fragments=TWO)
    n.meet("a", model=ahead(n, 7), epochs=(7, 7))
    n.hear("a", Versions((n.version(7),) * 2, forked=False))
    n.hear("a", n.state(0, 7))
    filled(n, n.state(0, 7))
    n.lose("a")
    n.meet("c", model=ahead(n, 7), epochs=(7, 7))
    theirs = Versions((n.version(6, "x"), n.version(6, "x")), forked=True)
    assert n.said(n.hear("c", theirs)) == [Fetch((n.version(7), None), whole=True)]
    states = [n.state(s, 6, version=n.version(6, "x"), history=((5, "y"), (6, "x"))) for s in (0, 1)]
    for state in states:
        n.hear("c", state)
        effects = filled(n, state)
    assert effects[0] == Accept(((0, "x"), (1, "x")))
    assert Ready() in effects


# -- a replica that computes otherwise


def test_a_commit_that_leads_elsewhere_is_not_made_mine(peer: Any) -> None:
    """A replica that reaches another digest than the commit names has gone astray: it fetches that shard whole."""
    b = peer("b", group="ab", fragments=TWO)
    commit = Commit(1, b.version(1), b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    b.hear("a", commit)
    note, fetch = b.feed(Applied(1, commit.base, "astray"))
    assert note.kind == "mismatch"
    assert fetch == Send("a", Fetch((b.version(1), None)))
    assert b.replica.versions == (b.version(1), b.version(1))
    state = b.state(1, 2, plan=b.plan("ab"))
    assert b.hear("a", state) == [fill(b, state)]
    assert filled(b, state) == [Accept(((1, "d2"),)), Send("a", Probe(b.replica.roster.mine)), Changed()]
    assert b.replica.catchup.donor is None


def test_a_donor_that_brings_nothing_new_is_replaced(peer: Any) -> None:
    """What was staged already is no progress: after the timeout the change of lineage is begun again."""
    b, theirs, (one, _) = fork(peer)
    b.hear("a", theirs)
    b.hear("a", one)
    filled(b, one)
    for _ in range(32):
        b.pass_time(1.0)
        b.hear("a", one)
    assert b.replica.catchup.switching is None or not b.replica.catchup.switching.staged


def test_when_the_author_is_gone_another_is_asked(peer: Any) -> None:
    """Whoever has taken its commit over holds what it led to; where nobody does, nothing is asked of the dead."""
    b = peer("b", group="abc")
    commit = Commit(0, b.version(1), b.version(2), 0, "a", (), Plan(("b", "c"), ("b", "c")))
    b.lose("a")
    b.hear("c", commit)
    assert fetches(b.feed(Applied(0, commit.base, "astray"))) == []
    b.meet("c", model=ahead(b, 2), epochs=(2,))
    b.hear("c", commit)
    assert fetches(b.feed(Applied(0, commit.base, "astray"))) == [("c", Fetch((None,)))]


def test_after_a_mismatch_a_silent_donor_is_replaced_too(peer: Any) -> None:
    """The fetch that mends a replica gone astray is a fetch like any other."""
    b = peer("b", group="ab")
    commit = Commit(0, b.held, b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    b.hear("a", commit)
    b.feed(Applied(0, commit.base, "astray"))
    b.pass_time(31.5)
    assert b.replica.catchup.donor is None


def test_who_holds_only_a_part_compares_nothing(peer: Any) -> None:
    """A newcomer half way has no model to hold against a fork."""
    n = peer("n", epoch=None, live="", fragments=TWO)
    n.meet("a", model=ahead(n, 7), epochs=(7, 7))
    n.meet("c", model=ahead(n, 7), epochs=(7, 7))
    n.hear("a", n.state(0, 7))
    filled(n, n.state(0, 7))
    assert n.said(n.hear("c", n.contribution(n.version(7, "other")))) == []


def test_a_donor_that_leaves_is_replaced(peer: Any) -> None:
    n = fetching(peer)
    n.hear("a", Leave(1))
    assert n.replica.catchup.donor is None


def test_what_came_early_for_an_adopted_state_opens_its_round(peer: Any) -> None:
    """The round's clock runs from the adoption."""
    b = peer("b", group="ab", succession="ba")
    b.hear("a", b.contribution(b.version(4)))
    b.hear("a", b.state(0, 4, plan=b.plan("abc", "ba")))
    b.meet("c")
    b.now += 3.0
    filled(b, b.state(0, 4))
    assert b.replica.logs[0].waits.deadline == b.now + b.rules.round_timeout


def test_who_was_ahead_and_died_hurries_nobody(peer: Any) -> None:
    """How long a state has been missed counts from the first living peer that was seen ahead."""
    b = peer("b", group="abc")
    b.meet("a", model=ahead(b, 2), epochs=(2,))
    b.now += 1.9
    b.lose("a")
    assert not b.said(b.meet("c", model=ahead(b, 2), epochs=(2,)))
    b.now += 1.9
    assert not b.said(b.meet("c", model=ahead(b, 2), epochs=(2,)))
    other = peer("b", group="abc")
    other.meet("a", model=ahead(other, 2), epochs=(2,))
    other.lose("c")
    other.now += 2.0
    assert other.said(other.meet("a", model=ahead(other, 2), epochs=(2,))) == [Fetch((other.version(1),))]


@pytest.mark.parametrize("lineage", [False, True])
def test_a_doubt_takes_the_place_of_a_plain_fetch(peer: Any, lineage: bool) -> None:
    """Whatever the fetch under way would bring, it was asked without doubt; a change of lineage mends all anyway."""
    b, theirs, _ = fork(peer)
    if lineage:
        b.hear("a", theirs)
    else:
        b.replica.catchup.fetch("c", ahead(b, 4), b.now)
    effects = b.replica.mending.doubt(0, "a", b.now)
    assert effects == ([] if lineage else [Send("a", Fetch((None, b.version(3))))])


def test_a_donor_that_changed_lineage_itself_is_let_go(peer: Any) -> None:
    """What it sends then has not grown from what it told."""
    b, theirs, (one, _) = fork(peer)
    b.hear("a", theirs)
    elsewhere = replace(one, version=Version(0, 150, 6, "y"), history={4: "z", 5: "else", 6: "y"})
    assert b.hear("a", elsewhere) == []
    assert b.replica.catchup.donor is None


def test_a_newcomer_waits_a_while_for_what_the_first_donor_holds(peer: Any) -> None:
    """A tick soon after changes nothing; then it asks for what it lacks, and says what it has. If the first does not
    tell for long, whoever is heard next is asked."""
    n = peer("n", epoch=None, live="")
    summary = peer("a").replica.roster.mine
    assert n.said(n.hear("a", Probe(summary))) == [Fetch((None,), shards=())]
    n.pass_time(1.0)
    assert n.said(n.hear("a", Versions((n.version(1),), forked=False))) == [Fetch((None,), shards=(0,))]
    n = peer("n", epoch=None, live="")
    n.hear("a", Probe(summary))
    assert n.said(n.pass_time(n.rules.settle + 1.0)).count(Fetch((None,), shards=())) == 1


def test_nothing_is_fetched_while_payloads_come(peer: Any) -> None:
    """On a slow link the commit is among or behind them: it would come twice. Once they rest it is asked for; and after
    a while even so, for what comes may be something else."""
    b = peer("b", group="abc")
    b.meet("a", model=ahead(b, 2), epochs=(2,))
    for _ in range(10):
        b.now += 1.0
        b.feed(Moving("c"))
        assert not b.said(b.meet("a", model=ahead(b, 2), epochs=(2,)))
    b.now += b.rules.settle
    assert b.said(b.meet("a", model=ahead(b, 2), epochs=(2,))) == [Fetch((b.held,))]
    long = peer("b", group="abc")
    began, asked = long.now, []
    while not asked:
        assert long.now - began < 2 * long.rules.fetch_again
        asked = long.said(long.meet("a", model=ahead(long, 2), epochs=(2,)))
        long.now += 1.0
        long.feed(Moving("c"))
    assert long.now - began > long.rules.fetch_again


def test_who_is_more_than_a_round_behind_waits_for_no_payload(peer: Any) -> None:
    """No commit brings it there."""
    b = peer("b", group="abc")
    b.meet("a", model=ahead(b, 5), epochs=(5,))
    b.now += b.rules.settle
    b.feed(Moving("c"))
    assert b.said(b.meet("a", model=ahead(b, 5), epochs=(5,)))


def test_a_newcomer_that_lacks_a_commit_asks_at_once(peer: Any) -> None:
    """Before training starts a commit that leads too far shows one that nobody sent here: it is asked for, and not
    waited for. A peer that trains waits a moment: it comes, as a rule."""
    told = {}
    for epochs in ((5, 4), (4, 4)):  # the shards of the first are at unlike epochs, so that it does not train yet
        n = peer("n", epoch=None, live="", fragments=((0, 1),))
        n.feed(Restore(tuple(n.state(shard, epoch) for shard, epoch in enumerate(epochs))))
        n.meet("b")
        commit = Commit(1, n.version(5), n.version(6), 0, "b", (), n.plan("ab"), "mean")
        told[epochs] = [type(message) for message in n.said(n.hear("b", commit))]
    assert told == {(5, 4): [Fetch], (4, 4): []}
