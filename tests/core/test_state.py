"""A shard's state as a value: appending a commit, how versions relate, and what a digest covers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.messages import Plan, State
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.state import append, fetched, final, founding_meta, grown_from, meta_of, relation
from p2p_diloco.core.version import ContributionId, Version
from tests.core.conftest import PLAIN, Peer, commit_on, meta

# -- what a digest covers


def test_equal_states_have_equal_meta() -> None:
    """The bytes are the same on every peer: every field is written, and the table is sorted."""
    table = {"b": ContributionId(9, 2), "a": ContributionId(7, 1)}
    plan = Plan(("a", "b"), ("b", "a"))
    expected = b'[1,50,3,4,["a","b"],["b","a"],[["a",7,1],["b",9,2]]]'
    assert meta(Version(1, 50, 3, "x"), 4, plan, table) == expected
    assert meta(Version(1, 50, 3, "another"), 4, plan, dict(sorted(table.items(), reverse=True))) == expected


def test_meta_tells_how_full_the_buffer_is() -> None:
    """Of an empty one, or none, it says nothing."""
    state = Peer.state(0, 1)
    assert [meta_of(replace(state, buffered=count)).removeprefix(meta_of(state)[:-1]) for count in range(3)] == [
        b"]",
        b",1]",
        b",2]",
    ]


def test_a_founder_without_trainer_is_not_in_the_first_group() -> None:
    """The first group is left to the workers that join."""
    assert founding_meta(0, "a", "worker") == b'[0,0,0,0,["a"],["a"],[]]'
    assert founding_meta(0, "a", "aggregator") == b'[0,0,0,0,[],["a"],[]]'


def test_meta_covers_all_of_a_state_but_digest_history_and_tensors() -> None:
    """The ancestors differ from peer to peer, and the tensors are hashed separately."""
    state = Peer.state(0, 3, counted=(("x", ContributionId(1, 2)),))
    version = state.version
    others = [
        replace(state, version=replace(version, generation=1)),
        replace(state, version=replace(version, samples=31)),
        replace(state, version=replace(version, epoch=4)),
        replace(state, term=1),
        replace(state, plan=Peer.plan("ab", "abc")),
        replace(state, plan=Peer.plan("abc", "ab")),
        replace(state, counted={"x": ContributionId(1, 3)}),
        replace(state, buffered=1),
        replace(state, revision=Revision(1, 0.5, 0.9)),
    ]
    assert len({meta_of(other) for other in (state, *others)}) == 1 + len(others)
    alike = replace(state, version=replace(version, digest="other"), history={}, payload="tensors")
    assert meta_of(alike) == meta_of(state)


# -- what follows a commit


def test_a_state_holds_what_its_commits_said(peer: Any, life: int) -> None:
    """Version, term of its commit, plan, counted table and ancestors."""
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


def test_a_commit_names_version_term_plan_and_revision_of_the_state_that_follows() -> None:
    """The state before it is unchanged."""
    state, plan, revision = Peer.state(0, 1), Plan(("b",), ("c",)), Revision(1, 0.5, 0.9)
    commit = replace(commit_on(state, "ab"), term=3, plan=plan, revision=revision)
    after = append(state, commit, PLAIN)
    assert (after.version, after.term, after.plan, after.revision) == (commit.version, 3, plan, revision)
    assert (after.shard, after.payload) == (0, None)
    assert state == Peer.state(0, 1)


def test_a_commit_adds_to_the_counted() -> None:
    """Its contributions replace earlier ones of the same peers; other peers keep theirs."""
    state = Peer.state(0, 1, counted=(("a", ContributionId(1, 1)), ("z", ContributionId(3, 3))))
    counted = append(state, commit_on(state, "ab", sequence=2), PLAIN).counted
    assert counted == {"a": ContributionId(1, 2), "b": ContributionId(1, 2), "z": ContributionId(3, 3)}


def test_the_oldest_ancestor_is_forgotten() -> None:
    state = fetched(Peer.state(0, 5), replace(PLAIN, history=2))
    assert state.history == {4: "d4", 5: "d5"}
    assert append(state, commit_on(state), replace(PLAIN, history=2)).history == {5: "d5", 6: "d6"}
    assert append(state, commit_on(state), replace(PLAIN, history=3)).history == {4: "d4", 5: "d5", 6: "d6"}


@pytest.mark.parametrize(
    ("size", "buffered"), [(0, [0, 0, 0, 0]), (1, [0, 0, 0, 0]), (2, [0, 1, 0, 0]), (3, [2, 0, 1, 1])]
)
def test_the_buffer_counts_submissions_up_to_its_size(size: int, buffered: list[int]) -> None:
    """Then the count is 0 again. A commit without submissions does not change it. Without a buffer it stays 0."""
    state, found = Peer.state(0, 1), list[int]()
    for counted in ("ab", "c", "a", ""):
        state = append(state, commit_on(state, counted), replace(PLAIN, dn_buffer_size=size))
        found.append(state.buffered)
    assert found == buffered


def test_a_fetched_state_leaves_its_tensors_behind() -> None:
    """They are in place by then; the record of a state does not contain them."""
    assert fetched(replace(Peer.state(0, 2), payload="tensors"), PLAIN) == Peer.state(0, 2)
    assert fetched(replace(Peer.state(0, 2), payload="tensors"), PLAIN).payload is None


# -- how versions relate


def test_a_version_is_equal_ancestor_fork_or_ahead(peer: Any) -> None:
    """Generation, epoch and the remembered digests tell."""
    state, version = peer.state(0, 5), peer.version
    assert relation(state, version(5)) == "equal"
    assert relation(state, version(3)) == "ancestor"
    assert relation(state, version(3, "other")) == "fork"
    assert relation(state, version(5, "other")) == "fork"
    assert relation(state, version(6, "other")) == "ahead"
    assert relation(state, version(6, samples=50)) == "ahead"  # an empty step
    assert relation(state, version(6, samples=49)) == "fork"
    assert relation(state, version(3, generation=1)) == "fork"
    assert relation(state, version(7, generation=1)) == "fork"
    assert relation(None, version(0)) == "ahead"


def test_a_version_older_than_the_memory_is_an_ancestor_unless_its_samples_tell_otherwise(peer: Any) -> None:
    """A version that is missing among the remembered ancestors is a fork."""
    state, version = peer.state(0, 9, history=((5, "d5"), (7, "d7"), (9, "d9"))), peer.version
    assert relation(state, version(4, "any")) == "ancestor"
    assert relation(state, version(4, samples=91)) == "fork"
    assert relation(state, version(6, "any")) == "fork"
    assert relation(state, version(5, "any")) == "fork"


def test_a_state_has_grown_from_its_ancestors_and_itself() -> None:
    state = Peer.state(0, 3)
    assert all(grown_from(state, Peer.version(epoch)) for epoch in (1, 2, 3))
    assert not any(grown_from(state, base) for base in (Peer.version(4), Peer.version(2, "other")))
    assert not grown_from(None, Peer.version(0))


@pytest.mark.parametrize(
    ("rules", "ends"),
    [
        ({}, False),
        ({"stop_after_epochs": 4}, False),
        ({"stop_after_epochs": 3}, True),
        ({"stop_after_samples": 31}, False),
        ({"stop_after_samples": 30}, True),
        ({"stop_after_epochs": 9, "stop_after_samples": 9}, True),
    ],
)
def test_a_version_is_final_when_epochs_or_samples_are_reached(rules: dict[str, int], ends: bool) -> None:
    assert final(Peer.state(0, 3), replace(PLAIN, **rules)) is ends
    assert not final(None, replace(PLAIN, **rules))
