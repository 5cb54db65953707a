"""Live peers that do nothing hold up a round for a bounded time, whatever they claim meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from p2p_diloco.core.events import Delivered, Granted, Note, Send
from p2p_diloco.core.messages import Contribution, Outdated, TakeOver


def handed(b: Any, effects: list[Any]) -> None:
    """The contribution among these effects arrives."""
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, Contribution):
            b.feed(Delivered(effect.to, effect.message))


def test_all_waits_of_a_round_for_one_peer_count_together(peer: Any) -> None:
    """Another peer's claim in between does not let the wait begin again."""
    b = peer("b")
    handed(b, b.contribute())
    b.pass_time(b.rules.commits_within - 3.0)
    handed(b, b.hear("c", TakeOver(0, b.held, 2)))
    b.pass_time(2.0)
    handed(b, b.hear("a", TakeOver(0, b.held, 3)))
    assert b.replica.logs[0].lead.passed_over == set()
    b.pass_time(5.0)
    assert b.replica.logs[0].lead.passed_over == {"a"}


def test_a_peer_remembers_a_holder_that_another_peer_passes_over_a_moment_earlier(peer: Any) -> None:
    """Else the holder would hold up one more round for each peer that did not wait quite as long as the first."""
    b = peer("b")
    handed(b, b.contribute())
    b.pass_time(b.rules.commits_within - 2 * b.rules.settle)
    assert not b.replica.roster.passed("a")
    b.pass_time(b.rules.settle + 1.0)
    assert b.replica.roster.passed("a")
    assert b.replica.logs[0].lead.passed_over == set()
    b.take(b.commit(), "c")
    assert b.replica.roster.passed("a")
    assert b.replica.logs[0].round.awaited == {}


def test_a_candidate_that_passes_the_holder_over_claims_the_term_itself(peer: Any) -> None:
    """The candidate before it may not wait for the holder, and so would not take over."""
    c = peer("c")
    handed(c, c.contribute())
    effects = c.pass_time(c.rules.commits_within + 2.0)
    assert Send("b", TakeOver(0, c.held, 2)) in effects
    assert c.replica.logs[0].lead.holder == "c"


def test_a_peer_that_others_take_for_the_aggregator_waits_in_their_place(peer: Any) -> None:
    """They have passed the holder over. This peer has no contribution of its own: its trainer pauses, say."""
    b = peer("b")
    b.hear("c", b.contribution(b.held))
    b.pass_time(b.rules.commits_within - 1.0)
    assert b.replica.logs[0].lead.passed_over == set()
    b.pass_time(3.0)
    assert b.replica.logs[0].lead.passed_over == {"a"}
    assert b.replica.logs[0].lead.holder == "b"


def test_a_peer_that_does_not_promise_may_still_aggregate_later(peer: Any) -> None:
    """It may know a greater claim. The round goes on without its promise only."""
    b = peer("b")
    b.contribute()
    b.lose("a")
    effects = b.pass_time(b.rules.promises_within + 2.0)
    assert "passed" in [e.kind for e in effects if isinstance(e, Note)]
    assert b.replica.logs[0].unpromised() == []
    assert not b.replica.roster.passed("c")
    assert b.replica.logs[0].lead.passed_over == set()


def test_a_commit_that_counts_nothing_ends_no_wait(peer: Any) -> None:
    """Else an aggregator that commits nothing now and then would never be passed over."""
    b = peer("b")
    handed(b, b.contribute())
    b.pass_time(b.rules.commits_within - 3.0)
    waited = b.replica.logs[0].round.awaited["a"]
    empty = replace(b.commit(), contributions=())
    b.take(replace(empty, version=replace(empty.version, samples=empty.base.samples)), "a")
    assert b.replica.epoch == 2
    assert b.replica.logs[0].round.awaited["a"] == waited
    b.take(b.commit(), "a")
    assert b.replica.epoch == 3
    assert b.replica.logs[0].round.awaited == {}


def test_in_a_long_round_claims_of_peers_that_were_passed_over_before_count_again(peer: Any) -> None:
    """Honest peers that have passed each other over would all hold the term for ever, each without a quorum."""
    a = peer("a")
    a.replica.roster.passes_over("b", a.now)
    claim = TakeOver(0, a.held, 1)
    a.hear("b", claim)
    assert a.replica.logs[0].lead.holder == "a"
    a.pass_time(a.rules.commits_within)
    a.replica.roster.passes_over("b", a.now)
    a.hear("b", claim)
    assert a.replica.logs[0].lead.holder == "b"


def test_when_a_peer_is_lost_the_round_goes_on_with_those_that_it_had_passed_over(peer: Any) -> None:
    """The lost peer's claims may have kept them from committing. If they stayed passed over, this peer would never hand
    its contribution to them."""
    b = peer("b", group="abcd")
    handed(b, b.contribute())
    b.pass_time(b.rules.commits_within + 2.0)
    log = b.replica.logs[0]
    assert log.lead.passed_over == {"a"}
    b.lose("d")
    assert log.lead.passed_over == set()
    assert "a" not in log.round.awaited


def test_a_peer_is_forgiven_once_in_a_round(peer: Any) -> None:
    """Two hostile peers that come and go in turns could hold the round up without end."""
    b = peer("b", group="abcd")
    handed(b, b.contribute())
    b.pass_time(b.rules.commits_within + 2.0)
    log = b.replica.logs[0]
    b.lose("d")
    assert log.lead.passed_over == set()
    log.lead.passed_over.add("a")
    b.lose("c")
    assert log.lead.passed_over == {"a"}


def test_a_peer_gains_nothing_from_its_own_loss(peer: Any) -> None:
    """Else it would break its connections again and again, and be waited for anew each time."""
    b = peer("b", group="abcd")
    handed(b, b.contribute())
    b.pass_time(b.rules.commits_within + 2.0)
    b.lose("a")
    log = b.replica.logs[0]
    assert log.lead.passed_over == {"a"}
    assert log.round.awaited["a"] >= b.rules.commits_within


def test_the_promise_of_a_peer_that_was_passed_over_lately_is_waited_for_only_briefly(peer: Any) -> None:
    """It could hold up each round with its promise."""
    b = peer("b", heartbeat_timeout=4.0)
    b.contribute()
    b.replica.roster.passes_over("c", b.now)
    b.lose("a")
    b.pass_time(b.rules.dead_after - 1.0)
    assert b.replica.logs[0].unpromised() == ["c"]
    b.pass_time(3.0)
    assert b.replica.logs[0].unpromised() == []


def test_the_next_candidate_is_waited_for_no_longer_than_the_holder(peer: Any) -> None:
    """It has the contribution once the holder was passed over, and may do nothing, too. This peer can't take over
    before both were passed over: the plan does not name it."""
    d = peer("d", group="ab", live="ab", mode="async")
    handed(d, d.contribute())
    log, both = d.replica.logs[0], 2 * (int(d.rules.commits_within) + 2)
    for second in range(both):
        handed(d, d.pass_time(1.0))
        assert second < both / 2 or "a" in log.lead.passed_over
    assert log.lead.passed_over == {"a", "b"}
    assert log.lead.holder == "d"


def test_a_candidate_that_wins_its_term_back_gets_one_more_chance(peer: Any) -> None:
    """All others may have passed it over because none of them had given it a contribution. If they conceded, but went
    on without it all the same, they would claim the term from it and concede again, without end."""
    b = peer("b", group="a", live="ac")
    lead = b.replica.logs[0].lead
    handed(b, b.contribute())
    for then in (("a", set[str]()), ("b", {"a"})):
        b.pass_time(b.rules.commits_within + 2.0)
        assert (lead.holder, lead.passed_over) == ("b", {"a"})
        handed(b, b.hear("a", Outdated(0, b.held, 0, "a")))
        assert (lead.holder, lead.passed_over) == then


# -- one invitation, many peers


def granted(p: Any, **grants: str) -> Any:
    """Peers show by which grants they are here, and say that they hold the state."""
    for name, grant in grants.items():
        p.feed(Granted(name, grant))
        p.meet(name)
    return p.replica.roster


def test_after_a_holder_that_commits_nothing_later_peers_of_its_grant_do_not_aggregate(peer: Any) -> None:
    """Else the holder of an invitation would have each of its peers elected in turn, and each would hold up a round.
    Those that were there before still aggregate: they may be honest, and share the invitation."""
    b = peer("b", group="abcdef", round_timeout=100.0)
    granted(b, a="one", c="one", d="other")
    handed(b, b.contribute())
    b.pass_time(b.rules.commits_within + 2.0)
    roster = granted(b, e="one", f="other")
    assert [name for name in "acdef" if roster.passed(name)] == ["a", "e"]
    assert set(b.replica.logs[0].next_plan(set("bcdef"), b.now).succession) == set("bcdf")

    roster.expire(b.now + b.rules.forgotten_after)
    assert [name for name in "acdef" if roster.passed(name)] == ["e"]
    roster.expire(b.now + b.rules.behind_for)
    assert not any(map(roster.passed, "acdef"))


def test_after_two_holders_that_commit_nothing_no_peer_of_their_grant_aggregates(peer: Any) -> None:
    """Peers of one invitation that were all there before cost two rounds at most."""
    b = peer("b", group="abcd")
    roster = granted(b, a="one", c="one", d="one", e="other")
    roster.passes_over("a", b.now)
    assert [name for name in "acde" if roster.passed(name)] == ["a"]
    roster.passes_over("c", b.now)
    assert [name for name in "acde" if roster.passed(name)] == ["a", "c", "d"]


def test_in_an_open_run_each_peer_is_judged_alone(peer: Any) -> None:
    """No peer has a grant there."""
    b = peer("b", group="abcd")
    for name in "ac":
        b.replica.roster.passes_over(name, b.now)
    b.meet("e")
    assert [name for name in "acde" if b.replica.roster.passed(name)] == ["a", "c"]
