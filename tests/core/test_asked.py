"""What counts as an answer: only from a peer that was asked, and only for a while. Commits also count from their
author."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.asked import Asked
from p2p_diloco.core.events import Applied, Apply, Complaint, Delivered, Fill, Moving, Send
from p2p_diloco.core.messages import Commit, Fetch, Message, Plan, Promise, Stale, TakeOver, Versions, Want
from p2p_diloco.core.version import ContributionId, Version
from tests.core.conftest import LIFE, PLAIN, Peer, ahead, commit_on, fetches, running

BASE = Peer.version(1)
COMMIT = commit_on(Peer.state(0, 1))


def refusals(effects: list[Any]) -> list[str]:
    return [f"{e.peer}: {e.why}" for e in effects if isinstance(e, Complaint)]


# -- when a question is open


@pytest.mark.parametrize(
    ("message", "mode", "asks"),
    [
        (Fetch((BASE,)), "sync", True),
        (Peer.contribution(BASE), "sync", True),
        (TakeOver(0, BASE, 1), "sync", True),
        (Versions((BASE,), forked=True), "sync", True),
        (Promise(0, BASE, 1), "sync", False),
        (Want(0, BASE), "sync", False),
        (COMMIT, "sync", False),
        (COMMIT, "async", True),
    ],
)
def test_a_message_that_may_be_answered_is_a_question(message: Message, mode: str, asks: bool) -> None:
    """Only to the peer that it is sent to. A commit is one in asynchronous mode, where its receiver may be further."""
    asked = Asked(replace(PLAIN, mode=mode))
    asked.sent([Send("a", message)], 0.0)
    assert (asked.open("a", 0.0), asked.open("b", 0.0)) == (asks, False)


def test_a_question_is_open_for_a_while() -> None:
    """The time begins again when the question is delivered, and when a transfer makes progress before it is over."""
    asked, lasts = Asked(PLAIN), PLAIN.answered_within
    question = Fetch((BASE,))
    asked.sent([Send("a", question)], 0.0)
    assert asked.open("a", lasts - 1)
    assert not asked.open("a", lasts)
    asked.delivered("a", question, 10.0)
    assert asked.open("a", lasts + 9)
    asked.progresses("a", lasts)
    assert asked.open("a", 2 * lasts - 1)
    asked.progresses("a", 2 * lasts)
    assert not asked.open("a", 2 * lasts)


def test_a_delivery_that_is_no_question_and_a_transfer_without_one_open_nothing() -> None:
    asked = Asked(PLAIN)
    asked.delivered("a", Promise(0, BASE, 1), 0.0)
    asked.progresses("b", 0.0)
    assert not asked.open("a", 0.0)
    assert not asked.open("b", 0.0)


def test_questions_whose_time_is_over_are_forgotten() -> None:
    """They take no memory for peers that are long gone."""
    asked = Asked(PLAIN)
    for peer, when in (("a", 0.0), ("b", 10.0)):
        asked.sent([Send(peer, Fetch(()))], when)
    asked.tick(PLAIN.answered_within)
    assert set(asked._when) == {"b"}


def test_a_replica_records_its_questions_their_delivery_and_their_transfers(peer: Any) -> None:
    b = peer("b")
    asked, lasts = b.replica.roster.asked, b.rules.answered_within
    (send,) = b.contribute()
    assert asked.open("a", b.now)
    b.feed(Delivered("a", send.message), 10.0)
    b.feed(Moving("a"), lasts - 1.0)
    assert asked.open("a", b.now + lasts - 1.0)
    asked.sent([Send("z", Fetch(()))], b.now)
    b.pass_time(lasts + 1.5)
    assert "z" not in asked._when


# -- commits


def test_a_commit_counts_from_its_author_or_as_an_answer(peer: Any) -> None:
    """A commit that a third peer sends by itself is ignored: it need not be what the author wrote."""
    b = peer("b")
    commit = b.commit()
    refused = b.hear("c", commit, asked=False)
    assert refusals(refused) == ["c: a commit of a is ignored: it was not asked for"]
    assert not any(isinstance(e, Apply) for e in refused)
    for sender, asked in (("a", False), ("c", True)):
        taker = peer("b")
        assert any(isinstance(e, Apply) for e in taker.hear(sender, commit, asked=asked))


def test_an_early_commit_that_was_not_asked_for_is_not_stored(peer: Any) -> None:
    b = peer("b")
    early = commit_on(b.state(0, 3))
    b.hear("c", early, asked=False)
    assert len(b.replica.logs[0].incoming) == 0
    b.hear("a", early, asked=False)
    assert len(b.replica.logs[0].incoming) == 1


# -- states and versions


def test_a_state_that_was_not_asked_for_is_ignored(peer: Any) -> None:
    """It would replace the model."""
    b = peer("b")
    effects = b.hear("a", b.state(0, 4), asked=False)
    assert refusals(effects) == ["a: a state of shard 0 is ignored: it was not asked for"]
    assert not any(isinstance(e, Fill) for e in effects)
    assert any(isinstance(e, Fill) for e in b.hear("a", b.state(0, 4)))


def test_a_peer_that_can_not_apply_commits_takes_states_of_candidates(peer: Any) -> None:
    """They send a state in place of a commit, without a question."""
    b = peer("b", group="ab", live="ac")
    b.replica.roster.says(unlike=True)
    assert not any(isinstance(e, Fill) for e in b.hear("c", b.state(0, 4), asked=False))
    assert any(isinstance(e, Fill) for e in b.hear("a", b.state(0, 4), asked=False))


def test_a_submitter_takes_states_of_candidates(peer: Any) -> None:
    """The aggregator answers a submission with a state, however late. Without a submission the state is ignored."""
    for submitted in (False, True):
        a = running(peer, "a")
        if submitted:
            a.contribute()
            a.now += 10 * a.rules.answered_within
        assert any(isinstance(e, Fill) for e in a.hear("c", a.state(0, 4), asked=False)) is submitted


def test_versions_that_were_not_asked_for_are_ignored(peer: Any) -> None:
    """A greater model on another lineage would stop the rounds here."""
    b = peer("b")
    theirs = Versions((Version(0, 99, 1, "other"),), forked=True)
    told = b.hear("a", theirs, asked=False)
    assert told == [Complaint("a", "its versions are ignored: they were not asked for")]
    assert not b.replica.logs[0].frozen
    assert fetches(b.hear("a", theirs)) != []
    assert b.replica.logs[0].frozen


def test_a_newcomer_begins_with_the_versions_of_the_peer_that_it_asked(peer: Any) -> None:
    n = peer("n", epoch=None, live="")
    assert fetches(n.meet("a", model=ahead(n, 7), epochs=(7,))) != []
    n.hear("c", Versions((n.version(9),), forked=False), asked=False)
    assert n.replica.catchup.gathering.vector is None
    n.hear("a", Versions((n.version(7),), forked=False), asked=False)
    assert n.replica.catchup.gathering.vector == (n.version(7),)


# -- requests and refusals


def test_a_contribution_is_sent_again_for_the_aggregator_alone(peer: Any) -> None:
    """Any other peer could have it sent again and again."""
    b = peer("b")
    (send,) = b.contribute()
    b.feed(Delivered("a", send.message))
    assert b.hear("c", Want(0, b.held)) == []
    assert b.hear("a", Want(0, b.held)) == [send]


def test_a_submission_is_refused_only_by_a_peer_that_it_was_sent_to(peer: Any) -> None:
    a = running(peer, "a", max_staleness=2)
    a.contribute()
    own = a.replica.logs[0].own
    refusal = Stale(0, ContributionId(LIFE, 1), a.version(9))
    a.hear("b", refusal, asked=False)
    assert own.refused is None
    a.hear("c", refusal, asked=False)
    assert own.refused == a.version(9)


def test_an_answered_question_is_not_lost_by_a_commit_of_another_peer(peer: Any) -> None:
    """A peer that was asked may answer with several commits, one after the other."""
    b = peer("b")
    first = b.commit(plan=Plan(tuple("abc"), tuple("abc")))
    b.replica.roster.asked.sent([Send("c", Fetch((b.held,)))], b.now)
    for _ in range(2):
        commit: Commit = b.commit(plan=first.plan)
        b.hear("c", commit, asked=False)
        b.feed(Applied(0, commit.base, commit.version.digest))
    assert b.held == b.version(3)
