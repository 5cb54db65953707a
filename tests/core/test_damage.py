"""A shard whose tensors are damaged: its round stops, and goes on once the tensors are repaired."""

from __future__ import annotations

from typing import Any

from p2p_diloco.core import damage
from p2p_diloco.core.events import Applied, Apply, Average, Damaged
from tests.core.conftest import filled, next_commit, running


def applies(effects: list[Any]) -> list[Any]:
    return [e.commit for e in effects if isinstance(e, Apply)]


def test_a_commit_that_comes_while_the_tensors_are_damaged_is_applied_after_the_repair(peer: Any) -> None:
    """Applied to damaged tensors, a right commit would look like a wrong one."""
    b = peer("b")
    b.feed(Damaged(0, b.held))
    commit = b.commit()
    assert applies(b.hear("a", commit)) == []
    b.hear("c", b.state(0, 1))
    assert applies(filled(b, b.state(0, 1))) == [commit]


def test_a_commit_that_was_being_applied_is_applied_again_after_the_repair(peer: Any) -> None:
    """The result of the first attempt is ignored."""
    b = peer("b")
    commit = b.commit()
    assert applies(b.hear("a", commit)) == [commit]
    b.feed(Damaged(0, b.held))
    assert b.feed(Applied(0, commit.base, "astray")) == []
    b.hear("c", b.state(0, 1))
    assert applies(filled(b, b.state(0, 1))) == [commit]
    b.feed(Applied(0, commit.base, commit.version.digest))
    assert b.held == commit.version


def test_damage_is_new_only_once_and_on_the_present_version(peer: Any) -> None:
    log = peer("b").replica.logs[0]
    assert not damage.found(log, peer.version(7), 1.0)
    assert damage.found(log, log.version, 1.0)
    assert not damage.found(log, log.version, 2.0)
    assert log.round.damaged == 1.0


def test_damage_that_is_given_up_stays_and_is_not_reported_again(peer: Any) -> None:
    log = peer("b").replica.logs[0]
    damage.found(log, log.version, 1.0)
    damage.give_up(log)
    assert (log.round.damaged, log.round.past_mending) == (None, True)
    assert not damage.found(log, log.version, 2.0)


def test_an_average_without_a_proposal_is_begun_anew_after_the_repair(peer: Any) -> None:
    """No peer can hold a commit that was not proposed, so nothing has to be repeated."""
    a = peer("a", group="a", live="")
    a.contribute()
    log = a.replica.logs[0]
    assert isinstance(log.round.working, Average)
    damage.found(log, log.version, a.now)
    assert (log.round.working, log.round.interrupted) == (None, None)
    assert [type(e) for e in damage.mended(log, a.now)] == [Average]


def test_trusted_tensors_are_committed_under_the_next_term_of_this_peer(peer: Any) -> None:
    """Another peer may have claimed the term. The commit counts nothing, because its tensors match no version."""
    b = peer("b")
    b.contribute()
    log = b.replica.logs[0]
    damage.found(log, log.version, b.now)
    (average,) = damage.mended(log, b.now, trusted=True)
    assert (log.lead.term, log.lead.holder, log.lead.promised_by) == (1, "b", None)
    assert (average.contributions, average.held) == ((), None)


def test_a_refuted_commit_is_applied_again_once(peer: Any) -> None:
    """The tensors here may have been wrong. If the commit leads to another digest after the repair, too, it is wrong
    itself; a peer that sends it again and again would keep this one busy for ever."""
    b = running(peer, "b")
    commit = next_commit(b)
    b.hear("c", commit)
    b.feed(Applied(0, commit.base, "astray"))
    b.hear("c", b.state(0, 1))
    assert applies(filled(b, b.state(0, 1))) == [commit]
    b.feed(Applied(0, commit.base, "astray"))
    assert b.replica.logs[0].incoming.commits == {}
    assert b.replica.logs[0].round.damaged is None
