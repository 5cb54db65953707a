"""Catching up: a newcomer's state, the smallest answer that closes a gap, and donors that fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.events import (
    Accept,
    Applied,
    Changed,
    Complaint,
    Delivered,
    Moving,
    Ready,
    Restore,
    Send,
    SendFailed,
)
from p2p_diloco.core.messages import Commit, Fetch, Leave, Plan, Probe, Versions
from p2p_diloco.core.version import model_version
from tests.core.conftest import TWO, ahead, fetches, fill, filled, running, to


def late_newcomer(peer: Any, **rules: Any) -> Any:
    """A newcomer whose state came more slowly than the rounds: it is of epoch 1, and the first kept commit is on epoch
    3."""
    n = peer("n", epoch=None, live="", **rules)
    n.meet("a", model=model_version([n.version(1)]), epochs=(1,))
    n.hear("a", Versions((n.version(1),), forked=False))
    plan = Plan(tuple("abc"), tuple("abc"))
    n.hear("a", Commit(0, n.version(3), n.version(4), 0, "a", (), plan))
    n.meet("a", model=model_version([n.version(4)]), epochs=(4,))
    n.hear("a", n.state(0, 1))
    return n


def fetching(peer: Any) -> Any:
    """A peer that is one commit behind in each of two shards, has asked a, and also knows c."""
    n = peer("n", epoch=6, group="acn", fragments=TWO)
    n.now += 2.0
    n.meet("a", model=ahead(n, 7), epochs=(7, 7))
    n.now += 2.0
    assert n.said(n.meet("a", model=ahead(n, 7), epochs=(7, 7))) == [Fetch((n.version(6), n.version(6)))]
    assert n.replica.catchup.donor == "a"
    n.meet("c", model=ahead(n, 7), epochs=(7, 7))
    return n


# -- a newcomer


def test_a_newcomer_asks_the_first_peer_that_holds_a_state(peer: Any) -> None:
    """It asks once, and takes that peer's versions as the target."""
    n = peer("n", epoch=None, live="")
    n.meet("a", **n.blank())
    assert n.replica.catchup.donors() == []
    model = model_version([n.version(7)])
    effects = n.meet("b", model=model, epochs=(7,))
    assert effects[-1] == Send("b", Fetch((None,), shards=()))
    assert not n.said(n.meet("c", model=model, epochs=(7,)))
    assert n.replica.catchup.donors() == ["b"]


def test_a_newcomer_is_ready_when_all_shards_are_filled_in(peer: Any) -> None:
    """A shard is adopted when its digest is right. Then all live and named peers are probed, because they may soon wait
    for it."""
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


def test_a_hole_between_the_gathered_state_and_the_kept_commits_is_fetched_at_once(peer: Any) -> None:
    """The commits in between will not arrive any more. Training does not start before they are fetched."""
    n = late_newcomer(peer)
    effects = filled(n, n.state(0, 1))
    assert Send("a", Fetch((n.version(1),), shards=())) in effects
    assert Ready() not in effects
    n.hear("a", Versions((n.version(4),), forked=False))
    n.hear("a", n.state(0, 4))
    assert Ready() in filled(n, n.state(0, 4))


def test_a_hole_is_fetched_from_the_author_of_the_newest_kept_commit(peer: Any) -> None:
    """It holds the most. If it does not tell what, gathering begins anew."""
    n = late_newcomer(peer)
    n.meet("c", model=model_version([n.version(6)]), epochs=(6,))
    n.hear("c", Commit(0, n.version(5), n.version(6), 0, "c", (), Plan(tuple("abc"), tuple("abc"))))
    assert [to for to, _ in fetches(filled(n, n.state(0, 1)))] == ["c"]
    n.pass_time(n.rules.settle + 1.1)
    assert not any(asked.vector for asked in [n.replica.catchup.gathering] if asked is not None)


def test_a_newcomer_with_a_part_of_a_state_asks_nothing_more_when_a_commit_comes(peer: Any) -> None:
    """The rest is on its way."""
    n = peer("n", epoch=None, live="", fragments=TWO)
    n.hear("a", n.state(0, 1))
    filled(n, n.state(0, 1))
    assert fetches(n.hear("a", Commit(0, n.version(3), n.version(4), 0, "a", (), n.plan("abc")))) == []


def test_a_newcomer_that_has_missed_a_commit_asks_the_author_of_the_next(peer: Any) -> None:
    """Before its training has started: the author of the commit in between may not have known of it. Nothing more is
    asked while the answer is on its way."""
    n = peer("n", epoch=None, live="", fragments=((0, 1),))
    n.feed(Restore((n.state(0, 1), n.state(1, 2))))
    n.meet("a", model=model_version([n.version(4)] * 2), epochs=(4,))
    commit = Commit(0, n.version(3), n.version(4), 0, "a", (), n.plan("abc"))
    assert fetches(n.hear("a", commit)) == [("a", Fetch((n.version(1), n.version(2))))]
    assert n.replica.catchup.donor == "a"
    assert fetches(n.pass_time(n.rules.fetch_again - 1.0)) == []
    n.hear("a", n.state(0, 3))
    filled(n, n.state(0, 3))
    assert (n.replica.versions[0], n.replica.catchup.donor) == (n.version(3), None)


def test_training_starts_when_the_kept_commits_are_applied(peer: Any) -> None:
    """A first contribution on the state before them would be too late."""
    n = late_newcomer(peer)
    filled(n, n.state(0, 1))
    n.hear("a", n.state(0, 3))
    assert Ready() not in filled(n, n.state(0, 3))
    assert Ready() in n.feed(Applied(0, n.version(3), "d4"))


def test_nothing_is_fetched_where_the_kept_commits_follow_the_gathered_state(peer: Any) -> None:
    """They are applied one after another."""
    n = peer("n", epoch=None, live="")
    n.meet("a", model=model_version([n.version(1)]), epochs=(1,))
    n.hear("a", Versions((n.version(1),), forked=False))
    n.hear("a", Commit(0, n.version(1), n.version(2), 0, "a", (), Plan(tuple("abc"), tuple("abc"))))
    n.hear("a", n.state(0, 1))
    assert not any(isinstance(e, Send) and isinstance(e.message, Fetch) for e in filled(n, n.state(0, 1)))


def test_a_hole_is_not_fetched_at_once_if_its_aggregator_is_gone(peer: Any) -> None:
    """The next peer that is seen ahead is asked instead."""
    n = late_newcomer(peer)
    n.lose("a")
    assert not any(isinstance(e, Send) and isinstance(e.message, Fetch) for e in filled(n, n.state(0, 1)))


def test_a_newcomer_that_lacks_a_commit_asks_at_once(peer: Any) -> None:
    """The author of the missing commit may not have known of this newcomer. A peer that trains waits for a while,
    because the commit usually arrives."""
    told = {}
    for epochs in ((5, 4), (4, 4)):  # the shards of the first are at unlike epochs, so that it does not train yet
        n = peer("n", epoch=None, live="", fragments=((0, 1),))
        n.feed(Restore(tuple(n.state(shard, epoch) for shard, epoch in enumerate(epochs))))
        n.meet("b")
        commit = Commit(1, n.version(5), n.version(6), 0, "b", (), n.plan("ab"), "mean")
        told[epochs] = [type(message) for message in n.said(n.hear("b", commit))]
    assert told == {(5, 4): [Fetch], (4, 4): []}


def test_a_state_that_comes_twice_is_filled_in_once(peer: Any) -> None:
    n = peer("n", epoch=None, live="")
    n.meet("b", model=model_version([n.version(7)]), epochs=(7,))
    state = n.state(0, 7)
    assert n.hear("b", state) == [fill(n, state)]
    assert n.hear("b", state) == []
    filled(n, state)
    assert n.hear("b", state) == []


def test_a_fetched_state_with_another_digest_is_not_taken(peer: Any) -> None:
    """A note says so, and the next peer that holds a state is asked."""
    n = peer("n", epoch=None, live="")
    model = model_version([n.version(7)])
    n.meet("b", model=model, epochs=(7,))
    state = n.state(0, 7)
    n.hear("b", state)
    (note,) = filled(n, state, "wrong")
    assert note.kind == "mismatch"
    assert n.replica.versions == (None,)
    assert n.meet("c", model=model, epochs=(7,))[-1] == Send("c", Fetch((None,), shards=()))


def test_a_filled_state_that_was_given_up_is_not_accepted(peer: Any) -> None:
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
def test_a_donor_sends_the_least_that_closes_the_gap(peer: Any, have: int | None, answer: list[str]) -> None:
    """Nothing for its own version, the last commit for the version before, the whole state for all others."""
    b = peer("b", group="abc")
    commit = b.commit(plan=b.plan("ab"))
    b.take(commit)
    known = {"commit": commit, "state": b.replica.state(0)}
    effects = b.hear("a", Fetch((None if have is None else b.version(have),)))
    assert effects == [Send("a", known[kind]) for kind in answer]


def test_a_state_that_was_fetched_is_passed_on_whole(peer: Any) -> None:
    """Its last commit did not arrive with it."""
    b = peer("b", epoch=3, group="ab")
    assert b.hear("a", Fetch((b.version(2),))) == [Send("a", b.replica.state(0))]


def test_only_newer_shards_are_sent(peer: Any) -> None:
    b = peer("b", epoch=3, group="ab", fragments=TWO)
    assert b.hear("a", Fetch((b.version(3), b.version(1)))) == [Send("a", b.replica.state(1))]


def test_an_asker_that_is_ahead_in_part_is_told_the_versions_too(peer: Any) -> None:
    """Where it is ahead it may be on another lineage, and needs the versions to compare."""
    b = peer("b", epoch=3, group="ab", fragments=TWO)
    versions = Versions((b.version(3), b.version(3)), forked=False)
    assert b.hear("a", Fetch((b.version(4), b.version(1)))) == [Send("a", b.replica.state(1)), Send("a", versions)]


def test_a_peer_that_holds_only_a_part_answers_nothing(peer: Any) -> None:
    """Nor is a request with another number of shards answered: it is of another run."""
    n = peer("n", epoch=None, live="", fragments=TWO)
    n.meet("b", model=model_version([n.version(7)] * 2), epochs=(7, 7))
    n.hear("b", n.state(0, 7))
    filled(n, n.state(0, 7))
    assert n.hear("b", Fetch((None, None))) == []
    assert peer("b", fragments=TWO).hear("a", Fetch((None,))) == []


def test_an_asker_that_knows_of_the_fork_is_sent_all_that_differs(peer: Any) -> None:
    b = peer("b", epoch=3, group="ab", fragments=((0,), (1,), (2,)))
    have = (b.version(3), b.version(3, "other"), b.version(5, "other"))
    effects = b.hear("a", Fetch(have, whole=True))
    assert effects == [Send("a", b.replica.state(1)), Send("a", b.replica.state(2))]


def test_shards_that_are_asked_for_as_a_whole_are_sent_though_they_are_equal(peer: Any) -> None:
    """The asker takes the whole lineage as told, and the shards that it has by now are part of it."""
    b = peer("b", epoch=3, group="ab", fragments=((0,), (1,), (2,)))
    have = (b.version(3), b.version(3, "other"), b.version(5, "other"))
    effects = b.hear("a", Fetch(have, whole=True, shards=(0, 2)))
    assert effects == [Send("a", b.replica.state(0)), Send("a", b.replica.state(2))]


# -- asking


def test_a_peer_that_is_seen_ahead_is_asked_after_settle(peer: Any) -> None:
    """Usually the commit that it is ahead by is just arriving."""
    b = peer("b", group="ab")
    assert not b.said(b.meet("a", model=ahead(b, 2), epochs=(2,)))
    b.now += 1.9
    assert not b.said(b.meet("a", model=ahead(b, 2), epochs=(2,)))
    b.now += 0.1
    assert b.said(b.meet("a", model=ahead(b, 2), epochs=(2,))) == [Fetch((b.version(1),))]


def test_an_asynchronous_peer_asks_each_peer_ahead_now_and_then(peer: Any) -> None:
    """For the shards that it is named to hold. To be behind is usual there, but not once the run has ended: then it
    asks for all."""
    b = running(peer, "b", stop_after_epochs=5)
    before_the_end, at_the_end = ({"model": ahead(b, epoch), "epochs": (epoch,)} for epoch in (4, 5))
    asked = [("a", Fetch((b.held,), shards=(0,))), ("c", Fetch((b.held,), shards=(0,)))]
    for _ in range(2):
        assert [*fetches(b.meet("a", **before_the_end)), *fetches(b.meet("c", **before_the_end))] == asked
        assert b.said(b.meet("a", **before_the_end)) == []
        b.now += b.rules.settle
    b.meet("a", **at_the_end)
    b.now += b.rules.settle
    assert fetches(b.meet("a", **at_the_end)) == [("a", Fetch((b.held,), shards=()))]


def test_a_commit_that_arrives_restarts_the_wait(peer: Any) -> None:
    """A peer that keeps receiving its commits does not fetch, however long another stays ahead of it."""
    b = peer("b", group="ab")
    for epoch in range(1, 6):
        assert not b.said(b.meet("a", model=ahead(b, epoch + 1), epochs=(epoch + 1,)))
        commit = Commit(0, b.held, b.version(epoch + 1), 0, "a", (), Plan(("a", "b"), ("a", "b")))
        b.now += 1.5
        b.take(commit)
        b.now += 0.6
        assert not b.said(b.meet("a", model=ahead(b, epoch + 2), epochs=(epoch + 2,)))


def test_a_gap_that_does_not_close_is_fetched_though_other_shards_move(peer: Any) -> None:
    """Contributions on an unknown base show that a commit was lost."""
    b = peer("b", group="ab", fragments=TWO)
    b.hear("a", b.contribution(b.version(2)))
    b.now += 1.5
    commit = Commit(1, b.version(1), b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    b.take(commit)
    b.hear("a", b.contribution(b.version(2)))  # seen again: the gap is as old as before
    b.now += 0.5
    assert b.said(b.meet("a", model=ahead(b, 2), epochs=(2, 2))) == [Fetch((b.version(1), b.version(2)))]


def test_a_commit_on_an_unknown_base_is_a_gap(peer: Any) -> None:
    b = peer("b", group="ab")
    b.hear("a", Commit(0, b.version(2), b.version(3), 0, "a", (), Plan(("a", "b"), ("a", "b"))))
    assert b.replica.catchup.lag.missed == {0: (b.version(1), b.now)}
    b.now += 2.0
    assert b.said(b.meet("a", model=ahead(b, 3), epochs=(3,))) == [Fetch((b.version(1),), shards=())]


def test_a_gap_that_has_closed_hurries_nothing(peer: Any) -> None:
    b = peer("b", group="ab")
    b.hear("a", b.contribution(b.version(2)))
    b.take(b.commit(plan=b.plan("ab")))
    b.now += 5.0
    assert not b.said(b.meet("a", model=ahead(b, 3), epochs=(3,)))


@pytest.mark.parametrize("epoch", [1, 0])
def test_a_peer_that_is_not_ahead_is_not_asked(peer: Any, epoch: int) -> None:
    b = peer("b", group="ab")
    for _ in range(3):
        assert not b.said(b.meet("a", model=ahead(b, epoch), epochs=(epoch,)))
        b.now += 5.0


def test_a_commit_that_reaches_the_target_ends_the_fetch(peer: Any) -> None:
    """Another peer may be asked then."""
    b = peer("b", group="abc")
    b.replica.catchup.fetch("a", ahead(b, 2), b.now)
    b.take(b.commit(plan=b.plan("ab")), "c")
    assert b.replica.catchup.donor is None


def test_a_state_that_descends_from_the_present_one_is_taken_from_any_peer(peer: Any) -> None:
    """Its ancestors contain the present state, so nothing is compared. No commit on the way counts this peer, so it
    probes all peers."""
    b = peer("b", group="ab")
    state = b.state(0, 4, plan=b.plan("ab"))
    assert b.hear("a", state) == [fill(b, state)]
    assert filled(b, state) == [Accept(((0, "d4"),)), Send("a", Probe(b.replica.roster.mine)), Changed()]
    assert b.held == b.version(4)


@pytest.mark.parametrize("other", ["older", "fork", "oldest", "generation"])
def test_an_older_or_forked_state_is_not_taken_by_itself(peer: Any, other: str) -> None:
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


def test_a_state_that_has_forgotten_the_present_epoch_is_taken(peer: Any) -> None:
    """Nothing shows a fork."""
    b = peer("b", epoch=3, group="ab")
    state = b.state(0, 900, history=((800, "x"), (900, "d900")))
    assert b.hear("a", state) == [fill(b, state)]


def test_a_state_that_has_forgotten_the_present_epoch_and_has_fewer_samples_is_not_taken(peer: Any) -> None:
    """Samples never fall along a lineage, so it is of another one."""
    b = peer("b", epoch=3, group="ab")
    history = ((800, "x"), (900, "d900"))
    assert b.hear("a", b.state(0, 900, version=b.version(900, samples=29), history=history)) == []
    level = b.state(0, 900, version=b.version(900, samples=30), history=history)
    assert b.hear("a", level) == [fill(b, level)]


def test_a_state_that_a_commit_overtakes_is_void(peer: Any) -> None:
    """The present state is another one than when it began."""
    b = peer("b", group="ab")
    state = b.state(0, 4)
    b.hear("a", state)
    b.take(b.commit(plan=b.plan("ab")))
    assert filled(b, state) == []
    assert b.held == b.version(2)


def test_a_peer_that_was_ahead_and_died_hurries_nothing(peer: Any) -> None:
    """The wait counts from the first live peer that was seen ahead."""
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


def test_nothing_is_fetched_while_payloads_come(peer: Any) -> None:
    """On a slow link the missing commit may be among or behind them. The state is asked for once no more bytes come,
    and after fetch_again in any case, because the bytes may be something else."""
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


def test_a_peer_more_than_a_round_behind_does_not_wait_for_payloads(peer: Any) -> None:
    """The commits on their way would not suffice."""
    b = peer("b", group="abc")
    b.meet("a", model=ahead(b, 5), epochs=(5,))
    b.now += b.rules.settle
    b.feed(Moving("c"))
    assert b.said(b.meet("a", model=ahead(b, 5), epochs=(5,)))


def test_an_asynchronous_peer_fetches_what_it_must_hold_and_looks_at_the_rest(peer: Any) -> None:
    """A successor that is behind asks for its shards; other peers sometimes ask for none, so that a fork is noticed."""
    ahead = running(peer, "c").replica.roster.mine.model
    ahead = replace(ahead, samples=ahead.samples + 10, epochs=ahead.epochs + 1)
    b, a = running(peer, "b"), running(peer, "a")
    assert to(b.meet("c", model=ahead), "c", Fetch) == [Fetch((b.version(1),), shards=(0,))]
    assert to(b.meet("c", model=ahead), "c", Fetch) == []
    assert to(a.meet("c", model=ahead), "c", Fetch) == [Fetch((a.version(1),), shards=())]
    for one, asks in ((a, 0), (b, 1)):
        one.now += one.rules.settle
        assert len(to(one.meet("c", model=ahead), "c", Fetch)) == asks
    a.now += a.rules.dead_after
    assert to(a.meet("c", model=ahead), "c", Fetch) == [Fetch((a.version(1),), shards=())]


# -- donors that fail


def test_a_silent_donor_is_replaced(peer: Any) -> None:
    """It answers probes but sends no state: after the timeout another donor is asked."""
    n = fetching(peer)
    assert fetches(n.pass_time(29.5)) == []
    assert [message for _, message in fetches(n.pass_time(2.5))] == [Fetch((n.version(6), n.version(6)))]


def test_a_donor_that_keeps_sending_is_kept(peer: Any) -> None:
    """The clock starts again with each of its states; other peers' states don't count."""
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
    """The next donor is asked for the rest only."""
    n = fetching(peer)
    n.hear("a", n.state(0, 7))
    filled(n, n.state(0, 7))
    n.lose("a")
    n.meet("c", model=ahead(n, 7), epochs=(7, 7))
    n.now += 2.0
    assert fetches(n.meet("c", model=ahead(n, 7), epochs=(7, 7))) == [("c", Fetch((n.version(7), n.version(6))))]


def test_a_donor_that_leaves_is_replaced(peer: Any) -> None:
    n = fetching(peer)
    n.hear("a", Leave(1))
    assert n.replica.catchup.donor is None


def test_a_donor_that_delivered_nothing_lets_others_go_first(peer: Any) -> None:
    """Others that are ahead are asked before it is asked again; if it is the only one, it is asked at once."""
    n = fetching(peer)
    n.pass_time(n.rules.fetch_again + 0.5)
    assert n.replica.catchup.failures.times("a") == 1
    for alone, asked in ((False, []), (True, ["a"])):
        n = fetching(peer)
        n.feed(SendFailed("a", Fetch((n.version(6),) * 2), gone=False))
        for _ in range(4):
            n.replica.catchup.failures.add("a", n.now)
        if alone:
            n.lose("c")
        n.meet("a", model=ahead(n, 7), epochs=(7, 7))
        n.now += 2.0
        assert [donor for donor, _ in fetches(n.meet("a", model=ahead(n, 7), epochs=(7, 7)))] == asked


def test_the_time_for_which_a_failed_donor_waits_doubles_up_to_a_bound(peer: Any) -> None:
    """It ends when the donor restarts."""
    n = peer("n")
    failures, waits = n.replica.catchup.failures, []
    for _ in range(12):
        failures.add("a", 100.0)
        waits.append(next(s for s in range(1000) if not failures.lately("a", 100.0 + s)))
    assert waits[:4] == [n.rules.settle * times for times in (1, 2, 4, 8)]
    assert waits[-1] == n.rules.fetch_again
    n.replica.catchup.gone("a", 100.0)
    assert failures.times("a") == 0
    assert not failures.lately("a", 100.0)


def test_a_donor_of_a_wrong_state_has_failed(peer: Any) -> None:
    """No change to its lineage begins for a while."""
    b = peer("b", group="ab")
    b.hear("a", b.state(0, 4))
    filled(b, b.state(0, 4), "astray")
    assert b.replica.catchup.failures.times("a") == 1
    theirs = Versions((replace(b.version(1), samples=99, digest="other"),), forked=True)
    assert fetches(b.hear("a", theirs)) == []
    assert fetches(b.hear("a", theirs, after=b.rules.fetch_again)) != []


def test_a_donor_that_does_not_tell_its_versions_has_failed(peer: Any) -> None:
    n = peer("n", epoch=None, live="")
    n.meet("a", model=ahead(n, 7), epochs=(7,))
    n.pass_time(n.rules.settle + 1.5)
    assert n.replica.catchup.failures.times("a") == 1


def test_a_donor_that_has_failed_least_is_asked_next(peer: Any) -> None:
    """Else two donors that can't send a shard would be asked in turns, and a third one never."""
    n = peer("n", epoch=None, live="")
    for donor in "abc":
        n.meet(donor, model=ahead(n, 7), epochs=(7,))
    n.hear("a", Versions((n.version(7),), forked=False))
    asked = [donor for _ in range(3) for donor, _ in fetches(n.pass_time(n.rules.fetch_again + 0.5))]
    assert asked[:2] == ["b", "c"]


@pytest.mark.parametrize("lacks", [True, False])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_peer_that_asks_for_a_commit_again_and_again_gets_the_state(peer: Any, mode: str, lacks: bool) -> None:
    """It refuses the commit: d wrote it while all candidates were away. If c holds it alone, all others would wait for
    c, and it would give them that commit, for ever."""
    c, b = (peer(name, group="ab", live="abcdn", mode=mode) for name in "cb")
    commit = c.commit(by="d", term=4)
    for candidate in "ab":
        c.lose(candidate)
    c.take(commit)
    assert c.held == commit.version
    c.meet("b", epochs=(1,), model=ahead(c, 1))
    question = Fetch((b.held,))
    if lacks:  # the commit may still be on its way to b
        c.replica.logs[0].outgoing.lacking.add("b")
        for _ in range(9):
            assert commit in c.said(c.hear("b", question))
        c.feed(Delivered("b", commit))
    for _ in range(c.rules.resends):
        assert commit in c.said(c.hear("b", question))
    assert [e.peer for e in b.hear("c", commit) if isinstance(e, Complaint)] == ["c"]
    assert c.replica.state(0) in c.said(c.hear("b", question))
    assert b.hear("c", c.replica.state(0)) == [fill(b, c.replica.state(0))]
    filled(b, c.replica.state(0))
    assert b.held == commit.version
