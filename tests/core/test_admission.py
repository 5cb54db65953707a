"""Which commits and contributions may count: by author, term and numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.admission import (
    AHEAD_MAX,
    COUNTED_MAX,
    NEWCOMERS_MAX,
    PLANNED_MAX,
    bounded,
    countable,
    latest_incarnation,
    misused,
    objection,
    unfit,
)
from p2p_diloco.core.events import Apply, Complaint
from p2p_diloco.core.leadership import TERMS_AHEAD_MAX, Leadership
from p2p_diloco.core.leases import DataSet, Lease, Table, Use
from p2p_diloco.core.lives import SALT_BITS
from p2p_diloco.core.messages import Contribution, Counted, Plan
from p2p_diloco.core.version import ContributionId
from tests.core.conftest import PLAIN, Peer, commit_on, roster_of

RULES = replace(PLAIN, weight_max=8.0, samples_max=100)
STATE = Peer.state(0, 1, counted=(("a", ContributionId(50, 3)),))
"""Its plan names a, b and c."""


def lead() -> Leadership:
    return Leadership(roster_of("c", "abdz"), STATE)


def counting(weight: float = 1.0, samples: int = 5, incarnation: int = 1) -> Any:
    """A commit of a that counts one contribution of b."""
    listed = (Counted("b", ContributionId(incarnation, 1), weight, samples),)
    return replace(commit_on(STATE, "b"), contributions=listed)


@pytest.mark.parametrize(
    ("author", "term", "fits"),
    [
        *[("a", 0, True), ("b", 1, True), ("c", 2, True), ("a", 3, True)],
        *[("b", 0, False), ("a", 1, False), ("b", 2, False), ("z", 0, False), ("z", 9, False)],
    ],
)
def test_a_commit_counts_only_of_the_candidate_whose_turn_its_term_is(author: str, term: int, fits: bool) -> None:
    """z is live, but the plan does not name it."""
    commit = replace(commit_on(STATE), aggregator=author, term=term)
    told = objection(commit, STATE, lead(), RULES)
    assert told == ("" if fits else f"{author} may not write it under term {term}")


def test_a_term_far_beyond_the_known_one_is_refused() -> None:
    """After such a commit no higher term might fit into a message."""
    most = 4 * TERMS_AHEAD_MAX  # three candidates, and all others together
    for term, fits in ((most - most % 3, True), (most - most % 3 + 3, False)):
        assert (objection(replace(commit_on(STATE), term=term), STATE, lead(), RULES) == "") is fits


@pytest.mark.parametrize(
    ("numbers", "fits"),
    [
        ({"weight": 8.0}, True),
        ({"weight": 8.5}, False),
        ({"weight": 0.0}, False),
        ({"weight": -1.0}, False),
        ({"samples": 100}, True),
        ({"samples": 101}, False),
        ({"samples": -1}, False),
        ({"incarnation": 50 + AHEAD_MAX}, True),
        ({"incarnation": 51 + AHEAD_MAX}, False),
    ],
)
def test_a_commit_and_a_contribution_count_only_with_numbers_in_range(numbers: dict[str, Any], fits: bool) -> None:
    """The incarnation may be a year ahead of the highest that is known."""
    told = objection(counting(**numbers), STATE, lead(), RULES)
    assert told == ("" if fits else "the weight, the samples or the incarnation of b is out of range")
    id = ContributionId(numbers.pop("incarnation", 1), 1)
    plain = Contribution(0, STATE.version, id, id, weight=1.0, samples=5)
    why = unfit("b", replace(plain, **numbers), STATE, lead(), RULES)
    assert why == ("" if fits else "it has a number out of range")


def test_a_newcomer_is_counted_though_all_others_started_months_ago() -> None:
    """An incarnation is the time of a start, in milliseconds."""
    months = 90 * 86_400_000 << SALT_BITS
    assert objection(counting(incarnation=50 + months), STATE, lead(), RULES) == ""
    id = ContributionId(50 + months, 1)
    assert unfit("b", Contribution(0, STATE.version, id, id, weight=1.0, samples=5), STATE, lead(), RULES) == ""


def test_a_commit_counts_no_contribution_twice() -> None:
    """Seals can't show it: they prove who made a contribution, and not that it is new."""
    again = "it counts a contribution of a that was counted before"
    for id, why in ((ContributionId(50, 2), again), (ContributionId(50, 3), again), (ContributionId(50, 4), "")):
        commit = replace(counting(), contributions=(Counted("a", id, 1.0, 5),))
        assert objection(commit, STATE, lead(), RULES) == why
    (counted,) = counting().contributions
    later = replace(counted, id=ContributionId(1, 2))
    commit = replace(counting(), contributions=(counted, later))
    assert objection(commit, STATE, lead(), RULES) == "it counts two contributions of one peer"


@pytest.mark.parametrize(("weight", "mode", "fits"), [(1.0, "async", True), (0.5, "async", False), (0.5, "sync", True)])
def test_a_submission_has_the_weight_1(weight: float, mode: str, fits: bool) -> None:
    """A commit that counted a submission of another weight as 1 would not fit to the seal, and prove a lie of its
    aggregator that was the contributor's."""
    rules = replace(RULES, mode=mode)
    why = objection(counting(weight=weight), STATE, lead(), rules)
    assert why == ("" if fits else "it counts a submission of b with another weight than 1")
    id = ContributionId(1, 1)
    why = unfit("b", Contribution(0, STATE.version, id, id, weight, 5), STATE, lead(), rules)
    assert why == ("" if fits else "the weight of a submission must be 1")


def test_a_contribution_carries_nothing_younger_than_itself() -> None:
    id = ContributionId(2, 2)
    contribution = Contribution(0, STATE.version, id, id, weight=1.0, samples=5)
    for oldest, fits in ((ContributionId(1, 9), True), (id, True), (ContributionId(2, 3), False)):
        assert (unfit("b", replace(contribution, oldest=oldest), STATE, lead(), RULES) == "") is fits


def test_a_replica_refuses_what_is_out_of_range_and_says_so(peer: Any) -> None:
    """A contribution and a commit, in both modes."""
    for mode in ("sync", "async"):
        b = peer("b", group="abc", succession="bac", weight_max=1.5, mode=mode)
        told = b.hear("a", replace(b.contribution(b.held), weight=2.0))
        assert [e.peer for e in told if isinstance(e, Complaint)] == ["a"]
        assert b.replica.logs[0].round.inbox == {}
        c = peer("c", mode=mode)
        told = c.hear("b", c.commit(by="b"))
        assert [e.peer for e in told if isinstance(e, Complaint)] == ["b"]
        assert any(isinstance(e, Apply) for e in c.hear("a", c.commit()))


def test_a_contribution_may_be_of_an_incarnation_a_year_ahead_of_all_that_are_known() -> None:
    """All others may have started months ago. After one far ahead was counted, no later one might fit into a
    message."""
    year = 366 * 86_400_000 << SALT_BITS
    counted = {"a": ContributionId(500, 1), "b": ContributionId(90, 7)}
    assert latest_incarnation(counted, 100) == 500 + year
    assert latest_incarnation(counted, 600) == 600 + year
    assert latest_incarnation({}, 100) == 100 + year


# -- peers that may be invented


def names(count: int, first: str = "n") -> tuple[str, ...]:
    return tuple(f"{first}{number:05d}" for number in range(count))


def listing(peers: tuple[str, ...], state: Any, plan: Plan | None = None) -> Any:
    """A commit on the state that counts these peers."""
    commit = commit_on(state)
    listed = tuple(Counted(peer, ContributionId(60, 1), 1.0, 1) for peer in peers)
    return replace(commit, contributions=listed, plan=plan or commit.plan)


FULL = replace(STATE, counted={peer: ContributionId(1, 1) for peer in names(COUNTED_MAX, "old")})
NEARLY_FULL = replace(STATE, counted={peer: ContributionId(1, 1) for peer in names(COUNTED_MAX - 2, "old")})
FOUNDED = replace(STATE, counted={})


@pytest.mark.parametrize(
    ("state", "most"), [(STATE, NEWCOMERS_MAX), (NEARLY_FULL, 2), (FULL, 0), (FOUNDED, COUNTED_MAX)]
)
def test_a_commit_counts_few_peers_that_no_commit_has_counted(state: Any, most: int) -> None:
    """An aggregator may invent them, and each takes room in the state for ever. A run's first commit may count all."""
    assert objection(listing(names(most), state), state, lead(), RULES) == ""
    too_many = objection(listing(names(most + 1), state), state, lead(), RULES)
    assert too_many == "it counts too many peers that no commit has counted before"


def test_an_aggregator_counts_no_more_newcomers_than_others_accept() -> None:
    """The others' turn comes with the next commit; peers that were counted before are always counted."""
    id = ContributionId(60, 1)
    contribution = Contribution(0, STATE.version, id, id, weight=1.0, samples=5)
    inbox = dict.fromkeys((*names(NEWCOMERS_MAX + 3), "a"), contribution)
    chosen = countable(inbox, STATE)
    assert [peer for peer, _ in chosen] == ["a", *names(NEWCOMERS_MAX)]
    assert objection(listing(tuple(peer for peer, _ in chosen), STATE), STATE, lead(), RULES) == ""
    assert len(countable(inbox, FOUNDED)) == len(inbox)


def test_a_run_that_has_counted_as_many_peers_as_it_may_counts_those_on() -> None:
    """Further ones are refused with the reason."""
    id = ContributionId(60, 1)
    contribution = Contribution(0, STATE.version, id, id, weight=1.0, samples=5)
    assert unfit("old00000", contribution, FULL, lead(), RULES) == ""
    assert "counts no further one" in unfit("new", contribution, FULL, lead(), RULES)


def test_a_plan_names_few_peers_that_no_commit_has_counted() -> None:
    """A round may wait for each of them until it is found dead. Peers of the plan before, contributors and the author
    are no strangers; a run's first commit may name all."""
    few, many = names(PLANNED_MAX), names(PLANNED_MAX + 1)
    for plan, fits in (
        (Plan(("a", "b", *few), ("a",)), True),
        (Plan(("a", *few[:8]), ("a", *few)), True),
        (Plan(("a", *many), ("a",)), False),
        (Plan(("a", "b"), ("a", *many)), False),
    ):
        told = objection(listing(("b",), STATE, plan), STATE, lead(), RULES)
        assert told == ("" if fits else "its plan names too many peers that no commit has counted before")
        assert objection(listing(("b",), FOUNDED, plan), FOUNDED, lead(), RULES) == ""
        kept = bounded(plan, {"b"}, "a", STATE)
        assert (kept == plan) is fits
        assert objection(listing(("b",), STATE, kept), STATE, lead(), RULES) == ""
    assert bounded(Plan(("a", *many), ("a",)), set(many), "a", STATE) == Plan(("a", *many), ("a",))


DATA = DataSet("train", 100)
HOLDING = replace(STATE, tables=(Table(DATA, 20, (Lease("b", 1, 0, 10, 1), Lease("a", 2, 10, 20, 1))),))


@pytest.mark.parametrize(("span", "fits"), [((0, 10), True), ((5, 12), False), ((10, 20), False), ((20, 21), False)])
def test_only_data_that_is_leased_to_its_author_counts(span: tuple[int, int], fits: bool) -> None:
    """A commit that counts a contribution from other peers' data is refused, and so is the contribution."""
    uses = (Use(DATA, (span,), 5),)
    listed = (Counted("b", ContributionId(1, 1), 1.0, 5, uses),)
    commit = replace(commit_on(HOLDING, "b"), contributions=listed)
    assert (objection(commit, HOLDING, lead(), RULES) == "") is fits
    mine = Contribution(0, HOLDING.version, ContributionId(1, 1), ContributionId(1, 1), 1.0, 5, uses=uses)
    assert (unfit("b", mine, HOLDING, lead(), RULES) == "") is fits
    other = replace(HOLDING, shard=1)
    assert unfit("b", mine, other, lead(), RULES)


def test_in_asynchronous_mode_the_author_hears_why() -> None:
    """There the aggregator refuses such a submission with the newer state, not with a complaint."""
    rules = replace(RULES, mode="async")
    uses = (Use(DATA, ((10, 20),), 5),)
    mine = Contribution(0, HOLDING.version, ContributionId(1, 1), ContributionId(1, 1), 1.0, 5, uses=uses)
    assert not unfit("b", mine, HOLDING, lead(), rules)
    assert misused("b", mine, HOLDING, rules)
