"""Revisions of the outer rates: the highest goes into every commit, to every peer, and never back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.events import (
    Accept,
    Applied,
    Apply,
    Average,
    Complaint,
    Fill,
    Filled,
    Finished,
    Note,
    Revised,
    Send,
)
from p2p_diloco.core.messages import Commit, Counted, Fetch, Held, Plan, Probe, ProbeAck, Promise, State, Versions
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.state import meta_of
from p2p_diloco.core.version import ContributionId, Version
from tests.core.conftest import round_alone, solo

FIRST = Revision(1, 0.5, 0.9, "signed")
SECOND = Revision(2, 0.3, 0.0, "signed")


def commit_on(peer: Any, revision: Revision, author: str = "b") -> Commit:
    """The next commit of shard 0, made by another peer."""
    base = peer.held
    version = Version(0, base.samples + 5, base.epoch + 1, f"d{base.epoch + 1}")
    counted = (Counted(author, ContributionId(1, 1), 2.0, 5),)
    return Commit(0, base, version, 0, author, counted, peer.plan("abc", "bac"), "mean", revision)


def notes(effects: list[Any]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Note) and effect.kind == "revision"]


def test_revisions_are_ordered_by_number_and_values_not_by_proof() -> None:
    """The higher number wins; of equal numbers the greater values win, on every peer alike."""
    assert FOUNDED < FIRST < SECOND
    assert max(Revision(1, 0.5, 0.9), Revision(1, 0.7, 0.0)) == Revision(1, 0.7, 0.0)
    assert Revision(1, 0.5, 0.9, "x") == Revision(1, 0.5, 0.9, "y")
    assert FOUNDED.rates is None
    assert FIRST.rates == (0.5, 0.9)


def test_a_revision_is_shown_with_its_rates() -> None:
    """Except for what the run was founded with, whose rates are in its settings."""
    assert str(FOUNDED) == "revision 0 (as founded)"
    assert str(FIRST) == "revision 1 (outer_lr=0.5, outer_momentum=0.9)"


def test_what_was_signed_and_saved_before_stays_valid() -> None:
    """A revision of the rates alone has the bytes that it had when revisions changed only rates. A revision of anything
    else differs from it, and names all that it changes."""
    assert FIRST.covered == (1, 0.5, 0.9)
    others = [
        replace(FIRST, **{name: 3}) for name in ("sync_every", "min_peers", "stop_after_epochs", "stop_after_samples")
    ]
    others += [replace(FIRST, saves=1), replace(FIRST, stop_after_epochs=0), replace(FIRST, stop_after_samples=0)]
    assert len({revision.covered for revision in (FIRST, *others)}) == len(others) + 1
    assert replace(FIRST, stop_after_epochs=0).changed == {
        "outer_lr": 0.5, "outer_momentum": 0.9, "stop_after_epochs": None
    }  # fmt: skip


def test_the_digest_covers_the_revision() -> None:
    """Two states that differ only in their revision have different digests; without a revision the digest is as
    before."""
    founded = State(0, Version(0, 1, 1, ""), 0, Plan(("a",), ("a",)), {}, {})
    others = [replace(founded, buffered=b, revision=r) for b, r in ((0, FIRST), (0, SECOND), (3, FIRST))]
    assert meta_of(founded) == b'[0,1,1,0,["a"],["a"],[]]'
    assert len({meta_of(state) for state in (founded, *others)}) == 4


def test_the_founders_revision_goes_into_the_next_commit(peer: Any) -> None:
    """The aggregator takes the outer step with it, the digest covers it, and the commit names it."""
    a = peer("a", group="ab")
    assert notes(a.feed(Revised(FIRST))) == [
        f"this peer has learnt of {FIRST}; each shard adopts it with its next commit"
    ]
    a.contribute()
    work = a.hear("b", a.contribution(a.held))
    average = work[-1]
    assert isinstance(average, Average)
    assert average.revision == FIRST
    assert b"[1,0.5,0.9]" in average.meta
    effects = a.averaged(work)
    (sent,) = {m.revision for m in a.said(effects) if isinstance(m, Commit)}
    assert sent == FIRST
    assert notes(effects) == [f"all shards now use {FIRST}"]
    assert a.replica.revision == a.replica.state(0).revision == FIRST


def test_a_peer_that_restarted_may_bring_a_revision(peer: Any) -> None:
    a = peer("a", group="ab")
    assert notes(a.meet("b", incarnation=9, revision=FIRST)) != []


def test_a_revision_does_not_change_a_step_under_way(peer: Any) -> None:
    """The next commit names it."""
    a = peer("a", group="ab")
    a.contribute()
    work = a.hear("b", a.contribution(a.held))
    a.feed(Revised(FIRST))
    effects = a.averaged(work)
    assert [m.revision for m in a.said(effects) if isinstance(m, Commit)] == [FOUNDED]
    assert a.replica.revision == FOUNDED


def test_each_probe_and_its_answer_hand_on_the_highest_revision(peer: Any) -> None:
    """With the signature, so that others can check it. This peer's commits name it, too."""
    a = peer("a", group="ab")
    assert notes(a.hear("b", Probe(a.about(revision=FIRST)))) != []
    answer = next(e.message for e in a.hear("b", Probe(a.about())) if isinstance(e, Send))
    assert isinstance(answer, ProbeAck)
    assert answer.summary.revision == FIRST
    assert answer.summary.revision.proof == "signed"
    a.contribute()
    assert a.hear("b", a.contribution(a.held))[-1].revision == FIRST


def test_a_lesser_revision_that_comes_late_changes_nothing(peer: Any) -> None:
    """Nor does a repeated one; neither is noted."""
    a = peer("a", group="ab")
    a.feed(Revised(SECOND))
    assert notes(a.feed(Revised(FIRST))) == notes(a.hear("b", ProbeAck(a.about(revision=SECOND)))) == []
    assert a.replica.roster.mine.revision == SECOND


def test_a_commit_is_applied_with_the_revision_that_it_names(peer: Any) -> None:
    """Not with the revision that this peer has heard of. A peer that applies a commit knows its revision, with the
    signature."""
    a = peer("a", succession="bac")
    a.feed(Revised(SECOND))
    commit = commit_on(a, FIRST)
    (apply,) = a.hear("b", commit)
    assert isinstance(apply, Apply)
    assert apply.commit.revision == FIRST
    assert apply.meta.endswith(b",0,[1,0.5,0.9]]")
    effects = a.feed(Applied(0, commit.base, commit.version.digest))
    assert any(isinstance(effect, Accept) for effect in effects)
    assert a.replica.revision == FIRST
    assert a.replica.roster.mine.revision == SECOND

    b = peer("a", succession="bac")
    b.take(commit, "b")
    assert b.replica.roster.mine.revision.proof == "signed"


def test_a_commit_that_goes_back_a_revision_is_refused(peer: Any) -> None:
    """The author's entry in the status says so."""
    a = peer("a", epoch=None, group="abc")
    state = replace(a.state(0, 1, plan=a.plan("abc", "bac")), revision=SECOND)
    a.hear("b", state)
    a.feed(Filled(0, state.version, state.version.digest))
    why = "a commit of shard 0 is ignored: it would set the shard back to an earlier revision"
    assert a.hear("b", commit_on(a, FIRST)) == [Complaint("b", why)]


def test_a_newcomer_gets_the_revision_with_the_state(peer: Any) -> None:
    """It passes it on in states and probes."""
    a = peer("a", epoch=None)
    state = replace(a.state(0, 1), revision=FIRST)
    (fill,) = [e for e in a.hear("b", state) if isinstance(e, Fill)]
    assert fill.meta == meta_of(state)
    assert b"[1,0.5,0.9]" in fill.meta
    a.feed(Filled(0, state.version, state.version.digest))
    assert a.replica.revision == a.replica.roster.mine.revision == FIRST
    sent = a.said(a.hear("c", Fetch((None,))))
    assert [m.revision for m in sent if isinstance(m, State)] == [FIRST]


def test_a_revision_of_one_shard_goes_into_the_others(peer: Any) -> None:
    """The aggregator that wrote that commit is dead; another peer that holds it names the revision in its next
    commits."""
    a = peer("a", group="ab", succession="ba", fragments=((0,), (1,)))
    commit = replace(commit_on(a, FIRST), plan=a.plan("ab", "ab"))
    a.take(commit, "b")
    assert a.replica.revision == FOUNDED
    a.lose("b")
    (average,) = [e for e in a.contribute(1) if isinstance(e, Average)]
    assert average.shard == 1
    assert average.revision == FIRST


def test_a_revision_is_not_forgotten_with_a_lineage(peer: Any) -> None:
    """The winning state keeps its lesser revision, because the digest covers it; this peer's next commit on it has the
    higher one."""
    a = peer("a", group="ab", succession="ab")
    a.feed(Revised(FIRST))
    a.contribute()
    a.averaged(a.hear("b", a.contribution(a.held)))
    assert a.replica.revision == FIRST
    theirs = a.version(3, "other", samples=99)
    state = a.state(0, 3, plan=a.plan("ab", "ab"), version=theirs, history=((3, "other"),))
    a.hear("b", Versions((theirs,), forked=True))
    a.hear("b", state)
    a.feed(Filled(0, theirs, "other"))
    assert a.held == theirs
    assert a.replica.revision == FOUNDED
    a.contribute()
    assert a.hear("b", a.contribution(theirs, 2))[-1].revision == FIRST


@pytest.mark.parametrize("asked", [FIRST, SECOND])
def test_an_asynchronous_commit_is_held_with_its_revision(peer: Any, asked: Revision) -> None:
    """The aggregator is at it once its successor holds the commit; then the submitter's answer names it."""
    c = peer("c", group="abc", succession="cb", mode="async", heartbeat_timeout=10.0)
    for other in "ab":
        c.hear(other, Promise(0, c.held, 0))
    c.feed(Revised(asked))
    proposed = c.averaged(c.hear("a", c.contribution(c.held)))
    (offer,) = [m for m in c.said(proposed) if isinstance(m, Commit)]
    assert offer.revision == asked
    assert c.replica.revision == FOUNDED
    answers = c.said(c.hear("b", Held(0, offer.version)))
    assert [m.revision for m in answers if isinstance(m, Commit)] == [asked]
    assert c.replica.revision == asked


# -- the end, the number of peers, and H


def rounds(a: Any, count: int) -> list[Any]:
    """Play rounds of a peer that is alone; returns the effects of the last."""
    effects: list[Any] = []
    for _ in range(count):
        effects = round_alone(a)
    return effects


def test_a_stop_ends_the_run_at_its_epoch(peer: Any) -> None:
    """Not at the one with which the run was founded; later revisions don't change what is over."""
    a = solo(peer, stop_after_epochs=9)
    begun = a.held.epoch
    a.feed(Revised(Revision(1, stop_after_epochs=begun + 2)))
    assert Finished() not in rounds(a, 1)
    assert Finished() in rounds(a, 1)
    a.feed(Revised(Revision(2, stop_after_epochs=0)))
    assert a.replica.logs[0].final
    assert a.replica.ended_by.number == 1


def test_a_stop_that_lies_behind_ends_the_run_at_the_next_commit(peer: Any) -> None:
    """Not before it: a state is final only by the revision that made it, so all replicas agree."""
    a = solo(peer)
    rounds(a, 3)
    ended = a.held.epoch + 1
    a.feed(Revised(Revision(1, stop_after_epochs=2)))
    assert not a.replica.logs[0].final
    assert Finished() in rounds(a, 1)
    assert a.held.epoch == ended


def test_fewer_peers_are_enough_for_the_round_that_has_begun(peer: Any) -> None:
    """A run in which too few peers are left goes on when its founder asks for fewer; the commit names that revision."""
    a = peer("a", group="ab", min_peers=3)
    a.contribute()
    assert not a.hear("b", a.contribution(a.held))
    a.feed(Revised(Revision(1, min_peers=2)))
    (average,) = [effect for effect in a.pass_time(2.0) if isinstance(effect, Average)]
    assert average.revision == Revision(1, min_peers=2)


def test_h_changes_with_the_state_and_the_steps_are_counted_by_each_rounds_own(peer: Any) -> None:
    """Two rounds of 10 steps, the second of which brings in H = 4; then each has 4. The digest covers the count."""
    a = solo(peer, sync_every=10)
    begun = a.replica.steps
    assert begun == 10 * a.held.epoch
    rounds(a, 1)
    a.feed(Revised(Revision(1, sync_every=4)))
    assert a.replica.interval == 10
    rounds(a, 1)
    assert (a.replica.interval, a.replica.steps) == (4, begun + 20)
    rounds(a, 2)
    assert a.replica.steps == begun + 28
    state = a.replica.state(0)
    assert meta_of(state) != meta_of(replace(state, paced=(0, 0)))


def test_a_longer_h_allows_heavier_contributions(peer: Any) -> None:
    """The limits of a contribution follow H, so none of a longer round is refused; a shorter H changes no limit."""
    rules = replace(peer("a").replica.rules, sync_every=10, weight_max=100.0, samples_max=100)
    longer, shorter = Revision(1, sync_every=30), Revision(1, sync_every=1)
    assert [rules.fits(300.0, 300, revision) for revision in (FOUNDED, longer, shorter)] == [False, True, False]
    assert rules.fits(100.0, 100, shorter)
