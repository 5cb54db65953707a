"""A shard's state as a value: what follows a commit, how versions relate, and what a digest covers."""

from __future__ import annotations

from typing import Any

from p2p_diloco.core.events import Restore
from p2p_diloco.core.messages import Plan, State
from p2p_diloco.core.state import founding_meta, meta_of
from p2p_diloco.core.version import ContributionId, Version
from tests.core.conftest import meta

# -- what a digest covers


def test_equal_states_have_equal_meta() -> None:
    """The bytes are the same on every peer: they are spelt out, and the table is sorted."""
    table = {"b": ContributionId(9, 2), "a": ContributionId(7, 1)}
    plan = Plan(("a", "b"), ("b", "a"))
    expected = b'[1,50,3,4,["a","b"],["b","a"],[["a",7,1],["b",9,2]]]'
    assert meta(Version(1, 50, 3, "x"), 4, plan, table) == expected
    assert meta(Version(1, 50, 3, "another"), 4, plan, dict(sorted(table.items(), reverse=True))) == expected


def test_meta_of_a_state_covers_term_plan_and_table(peer: Any) -> None:
    state = peer.state(0, 3, plan=peer.plan("ab", "b"), counted=(("x", ContributionId(1, 2)),), term=4)
    assert meta_of(state) == b'[0,30,3,4,["a","b"],["b"],[["x",1,2]]]'


def test_a_founder_without_trainer_is_not_in_the_first_group() -> None:
    """The first round is for the workers that come."""
    assert founding_meta(0, "a", "worker") == b'[0,0,0,0,["a"],["a"],[]]'
    assert founding_meta(0, "a", "aggregator") == b'[0,0,0,0,[],["a"],[]]'


# -- what follows a commit


def test_a_state_holds_what_its_commits_said(peer: Any, life: int) -> None:
    """Version, term of its commit, plan, the table of the counted, the ancestors."""
    a = peer("a", group="a", live="b", counted=(("z", ContributionId(3, 3)),))
    a.hear("b", a.contribution(a.held))
    a.averaged(a.contribute(), "new")
    counted = {"a": ContributionId(life, 1), "b": ContributionId(1, 1), "z": ContributionId(3, 3)}
    plan = a.replica.logs[0].state.plan
    history = {0: "d0", 1: "d1", 2: "new"}
    assert a.replica.state(0) == State(0, Version(0, 20, 2, "new"), 0, plan, counted, history)


def test_a_state_remembers_a_bounded_number_of_ancestors(peer: Any) -> None:
    """The newest ``history`` of them, so that a state does not grow with the run."""
    a = peer("a", group="a", live="", history=3)
    for n in range(5):
        a.averaged(a.contribute(), f"n{n}")
        assert len(a.replica.logs[0].state.history) <= 3
    assert a.replica.state(0).history == {4: "n2", 5: "n3", 6: "n4"}


def test_a_fetched_state_keeps_a_bounded_number_of_ancestors(peer: Any) -> None:
    """Its donor may remember more."""
    a = peer("a", epoch=9, group="a", live="", history=3)
    assert a.replica.state(0).history == {7: "d7", 8: "d8", 9: "d9"}


# -- how versions relate


def test_a_version_is_equal_ancestor_fork_or_ahead(peer: Any) -> None:
    """Generation, epoch and the remembered digests tell."""
    log = peer("a", epoch=5).replica.logs[0]
    version = peer.version
    assert log.relation(version(5)) == "equal"
    assert log.relation(version(3)) == "ancestor"
    assert log.relation(version(3, "other")) == "fork"
    assert log.relation(version(5, "other")) == "fork"
    assert log.relation(version(6, "other")) == "ahead"
    assert log.relation(version(6, samples=50)) == "ahead"  # an empty step
    assert log.relation(version(6, samples=49)) == "fork"
    assert log.relation(version(3, generation=1)) == "fork"
    assert log.relation(version(7, generation=1)) == "fork"
    assert peer("a", epoch=None).replica.logs[0].relation(version(0)) == "ahead"


def test_a_version_older_than_the_memory_is_an_ancestor_unless_its_samples_tell_otherwise(peer: Any) -> None:
    """A version that is missing among the remembered ancestors is a fork."""
    a = peer("a", epoch=None, group="")
    a.feed(Restore((a.state(0, 9, history=((5, "d5"), (7, "d7"), (9, "d9"))),)))
    log = a.replica.logs[0]
    assert log.relation(a.version(4, "any")) == "ancestor"
    assert log.relation(a.version(4, samples=91)) == "fork"
    assert log.relation(a.version(6, "any")) == "fork"
    assert log.relation(a.version(5, "any")) == "fork"
