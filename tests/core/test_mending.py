"""Shards whose tensors are damaged or doubted: fetched again, or used as they are if no peer has better ones."""

from __future__ import annotations

from typing import Any

from p2p_diloco.core.events import (
    Accept,
    Applied,
    Apply,
    Average,
    Averaged,
    Changed,
    Complaint,
    Damaged,
    Filled,
    Moving,
    Send,
)
from p2p_diloco.core.messages import Commit, Fetch, Held, Plan, Probe, Versions
from p2p_diloco.core.state import meta_of
from tests.core.conftest import (
    TWO,
    ahead,
    average_in,
    computed,
    fetches,
    fill,
    filled,
    mismatches,
    moves_on,
    next_commit,
    running,
    to,
)

FETCHING = "shard 0: the state of epoch 1 was changed in memory; fetching it again"


# -- damaged tensors


def test_a_damaged_shard_is_fetched_and_commits_nothing_meanwhile(peer: Any) -> None:
    """The round that was about to close goes on with the same contributions after the repair."""
    a = peer("a", group="ab")
    a.hear("b", a.contribution(a.held))
    assert peer.averages(a.contribute()) == [["a", "b"]]
    effects = a.feed(Damaged(0, a.held))
    assert mismatches(effects) == [FETCHING]
    assert effects[1:] == [Send("b", Fetch((None,)))]
    assert peer.averages(a.pass_time(1.0)) == []
    state = a.state(0, 1, plan=a.plan("ab"))
    a.hear("b", state)
    accept, average = a.feed(Filled(0, state.version, "d1"))
    assert accept == Accept(((0, "d1"),))
    assert [name for name, _ in average.contributions] == ["a", "b"]
    assert average.held == meta_of(a.replica.state(0))


def test_a_repair_voids_another_state_that_is_filled_in(peer: Any) -> None:
    """The node drops the other state's proposal when it accepts the repair, so it can't accept that one afterwards."""
    a = peer("a", group="ab")
    a.feed(Damaged(0, a.held))
    repair, newer = a.state(0, 1, plan=a.plan("ab")), a.state(0, 2, plan=a.plan("ab"))
    assert a.hear("b", repair) == [fill(a, repair)]
    assert a.hear("b", newer) == [fill(a, newer)]
    assert a.feed(Filled(0, repair.version, repair.version.digest))[0] == Accept(((0, "d1"),))
    assert a.feed(Filled(0, newer.version, newer.version.digest)) == []
    assert a.replica.logs[0].version == repair.version


def test_damage_is_reported_once_and_for_the_present_version_only(peer: Any) -> None:
    a = peer("a", group="ab")
    assert a.feed(Damaged(0, a.version(0))) == []
    assert a.replica.logs[0].round.damaged is None
    assert mismatches(a.feed(Damaged(0, a.held))) == [FETCHING]
    since = a.replica.logs[0].round.damaged
    a.now += 1.0
    assert a.feed(Damaged(0, a.held)) == []
    assert a.replica.logs[0].round.damaged == since


def test_no_wakeup_is_planned_for_a_round_that_damage_holds_open(peer: Any) -> None:
    """Its deadline has passed, and it can't close before the repair."""
    a = peer("a", group="abc", round_timeout=0.3)
    a.feed_tick()
    tick = a.replica.next_wakeup()
    a.contribute()
    a.hear("b", a.contribution(a.held))
    assert a.replica.next_wakeup() < tick
    a.feed(Damaged(0, a.held), after=0.4)
    assert a.replica.next_wakeup() == tick


def test_a_repair_goes_on_while_another_shard_moves(peer: Any) -> None:
    a = peer("a", group="ab", succession="ba", fragments=TWO)
    a.feed(Damaged(0, a.held))
    moves_on(a, 1, by="b")
    assert a.replica.versions[1] == a.version(2)
    state = a.state(0, 1)
    assert a.hear("b", state) == [fill(a, state)]


def test_each_repair_asks_another_donor(peer: Any) -> None:
    """The last donor may have sent nothing better."""
    a = peer("a", group="abc")
    asked = [e.to for e in a.feed(Damaged(0, a.held)) if isinstance(e, Send)]
    a.replica.catchup.fetching = None
    asked += [e.to for e in a.replica.mending.mend(a.now) if isinstance(e, Send)]
    assert sorted(asked) == ["b", "c"]


def test_damaged_tensors_are_not_committed_while_better_ones_are_filled_in(peer: Any) -> None:
    """Otherwise damaged tensors would be averaged, and then replace the fetched ones."""
    a = peer("a", group="ab", fragments=((0,), (1,)))
    a.feed(Damaged(0, a.held))
    a.pass_time(a.rules.fetch_again - 1.0)
    a.hear("b", a.state(0, 1, plan=a.plan("ab")))
    a.replica.catchup.fetching = None  # as when another shard moves on
    a.pass_time(2.0)
    assert a.replica.logs[0].round.working is None
    assert a.feed(Filled(0, a.held, "d1"))[0] == Accept(((0, "d1"),))


def test_damaged_tensors_that_no_peer_can_replace_become_a_version(peer: Any) -> None:
    """By a commit without contributions, below min_peers and under the next term that is this peer's turn; the round
    goes on from it."""
    a = peer("a", group="ab", min_peers=2)
    a.lose("b")
    a.contribute()
    told = a.feed(Damaged(0, a.held))
    alone = "shard 0 was changed in memory and no live peer has an intact copy: continuing with the changed copy"
    assert mismatches(told) == [FETCHING, alone]
    average = told[-1]
    assert isinstance(average, Average)
    assert (average.contributions, average.held) == ((), None)
    assert a.feed(Damaged(0, a.held)) == []
    term = a.replica.logs[0].lead.term
    assert (term, a.replica.logs[0].lead.entitles("a", term)) == (2, True)  # term 1 is the turn of b
    a.averaged(told)
    assert (a.held.epoch, a.held.digest, a.held.samples) == (2, "new", 10)
    assert a.replica.logs[0].state.term == term
    assert not a.replica.logs[0].round.trusted
    assert mismatches(a.feed(Damaged(0, a.held)))[0] == FETCHING.replace("epoch 1", "epoch 2")


def test_a_damaged_shard_past_its_end_becomes_a_version_while_the_run_goes_on(peer: Any) -> None:
    a = peer("a", group="a", fragments=((0,), (1,)), stop_after_epochs=2)
    a.contribute(0)
    a.feed(Averaged(0, a.held, 1, "d2", "mean"))
    assert a.replica.logs[0].final
    assert not a.replica.finished
    told = a.feed(Damaged(0, a.held))
    assert [e.contributions for e in told if isinstance(e, Average)] == [()]


def test_a_donor_that_delivers_nothing_is_waited_for_fetch_again_seconds(peer: Any) -> None:
    """Then the run goes on with the damaged tensors, though a live peer should have better ones. The fetch under way
    may have begun late, so its own deadline does not count."""
    a = peer("a", group="abc")
    effects = a.feed(Damaged(0, a.held))
    a.hear("b", Versions((a.version(1),), forked=False))
    effects += a.pass_time(a.rules.fetch_again - 5.0)
    a.replica.catchup.fetching = None
    effects += a.pass_time(4.0)
    assert {e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Fetch)} == {"b", "c"}
    assert not any(isinstance(e, Average) for e in effects)
    assert [e.contributions for e in a.pass_time(2.0) if isinstance(e, Average)] == [()]


def test_a_donor_whose_copy_is_damaged_too_is_not_waited_for(peer: Any) -> None:
    """It says so by asking for the shard itself. The next donor is asked at once."""
    a = peer("a", group="abc")
    [(first, _)] = fetches(a.feed(Damaged(0, a.held)))
    other = "b" if first == "c" else "c"
    a.hear(first, Fetch((None,)))
    assert {donor for donor, _ in fetches(a.pass_time(2.0))} == {other}
    a.hear(first, Fetch((None,)))
    assert a.replica.catchup.donor == other, "it is no donor any more"


def test_an_asynchronous_peer_asks_others_once_the_succession_has_damaged_copies(peer: Any) -> None:
    b = running(peer, "b")
    b.feed(Damaged(0, b.held))
    b.hear("c", Fetch((None,)))
    assert {donor for donor, _ in fetches(b.pass_time(2.0))} == {"a"}


def test_a_donor_whose_transfer_makes_progress_is_waited_for_longer(peer: Any) -> None:
    """A state takes long on a slow link."""
    a = peer("a", group="ab")
    a.feed(Damaged(0, a.held))
    for _ in range(4):
        a.feed(Moving("b"), a.rules.fetch_again / 4 - 0.1)
    assert not any(isinstance(e, Average) for e in a.pass_time(a.rules.fetch_again - 5.0))
    assert [e.contributions for e in a.pass_time(6.0) if isinstance(e, Average)] == [()]


def test_damage_after_the_end_of_the_run_is_reported_and_stays(peer: Any) -> None:
    """Nothing is committed past the end."""
    a = peer("a", group="a", stop_after_epochs=1)
    told = a.feed(Damaged(0, a.held))
    assert mismatches(told) == [
        FETCHING,
        "shard 0 was changed in memory and no live peer has an intact copy: the run ended with this damage",
    ]
    assert not any(isinstance(effect, Average) for effect in told)
    assert a.feed(Damaged(0, a.held)) == []
    log = a.replica.logs[0]
    assert (log.round.damaged, log.round.past_mending, log.round.trusted) == (None, True, False)


def test_an_asynchronous_peer_asks_the_succession_for_damaged_shards(peer: Any) -> None:
    """Other peers are usually behind."""
    b = running(peer, "b")
    assert [e.to for e in b.feed(Damaged(0, b.held)) if isinstance(e, Send)] == ["c"]
    assert b.replica.logs[0].donors() == ["c"]
    b.lose("c")
    assert b.replica.logs[0].donors() == ["a"], "unless none of them lives"


def test_an_asynchronous_commit_of_damaged_tensors_waits_for_no_successor(peer: Any) -> None:
    """No peer could be given its base; the successors fetch the result."""
    c = running(peer)
    for one in "ab":
        c.lose(one)
    [average] = [e for e in [*c.feed(Damaged(0, c.held)), *c.pass_time(1.1)] if isinstance(e, Average)]
    c.meet("b")
    assert c.feed(Averaged(0, average.base, average.number, "true", "mean"))[0] == Accept(((0, "true"),))


def test_a_proposal_that_damage_interrupts_is_computed_again_unchanged(peer: Any) -> None:
    """A successor may hold the proposal already. A new draft would have another plan."""
    c = running(peer)
    first = average_in(c.hear("a", c.contribution(c.held)))
    c.feed(Averaged(0, first.base, first.number, "d2", "mean"))
    c.feed(Damaged(0, c.held))
    c.meet("a", idle=True)
    c.hear("b", c.state(0, 1))
    assert average_in(c.feed(Filled(0, c.held, "d1"))) == first
    assert len(to(c.feed(Averaged(0, first.base, first.number, "d2", "mean")), "b", Commit)) == 1


def test_a_proposal_whose_base_no_peer_can_replace_is_given_up(peer: Any) -> None:
    """Its base is lost. The damaged tensors become a version by a commit of no contributions."""
    c = running(peer)
    computed(c, c.hear("a", c.contribution(c.held)), "d2")
    c.feed(Damaged(0, c.held))
    for name in "ab":
        c.lose(name)
    average = average_in([*c.feed_tick(), *c.pass_time(c.rules.fetch_again + 1.0)])
    assert (average.contributions, average.held) == ((), None)


# -- doubted tensors


def test_a_commit_that_leads_to_another_digest_is_not_taken(peer: Any) -> None:
    """This replica's own state of the shard is in doubt, and is fetched whole."""
    b = peer("b", group="ab", fragments=TWO)
    commit = Commit(1, b.version(1), b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    b.hear("a", commit)
    complaint, note, fetch = b.feed(Applied(1, commit.base, "astray"))
    assert complaint == Complaint("a", "shard 1: a commit on epoch 1 led to another digest than it names")
    assert note.kind == "mismatch"
    assert fetch == Send("a", Fetch((b.version(1), None)))
    assert b.replica.versions == (b.version(1), b.version(1))
    state = b.state(1, 2, plan=b.plan("ab"))
    assert b.hear("a", state) == [fill(b, state)]
    assert filled(b, state) == [Accept(((1, "d2"),)), Send("a", Probe(b.replica.roster.mine)), Changed()]
    assert b.replica.catchup.donor is None


def test_a_doubted_shard_is_asked_of_a_peer_that_is_ahead_if_the_author_is_gone(peer: Any) -> None:
    """That peer has applied the commit. If no peer is ahead, none is asked."""
    b = peer("b", group="abc")
    commit = Commit(0, b.version(1), b.version(2), 0, "a", (), Plan(("b", "c"), ("b", "c")))
    b.lose("a")
    b.hear("c", commit)
    assert fetches(b.feed(Applied(0, commit.base, "astray"))) == []
    b.meet("c", model=ahead(b, 2), epochs=(2,))
    b.hear("c", commit)
    assert fetches(b.feed(Applied(0, commit.base, "astray"))) == [("c", Fetch((None,)))]


def test_a_doubted_shard_whose_author_is_this_peer_is_asked_of_a_peer_that_is_ahead(peer: Any) -> None:
    """An earlier life wrote the commit, and another peer passed it on."""
    b = peer("b", group="abc")
    assert b.replica.mending.doubt(0, "b", b.now) == []
    b.meet("c", model=ahead(b, 2), epochs=(2,))
    assert fetches(b.replica.mending.doubt(0, "b", b.now)) == [("c", Fetch((None,)))]


def test_a_doubted_shard_is_asked_for_whole_once(peer: Any) -> None:
    """A later fetch asks only for what is newer."""
    b = peer("b", group="ab")
    assert fetches(b.replica.mending.doubt(0, "a", b.now)) == [("a", Fetch((None,)))]
    b.pass_time(b.rules.fetch_again + 1.5)
    assert fetches(b.replica.catchup.fetch("a", ahead(b, 2), b.now)) == [("a", Fetch((b.version(1),)))]


def test_the_fetch_of_a_doubted_shard_is_given_up_like_any_other(peer: Any) -> None:
    b = peer("b", group="ab")
    commit = b.commit(plan=b.plan("ab"))
    b.hear("a", commit)
    b.feed(Applied(0, commit.base, "astray"))
    b.pass_time(31.5)
    assert b.replica.catchup.donor is None


def test_a_successor_mends_a_doubted_shard_and_then_holds_the_commit(peer: Any) -> None:
    """Its aggregator waits for it and has nothing newer: the base is fetched again, and the commit applied again."""
    b = running(peer, "b")
    commit = next_commit(b)
    b.hear("c", commit)
    effects = b.feed(Applied(0, commit.base, "astray"))
    assert to(effects, "c", Fetch) == [Fetch((None,))]
    b.hear("c", b.state(0, 1))
    assert [e.commit for e in b.feed(Filled(0, b.held, "d1")) if isinstance(e, Apply)] == [commit]
    assert to(b.feed(Applied(0, commit.base, commit.version.digest)), "c", Held) == [Held(0, commit.version)]
