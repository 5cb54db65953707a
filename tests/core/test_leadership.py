"""Which peer may write the next commit: claims, promises and refusals after an aggregator's death."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.events import (
    Accept,
    Applied,
    Apply,
    Average,
    Changed,
    Complaint,
    Delivered,
    Note,
    Reachable,
    Release,
    Send,
)
from p2p_diloco.core.leadership import TERMS_AHEAD_MAX, Leadership
from p2p_diloco.core.messages import Commit, Counted, Fetch, Outdated, Plan, Promise, TakeOver, Want
from p2p_diloco.core.version import ContributionId, model_version
from tests.core.conftest import Peer, dies, meta, roster_of

# -- the candidates


def test_dead_candidates_are_passed_over_in_order(peer: Any) -> None:
    """With the first two dead, the third claims a higher term than the second would have."""
    c = peer("c", group="abcd")
    c.contribute()
    first = c.lose("a")
    assert [m for m in c.said(first) if isinstance(m, TakeOver)] == []
    assert Send("b", c.replica.logs[0].own.mine) in first  # sent to the peer that should take over
    effects = c.lose("b")
    assert Send("d", TakeOver(0, c.held, 2)) in effects


def test_a_successor_without_state_is_passed_over(peer: Any) -> None:
    """It restarted without a state and can't continue the log."""
    c = peer("c", group="abc")
    c.contribute()
    c.meet("b", incarnation=2, **c.blank())
    assert "takeover" in [e.kind for e in c.lose("a") if isinstance(e, Note)]


def test_an_aggregator_that_lost_its_state_is_replaced(peer: Any) -> None:
    """It is alive but can't continue the log: its successor takes over without a timeout."""
    b = peer("b")
    b.contribute()
    effects = b.meet("a", incarnation=2, **b.blank())
    assert Send("c", TakeOver(0, b.held, 1)) in effects


def test_the_rest_of_the_group_follows_the_succession(peer: Any) -> None:
    """If all successors are gone, the other members of the group take over in the plan's order."""
    c = peer("c", group="abc", succession="a")
    c.contribute()
    c.lose("a")
    effects = c.lose("b")
    assert "takeover" in [e.kind for e in effects if isinstance(e, Note)]
    assert c.replica.logs[0].lead.candidates() == ["a", "b", "c"]
    assert c.replica.logs[0].lead.term == 2


def test_with_all_candidates_gone_the_lowest_of_the_other_holders_continues(peer: Any) -> None:
    """The run goes on without the peers that a commit named."""
    e = peer("e", group="ab", succession="a", live="abdf")
    e.meet("c", eligible=False)  # a private peer comes after all reachable ones
    e.lose("a")
    effects = e.lose("b")
    assert e.replica.logs[0].lead.target() == (3, "d")
    assert not [n for n in effects if isinstance(n, Note) and n.kind == "takeover"]
    effects = e.lose("d")
    assert "takeover" in [n.kind for n in effects if isinstance(n, Note)]
    assert e.replica.logs[0].lead.term == 3


def test_a_reachable_candidate_takes_over_before_a_private_one(peer: Any) -> None:
    """Though the private one comes first in the plan. The term is that of the claimant's place."""
    c = peer("c", group="abc", succession="a")
    c.meet("b", eligible=False)
    c.contribute()
    assert "takeover" in [e.kind for e in c.lose("a") if isinstance(e, Note)]
    assert c.replica.logs[0].lead.term == 2


def test_a_private_candidate_takes_over_when_no_reachable_one_lives(peer: Any) -> None:
    """Else the round would stand still until a reachable peer comes."""
    c = peer("c", group="abc", succession="ab", eligible=False)
    c.contribute()
    c.lose("a")
    effects = c.lose("b")
    assert "takeover" in [e.kind for e in effects if isinstance(e, Note)]
    assert c.averages(effects) == [["c"]]


def test_a_private_peer_outside_the_plan_takes_over_when_it_is_the_last(peer: Any) -> None:
    e = peer("e", group="a", live="a", eligible=False)
    e.lose("a")
    assert (e.replica.logs[0].lead.term, e.replica.logs[0].lead.holder) == (2, "e")


def test_an_aggregator_that_turns_private_finishes_its_round(peer: Any) -> None:
    """It lives and can be reached through relays, so no other peer claims the round."""
    b = peer("b", group="abc", succession="abc")
    b.meet("a", eligible=False)
    assert [e.to for e in b.contribute() if isinstance(e, Send)] == ["a"]
    assert b.replica.logs[0].lead.target() == (0, "a")
    a = peer("a", group="ab", live="b")
    a.feed(Reachable(False))
    a.contribute()
    assert a.averages(a.hear("b", a.contribution(a.held))) == [["a", "b"]]


def test_a_named_aggregator_that_was_not_met_is_not_replaced_before_it_falls_silent(peer: Any) -> None:
    """Until it is found dead it gets the contribution."""
    c = peer("c", group="abc", succession="bca", live="a")
    (sent,) = [e for e in c.contribute() if isinstance(e, Send)]
    assert sent.to == "b"
    assert not [e for e in c.pass_time(9.0) if isinstance(e, Note)]
    assert "takeover" in [e.kind for e in c.pass_time(3.0) if isinstance(e, Note)]


# -- a claim


def test_the_successor_of_a_dead_aggregator_claims_the_next_term(peer: Any) -> None:
    """It asks every live peer that holds a state."""
    b = peer("b", live="acd")
    b.meet("e", **b.blank())
    b.contribute()
    effects = b.lose("a")
    request = TakeOver(0, b.held, 1)
    assert [e.kind for e in effects if isinstance(e, Note)] == ["died", "takeover"]
    assert effects[-2:] == [Send("c", request), Send("d", request)]


def test_a_claimant_writes_nothing_before_all_have_promised(peer: Any) -> None:
    """Another peer may hold the old aggregator's commit."""
    b = peer("b", live="acd")
    b.meet("d", idle=True)
    b.contribute()
    b.lose("a")
    b.hear("c", b.contribution(b.held))
    assert b.hear("c", Promise(0, b.held, 1)) == []
    effects = b.hear("d", Promise(0, b.held, 1))
    assert [name for name, _ in effects[-1].contributions] == ["b", "c"]
    effects = b.averaged(effects)
    (commit,) = {m for m in b.said(effects) if isinstance(m, Commit)}
    assert (commit.term, commit.aggregator) == (1, "b")


def test_a_claim_is_repeated_until_its_commit_is_made(peer: Any) -> None:
    """At every tick, to all that hold a state: a peer that adopts the version later knows of no claim."""
    b = peer("b", live="acd")
    b.contribute()
    b.lose("a")
    request = TakeOver(0, b.held, 1)
    b.hear("c", Promise(0, b.held, 1))
    assert b.pass_time(1.0) == [Send("c", request), Send("d", request)]
    b.lose("d")
    assert [e for e in b.pass_time(1.0) if e.message == request] == [Send("c", request)]
    effects = b.hear("c", b.contribution(b.held))
    b.averaged(effects)
    assert b.pass_time(1.0) == []


def test_a_claim_needs_no_promise_of_a_dead_peer(peer: Any) -> None:
    b = peer("b", group="ab", live="ad", succession="ab")
    b.contribute()
    assert not b.averages(b.lose("a"))
    assert b.averages(b.lose("d")) == [["b"]]


@pytest.mark.parametrize("promise", [(1, 2), (1, 0), (0, 1), (2, 1)])
def test_a_promise_counts_for_its_base_and_term_only(peer: Any, promise: tuple[int, int]) -> None:
    epoch, term = promise
    b = peer("b", group="abc")
    b.contribute()
    b.lose("a")
    b.hear("c", b.contribution(b.held))
    assert b.hear("c", Promise(0, b.version(epoch), term)) == []
    assert isinstance(b.hear("c", Promise(0, b.held, 1))[-1], Average)


def test_a_promise_that_was_not_asked_for_is_ignored(peer: Any) -> None:
    """An aggregator named by the plan needs none."""
    a = peer("a")
    a.contribute()
    assert a.hear("b", Promise(0, a.held, 0)) == []
    assert a.replica.logs[0].lead.promised_by is None


def test_a_peer_that_restarted_has_to_promise_again(peer: Any) -> None:
    """Its promise was lost with its process."""
    b = peer("b", live="acd")
    b.meet("d", idle=True)
    b.contribute()
    b.lose("a")
    b.hear("c", b.contribution(b.held))
    b.hear("c", Promise(0, b.held, 1))
    b.meet("c", incarnation=2)
    assert b.hear("d", Promise(0, b.held, 1)) == []
    assert Send("c", TakeOver(0, b.held, 1)) in b.pass_time(1.0)
    assert isinstance(b.hear("c", Promise(0, b.held, 1))[-1], Average)


def test_a_takeover_restarts_the_clock_of_the_round(peer: Any) -> None:
    """The survivors have round_timeout from then on to send their contributions again."""
    b = peer("b", group="abcd", live="acd", round_timeout=5.5)
    b.contribute()
    b.pass_time(4.0)
    b.lose("a")
    b.hear("c", b.contribution(b.held))
    for name in "cd":
        b.hear(name, Promise(0, b.held, 1))
    assert b.averages(b.pass_time(5.4)) == []
    assert b.averages(b.pass_time(0.2)) == [["b", "c"]]


def test_a_round_closes_after_its_claimant_has_died(peer: Any) -> None:
    """The mean that was computed before the promise was dropped; now it is computed again."""
    a = peer("a")
    a.contribute()
    a.hear("b", a.contribution(a.held))
    effects = a.hear("c", a.contribution(a.held))
    a.hear("c", TakeOver(0, a.held, 2))
    assert a.averaged(effects) == []
    a.lose("c")
    assert a.averages(a.hear("b", Promise(0, a.held, a.replica.logs[0].lead.term))) == [["a", "b", "c"]]


def test_a_new_version_forgets_the_claims_on_the_last(peer: Any) -> None:
    """Terms belong to one epoch: the next one begins at 0 with the aggregator that the commit names."""
    b = peer("b")
    b.contribute()
    b.lose("a")
    commit = b.commit(plan=b.plan("bc", "cb"))
    b.take(commit, "c")
    log = b.replica.logs[0]
    assert (log.lead.term, log.lead.holder, log.lead.promised_by, log.round.inbox) == (0, "c", None, {})


# -- the answers to a claim


def test_a_promise_comes_with_the_contribution(peer: Any) -> None:
    """The successor receives both at once."""
    c = peer("c")
    (send,) = c.contribute()
    c.feed(Delivered("a", send.message))
    assert c.hear("b", TakeOver(0, c.held, 1)) == [Send("b", Promise(0, c.held, 1)), Send("b", send.message)]


def test_a_claim_on_an_older_base_is_answered_with_the_commit_that_followed(peer: Any) -> None:
    c = peer("c", group="abc")
    base = c.held
    commit = Commit(0, base, c.version(2), 0, "a", (), Plan(("b", "c"), ("b", "c")))
    c.hear("a", commit)
    c.feed(Applied(0, base, "d2"))
    assert c.hear("b", TakeOver(0, base, 1)) == [Send("b", commit)]


def test_a_commit_that_one_survivor_holds_is_adopted_not_redone(peer: Any, life: int) -> None:
    """The others did not receive it before the aggregator died; the survivor sends it in answer to the claim."""
    b = peer("b")
    base = b.held
    (send,) = b.contribute()
    b.feed(Delivered("a", send.message))
    b.lose("a")
    mine = Counted("b", ContributionId(life, 1), 2.0, 5)
    commit = Commit(0, base, b.version(2), 0, "a", (mine,), Plan(("b", "c"), ("b", "c")))
    (apply,) = b.hear("c", commit)
    assert apply == Apply(commit, meta(commit.version, 0, commit.plan, {"b": mine.id}))
    assert b.hear("c", Promise(0, base, 1)) == []
    effects = b.feed(Applied(0, base, "d2"))
    assert effects == [Accept(((0, "d2"),)), Changed(), Release(sent=True)]
    assert b.held == commit.version


def test_a_claimant_takes_the_old_aggregators_commit(peer: Any) -> None:
    """It was written before the aggregator died. Claims exist to find such a commit."""
    b = peer("b")
    b.contribute()
    b.lose("a")
    assert isinstance(b.hear("a", b.commit(plan=b.plan("ab")))[-1], Apply)


@pytest.mark.parametrize(
    ("term", "sender", "wins"),
    [(3, "a", True), (2, "c", True), (0, "a", False), (2, "a", False), (1, "c", False), (0, "c", False)],
)
def test_the_greater_of_two_claims_wins(peer: Any, term: int, sender: str, wins: bool) -> None:
    """By term, if the term is the claimant's turn: any other claim is refused and told of the known one."""
    b = peer("b", group="abc")
    b.contribute()
    b.lose("a")
    b.meet("a")
    effects = b.hear(sender, TakeOver(0, b.held, term))
    log = b.replica.logs[0]
    if wins:
        assert effects == [Send(sender, Promise(0, b.held, term)), Send(sender, log.own.mine)]
        assert (log.lead.term, log.lead.holder, log.lead.promised_by) == (term, sender, None)
    else:
        turns = {0: "a", 1: "b", 2: "c"}
        why = f"a claim to shard 0 is refused: {sender} may not hold term {term}"
        complaint = [] if turns[term] == sender else [Complaint(sender, why)]
        assert effects == [*complaint, Send(sender, Outdated(0, b.held, 1, "b"))]
        assert (log.lead.term, log.lead.holder) == (1, "b")


def test_a_refused_claim_is_given_up(peer: Any) -> None:
    """The claimant concedes, and sends its contribution to the peer with the greater claim."""
    b = peer("b")
    b.contribute()
    b.lose("a")
    mine = b.replica.logs[0].own.mine
    assert b.hear("c", Outdated(0, b.held, 2, "c")) == [Send("c", mine)]
    assert b.hear("c", Promise(0, b.held, 1)) == []
    assert b.replica.logs[0].lead.holder == "c"


@pytest.mark.parametrize("refusal", [(1, 1, "a"), (1, 1, "b"), (1, 0, "c"), (2, 9, "c"), (0, 9, "c")])
def test_a_refusal_that_names_no_greater_claim_is_ignored(peer: Any, refusal: tuple[int, int, str]) -> None:
    """It names this peer's own claim, a lesser one, or another base. A claim of a peer whose turn it is not causes a
    complaint."""
    epoch, term, holder = refusal
    b = peer("b")
    b.contribute()
    b.lose("a")
    why = f"a claim to shard 0 is refused: {holder} may not hold term {term}"
    complaint = [Complaint("c", why)] if (epoch, term, holder) in ((1, 1, "a"), (1, 0, "c")) else []
    assert b.hear("c", Outdated(0, b.version(epoch), term, holder)) == complaint
    log = b.replica.logs[0]
    assert (log.lead.term, log.lead.holder, log.lead.promised_by) == (1, "b", set())


def test_a_refusal_tells_the_greatest_claim(peer: Any) -> None:
    """Its term and holder are adopted, and named when lesser claims are refused."""
    b = peer("b", group="abc")
    b.hear("a", Outdated(0, b.held, 5, "c"))
    log = b.replica.logs[0]
    assert (log.lead.term, log.lead.holder) == (5, "c")
    assert b.said(b.hear("a", TakeOver(0, b.held, 3))) == [Outdated(0, b.held, 5, "c")]


# -- claims that their holder has forgotten


def test_a_forgotten_claim_is_denied_when_a_contribution_comes(peer: Any) -> None:
    """b claimed the term and got c's contribution; then it left the lineage and came back to it, where the plan names
    a. When a asks c for its contribution, c sends it to b again, and b answers each time that it does not aggregate."""
    c, b = peer("c"), peer("b")
    c.hear("b", TakeOver(0, c.held, 1))
    (send,) = c.contribute()
    assert send.to == "b"
    c.feed(Delivered("b", send.message))
    assert c.hear("a", Want(0, c.held)) == [send]
    denial = Outdated(0, b.held, 0, "a")
    assert b.hear("c", send.message) == b.hear("c", send.message) == [Send("c", denial)]
    c.now += c.replica.rules.settle
    assert c.hear("b", denial) == [Send("a", send.message)]


def test_a_contribution_goes_on_to_the_peer_that_the_claimant_names(peer: Any) -> None:
    """The claimant says that it has no claim. Directly after its claim this may be an older message, which must not
    undo the promise: a claimant repeats its claim every heartbeat, so one that has forgotten it is soon silent."""
    c = peer("c")
    c.hear("b", TakeOver(0, c.held, 1))
    (send,) = c.contribute()
    c.feed(Delivered("b", send.message))
    denial, lead = Outdated(0, c.held, 0, "a"), c.replica.logs[0].lead
    assert c.hear("b", denial) == []
    c.hear("b", TakeOver(0, c.held, 1))
    c.pass_time(2 * c.rules.settle)
    assert lead.holder == "b"
    c.hear("b", TakeOver(0, c.held, 1))
    assert c.hear("b", denial) == []
    assert lead.holder == "b"
    told = c.pass_time(2 * c.rules.settle)
    assert lead.holder == "a"
    told += c.hear("a", Want(0, c.held))
    assert Send("a", send.message) in told


# -- which commits are taken


def test_a_commit_of_a_lower_term_is_refused(peer: Any) -> None:
    """This peer has promised to a live claimant. It tells the old aggregator of the greater claim, and asks the
    claimant, which may have taken the commit meanwhile."""
    c = peer("c")
    c.hear("b", TakeOver(0, c.held, 1))
    refusal, question = Outdated(0, c.held, 1, "b"), Fetch(c.replica.versions, shards=(0,))
    assert c.hear("a", c.commit(plan=c.plan("ac"))) == [Send("a", refusal), Send("b", question)]
    assert c.replica.logs[0].round.working is None


def test_a_commit_of_a_lower_term_is_taken_when_the_claimant_is_gone(peer: Any) -> None:
    """Promises prevent a fork; without the claimant there is no other commit."""
    c = peer("c")
    c.hear("b", TakeOver(0, c.held, 1))
    c.lose("b")
    log = c.replica.logs[0]
    log.lead.holder, log.lead.term = "b", 1  # as before its death was noticed and c claimed the term
    assert isinstance(c.hear("a", c.commit(plan=c.plan("ac")))[-1], Apply)


def test_a_commit_of_a_lower_term_is_taken_when_the_claimant_has_moved_on(peer: Any) -> None:
    """It holds a later epoch, so it has adopted this commit."""
    c = peer("c")
    c.hear("b", TakeOver(0, c.held, 1))
    c.meet("b", epochs=(2,), model=model_version([c.version(2)]))
    commit = c.commit(plan=c.plan("ac"))
    assert isinstance(c.hear("a", commit)[-1], Apply)


def test_a_commit_that_another_peer_passes_on_is_taken(peer: Any) -> None:
    """The sender holds it, so it is in the log: terms only decide which peer may write a commit."""
    c = peer("c", group="abcd")
    c.hear("b", TakeOver(0, c.held, 1))
    assert isinstance(c.hear("d", c.commit(plan=c.plan("ac")))[-1], Apply)


def test_the_claimants_own_commit_is_taken(peer: Any) -> None:
    c = peer("c")
    c.hear("b", TakeOver(0, c.held, 1))
    commit = c.commit(by="b", term=1, plan=c.plan("bc"))
    assert c.hear("b", commit) == [Apply(commit, meta(commit.version, 1, commit.plan, {}))]


def test_the_greatest_claimant_may_write_under_a_lower_term(peer: Any) -> None:
    c = peer("c")
    c.hear("b", TakeOver(0, c.held, 2))
    assert isinstance(c.hear("b", c.commit(by="b", term=1, plan=c.plan("bc")))[-1], Apply)


# -- the target and the claims by themselves


def leadership(me: str, others: str = "abcde", group: str = "abc", succession: str = "ab") -> Leadership:
    """The leadership of a peer at epoch 1 that has met the others."""
    state = Peer.state(0, 1, plan=Peer.plan(group, succession))
    return Leadership(roster_of(me, others.replace(me, "")), state)


def test_the_target_is_the_first_living_candidate_under_its_term() -> None:
    """The succession, the rest of the group, then the lowest other holder; each step is another term. If no peer is
    left, the holder stays."""
    lead = leadership("e")
    targets = [lead.target()]
    for peer in "abc":
        dies(lead.roster, peer)
        targets.append(lead.target())
    assert targets == [(0, "a"), (1, "b"), (2, "c"), (4, "d")]
    dies(lead.roster, "d")
    assert lead.target() == (4, "e")
    lead.roster.says(epochs=())
    assert lead.target() == (0, "a")


def test_private_peers_are_targets_after_the_reachable_ones_of_their_list() -> None:
    """First the candidates, then the other peers; in each list the reachable ones come first. Each keeps its term."""
    lead = leadership("e", "abcdf")
    private = replace(lead.roster.mine, eligible=False)
    for peer in "bd":
        lead.roster.summarized(peer, private)
    lead.roster.mine, targets = private, list[tuple[int, str]]()
    for peer in "acbf":
        dies(lead.roster, peer)
        targets.append(lead.target())
    assert targets == [(2, "c"), (1, "b"), (4, "f"), (4, "d")]


def test_the_target_after_a_dead_claimant_follows_its_term() -> None:
    """Terms only rise, and the order is cyclic."""
    lead = leadership("e")
    lead.concede(2, "c")
    assert lead.target() == (2, "c")
    dies(lead.roster, "c")
    assert lead.target() == (3, "a")


def test_a_claim_waits_for_each_live_holder_until_it_is_conceded() -> None:
    lead = leadership("b", "abcd")
    assert lead.unpromised() == lead.ask() == []  # nothing is claimed
    lead.claim(1)
    assert (lead.term, lead.holder, lead.unpromised()) == (1, "b", ["a", "c", "d"])
    assert lead.ask() == [Send(peer, TakeOver(0, Peer.version(1), 1)) for peer in "acd"]
    assert lead.promised("c", Promise(0, Peer.version(1), 1))
    dies(lead.roster, "d")
    assert lead.unpromised() == ["a"]
    lead.concede(2, "c")
    assert (lead.term, lead.holder, lead.unpromised(), lead.ask()) == (2, "c", [], [])
    assert not lead.promised("a", Promise(0, Peer.version(1), 2))


@pytest.mark.parametrize(("epochs", "claimed"), [((1,), True), ((2,), False), ((), True)])
def test_a_claim_of_a_live_third_peer_counts_unless_that_peer_has_moved_on(
    epochs: tuple[int, ...], claimed: bool
) -> None:
    """A claimant without epochs in its Summary has not moved on. A claim of this peer or of the sender is no third
    peer's."""
    lead = leadership("e")
    lead.concede(1, "b")
    lead.roster.summarized("b", replace(lead.roster.mine, epochs=epochs, incarnation=2))
    assert lead.is_claimed_by_another("a", 0) is claimed
    assert not lead.is_claimed_by_another("b", 0)
    dies(lead.roster, "b")
    assert not lead.is_claimed_by_another("a", 0)
    lead.claim(2)
    assert not lead.is_claimed_by_another("a", 0)


# -- which peer may hold which term


def test_each_term_belongs_to_one_candidate_in_turn() -> None:
    """However many terms were claimed: a peer whose turn it is not can't claim the term."""
    lead = leadership("e")
    turns = {term: [peer for peer in "abcde" if lead.entitles(peer, term)] for term in range(7)}
    assert turns == {term: ["abc"[term % 3]] for term in range(7)}


def test_other_peers_may_hold_a_term_only_once_no_candidate_is_left() -> None:
    """A candidate that was passed over in this round does not count. Their terms are above one turn of all
    candidates."""
    lead = leadership("e")
    dies(lead.roster, "a")
    dies(lead.roster, "b")
    assert not lead.entitles("d", 4)
    lead.passed_over.add("c")
    assert [lead.entitles("d", term) for term in (0, 3, 4, 9)] == [False, False, True, True]


def test_no_term_far_beyond_the_known_one_may_be_held() -> None:
    """The bound moves with the known term, so an honest claim always fits."""
    lead = leadership("e")
    most = 4 * TERMS_AHEAD_MAX
    assert lead.entitles("abc"[most % 3], most)
    assert not lead.entitles("abc"[(most + 1) % 3], most + 1)
    lead.concede(1, "b")
    assert lead.entitles("abc"[(most + 1) % 3], most + 1)


def test_a_candidate_outranks_any_other_peer_and_then_the_term_and_the_id_decide() -> None:
    lead = leadership("e")
    claims = [(1, "b"), (9, "e"), (9, "d"), (4, "b"), (4, "d")]
    assert sorted(claims, key=lambda claim: lead.rank(*claim)) == [(4, "d"), (9, "d"), (9, "e"), (1, "b"), (4, "b")]


def test_a_claim_of_a_gone_holder_ranks_below_every_other() -> None:
    lead = leadership("e")
    lead.concede(2, "c")
    assert lead.present == lead.rank(2, "c")
    dies(lead.roster, "c")
    assert lead.present < lead.rank(0, "d")


def test_the_next_term_of_a_peer_is_its_next_turn() -> None:
    """Other peers take a term above a whole turn."""
    lead = leadership("e")
    lead.concede(4, "b")
    assert [lead.next_term_of(peer) for peer in "abce"] == [6, 7, 5, 8]
    lead.seize()
    assert (lead.term, lead.holder, lead.unpromised()) == (8, "e", [])


def test_a_peer_that_is_told_of_its_own_claim_asks_for_promises_again() -> None:
    """It may have forgotten the claim, or another peer lies: in both cases it writes nothing without promises."""
    lead = leadership("b")
    lead.concede(1, "b")
    assert lead.unpromised() == ["a", "c", "d", "e"]


def test_a_claim_by_a_peer_that_the_plan_does_not_name_is_refused(peer: Any) -> None:
    """It is told of the present holder, the peer's status has the reason, and nothing changes."""
    b = peer("b", live="acz")
    for term in (0, 1, 4, 100):
        why = f"a claim to shard 0 is refused: z may not hold term {term}"
        assert b.hear("z", TakeOver(0, b.held, term)) == [Complaint("z", why), Send("z", Outdated(0, b.held, 0, "a"))]
    lead = b.replica.logs[0].lead
    assert (lead.term, lead.holder) == (0, "a")


# -- live peers for which a round has waited too long


def test_a_live_aggregator_that_never_commits_is_passed_over(peer: Any) -> None:
    """It has the contribution and answers probes. Its successor claims the term, and its later claims are worth
    nothing in this round."""
    b = peer("b")
    (send,) = b.contribute()
    b.feed(Delivered("a", send.message))
    assert b.pass_time(b.rules.commits_within - 1.0) == []
    effects = b.pass_time(3.0)
    text = "shard 0: the round goes on without a, which answers probes but nothing else"
    assert text in [e.text for e in effects if isinstance(e, Note)]
    assert Send("c", TakeOver(0, b.held, 1)) in effects
    assert b.replica.logs[0].lead.target() == (1, "b")


def test_an_aggregator_that_does_not_have_the_contribution_is_not_passed_over(peer: Any) -> None:
    """It can't count what has not arrived."""
    b = peer("b")
    b.contribute()
    b.pass_time(3 * b.rules.commits_within)
    assert b.replica.logs[0].lead.passed_over == set()


def test_an_aggregator_is_not_passed_over_while_too_few_peers_train(peer: Any) -> None:
    """It waits for ``min_peers``, as it should."""
    b = peer("b", group="ab", live="a", min_peers=3)
    (send,) = b.contribute()
    b.feed(Delivered("a", send.message))
    b.pass_time(3 * b.rules.commits_within)
    assert b.replica.logs[0].lead.passed_over == set()


def test_a_live_peer_that_never_promises_is_passed_over(peer: Any) -> None:
    """The claimant writes the commit without its promise."""
    b = peer("b")
    b.contribute()
    b.lose("a")
    b.hear("c", b.contribution(b.held))
    assert b.averages(b.pass_time(b.rules.promises_within - 1.0)) == []
    assert b.averages(b.pass_time(3.0)) == [["b", "c"]]


def test_a_passed_peer_is_named_as_an_aggregator_by_no_plan_for_a_while(peer: Any) -> None:
    """It would hold up every later round that it aggregates. It still contributes."""
    b = peer("b")
    b.contribute()
    b.replica.roster.passes_over("a", b.now)
    log = b.replica.logs[0]
    assert log.next_plan({"a", "b", "c"}, b.now) == Plan(tuple("abc"), log.next_plan({"a", "b", "c"}, b.now).succession)
    assert set(log.next_plan({"a", "b", "c"}, b.now).succession) == {"b", "c"}
    b.replica.roster.probing.expire(b.now + b.rules.forgotten_after)
    assert set(log.next_plan({"a", "b", "c"}, b.now).succession) == {"a", "b", "c"}
