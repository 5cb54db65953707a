"""What a leader takes from a member, all others take from the leader."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.core import holding, leading, owning
from p2p_diloco.core.admission import objection, unsound
from p2p_diloco.core.events import Complaint
from p2p_diloco.core.leases import DataSet, Use
from p2p_diloco.core.messages import Close, Ready, Slice
from p2p_diloco.core.state import commit_of, key_of, rooted
from p2p_diloco.core.version import ContributionId, Version
from tests.core.parts import a_log, a_ready
from tests.core.world import rules

HELD = a_log("A", "A", "B").held.version
USES = st.sampled_from([(), (), (Use(DataSet("d", 100, 1), (), 5),), (Use(DataSet("d", 100, 1), ((0, 3),), 0),)])
IDS = st.builds(ContributionId, st.sampled_from([1, 2, 1 << 20, 1 << 62]), st.sampled_from([1, 3, 4, 99, 1 << 40]))


@st.composite
def readys(draw: st.DrawFn) -> Ready:
    """Draw a contribution whose parts may not fit together; most are nearly right."""
    id = draw(IDS)
    return Ready(
        fragment=0,
        base=draw(st.sampled_from([HELD, HELD, HELD, Version(0, 0, 0, "theta0")])),
        id=id,
        oldest=draw(st.one_of(st.just(id), IDS)),
        weight=draw(st.sampled_from([0.0, 0.0, 1.0, 2.0**-40, 0.5, 7.0, 1e9])),
        samples=draw(st.sampled_from([0, 0, 10, 1 << 40, 1 << 50])),
        hashes=draw(st.sampled_from([(), ("a", "b", "c"), ("a", "b"), ("a", "b", "c", "d")])),
        link=draw(st.sampled_from([0.0, 1e9])),
        reachable=draw(st.booleans()),
        grant=draw(st.sampled_from(["", "g"])),
        uses=draw(USES),
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("alone", [False, True])
@settings(max_examples=100, deadline=None)
@given(ready=readys(), known=st.booleans())
def test_a_commit_of_what_its_leader_has_taken_is_taken_by_all(
    mode: str, alone: bool, ready: Ready, known: bool
) -> None:
    """However odd a contribution is: either the leader refuses it, or the commit that counts it is sound. Else one
    member could make the leader's commits useless, or keep it from making any. In asynchronous mode it may be alone."""
    author = "B" if known else "X"
    log = a_log("A", "A", "B", of=rules(mode=mode, weight_max=16.0, samples_max=1 << 40))
    ready = rooted(ready)
    take = leading.collect if mode == "sync" else holding.submitted
    if mode == "async" or ready.base == log.version:  # else `Rounds` keeps it from the leader
        take(log, author, ready, 1.0)
    if author not in log.round.readys:
        return
    if not (alone and mode == "async"):
        log.round.readys["A"] = a_ready(log.held)
    choice = leading.choose(log)
    assert not unsound(choice, log.held, log.rules)
    key, owners = key_of(0, log.held.version, choice), ("A",) * log.slices
    close = Close(0, log.held.version, 0, "A", 1, key, choice, owners)
    owner = a_log("B", "A", "B", of=log.rules)
    owner.round.leader = "A"
    assert not [one for one in owning.closed(owner, "A", close, 2.0) if isinstance(one, Complaint)]
    commit = commit_of(log.held, close, ("x", "y", "z"), owners, log.rules)
    assert not objection(commit, log.held, log.rules, None, "B")


def test_many_newcomers_of_one_invitation_come_in_several_windows() -> None:
    """Twelve machines with one invitation enter an asynchronous run at once. All others would refuse a commit that
    counts so many, and the leader would make it again and again."""
    log = a_log("A", "A", "B", of=rules(mode="async", async_grace=1.0))
    ready = a_ready(log.held, grant="shared")
    for name in (f"N{number:02}" for number in range(12)):
        holding.submitted(log, name, ready, 1.0)
        for number in range(log.slices):
            holding.submitted(log, name, Slice(0, log.held.version, name, ready.id, number, ready.hashes[number]), 1.0)
    log.round.leader = "A"
    holding.advance(log, 5.0)
    assert log.round.close is not None
    assert log.round.close.choice is not None
    assert len(log.round.close.choice.entries) == 8
    assert not unsound(log.round.close.choice, log.held, log.rules)
