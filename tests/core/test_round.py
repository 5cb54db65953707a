"""The data of one version of a shard: when its round opened, when it asks again, and the commit in work."""

from __future__ import annotations

from p2p_diloco.core.events import Apply, Average
from p2p_diloco.core.leadership import Leadership
from p2p_diloco.core.proposal import Proposal
from p2p_diloco.core.round import Round
from tests.core.conftest import Peer, commit_on, roster_of


def a_round() -> Round:
    return Round(Leadership(roster_of("b", "a"), Peer.state(0, 1)))


def test_a_round_asks_after_its_patience_and_then_ever_later() -> None:
    """Each wait is twice the last one, up to the longest."""
    round = a_round()
    round.open(100.0, 2.0)
    assert (round.opened, round.asks_at) == (100.0, 102.0)
    waits = []
    for now in (102.0, 106.0, 113.0, 120.0):
        round.ask_later(now, 7.0)
        waits.append(round.asks_at - now)
    assert waits == [4.0, 7.0, 7.0, 7.0]


def test_a_round_that_opens_again_is_as_patient_as_a_new_one() -> None:
    round = a_round()
    round.open(100.0, 2.0)
    round.ask_later(102.0, 60.0)
    round.open(200.0, 2.0)
    round.ask_later(202.0, 60.0)
    assert (round.opened, round.asks_at) == (200.0, 206.0)


def test_a_dropped_draft_leaves_nothing_of_it_to_be_committed() -> None:
    """Neither the proposal, nor work under way, nor work that waits for a repair. The application of another peer's
    commit goes on."""
    round, commit = a_round(), commit_on(Peer.state(0, 1))
    work = Average(0, commit.base, (), b"", None)
    round.working, round.proposed, round.interrupted = work, Proposal(commit), work
    round.drop_draft()
    assert (round.working, round.proposed, round.interrupted) == (None, None, None)
    round.working = apply = Apply(commit, b"")
    round.drop_draft()
    assert round.working is apply
