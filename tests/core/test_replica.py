"""The one door into the core: the effects of the clock, the network and the life of the run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.events import (
    Accept,
    Applied,
    Average,
    Changed,
    Closed,
    Contribute,
    Delivered,
    Depart,
    Died,
    Discovered,
    Filled,
    Finished,
    Found,
    Measured,
    Merge,
    Moving,
    Note,
    Pause,
    Reachable,
    Ready,
    Received,
    Release,
    Restore,
    Send,
    SendFailed,
    Wakeup,
)
from p2p_diloco.core.messages import Counted, Fetch, Leave, Plan, Probe, ProbeAck, State, Summary, Versions
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.state import founding_meta, meta_of
from p2p_diloco.core.version import ContributionId, ModelVersion, Version, model_version
from tests.core.conftest import TWO, filled, moves_on, round_alone, solo


def told(effects: list[Any]) -> list[str]:
    """The peers that are sent a probe."""
    return [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Probe)]


# -- life of the run


def test_a_founder_holds_epoch_0_and_is_alone_in_the_first_plan(peer: Any) -> None:
    a = peer("a", epoch=None, live="", fragments=TWO)
    assert not a.replica.has_state
    assert a.feed(Found(3, ("x", "y"))) == [Ready(), Changed()]
    assert a.replica.versions == (Version(3, 0, 0, "x"), Version(3, 0, 0, "y"))
    assert [a.replica.state(shard).shard for shard in (0, 1)] == [0, 1]
    state = a.replica.state(1)
    assert (state.plan, state.counted, state.history, state.term) == (Plan(("a",), ("a",)), {}, {0: "y"}, 0)
    assert meta_of(state) == founding_meta(3, "a", "worker")


def test_a_checkpoint_brings_back_plan_table_and_ancestors(peer: Any) -> None:
    """Training may start at once, and all peers that are live or named by the plans are probed."""
    table = (("a", ContributionId(3, 4)),)
    a = peer("a", epoch=None, live="b", fragments=TWO)
    states = (a.state(0, 5, counted=table), a.state(1, 4))
    effects = a.feed(Restore(states))
    told = [Send(name, Probe(a.replica.roster.mine)) for name in "bc"]
    assert effects == [*told, Ready(), Changed()]
    assert tuple(map(a.replica.state, (0, 1))) == states
    assert (a.replica.epoch, a.replica.roster.mine.epochs) == (4, (5, 4))


def test_a_new_replica_holds_nothing(peer: Any) -> None:
    n = peer("n", epoch=None, live="", fragments=TWO, eligible=False)
    mine = n.replica.roster.mine
    assert (mine.model, mine.epochs, mine.eligible, mine.role) == (ModelVersion(), (), False, "worker")
    assert (n.replica.versions, n.replica.epoch, n.replica.finished) == ((None, None), 0, False)


def test_workers_are_the_live_peers_that_train(peer: Any) -> None:
    """This one included."""
    a = peer("a", group="abcd")
    a.meet("c", role="aggregator")
    a.lose("d")
    assert a.replica.workers() == 2


def test_by_default_a_replica_works_and_can_be_reached(peer: Any) -> None:
    """Its first Summary says so, and that it is not idle."""
    r = Replica("a", peer("a").rules, incarnation=77, now=50.0)
    assert r.roster.mine == Summary(77, "worker", True, ModelVersion(), (), idle=False)


def test_each_log_knows_its_fragment(peer: Any) -> None:
    a = peer("a", fragments=((0, 2), (1,)))
    assert [log.fragment for log in a.replica.logs] == [0, 1, 0]
    assert [log.shard for log in a.replica.logs] == [0, 1, 2]


def test_equal_events_lead_to_equal_effects(peer: Any) -> None:
    """Only the events decide: two replicas with the same events return the same effects."""

    def story() -> list[Any]:
        b = peer("b", live="acd", fragments=((0, 1), (2,)))
        told = [b.contribute(0, 1), b.lose("a"), b.hear("c", b.contribution(b.held)), b.pass_time(7.0)]
        return [*told, b.meet("a", incarnation=3), b.hear("d", Fetch(b.replica.versions)), b.feed(Depart())]

    assert story() == story()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_wrong_number_of_payloads_or_digests_is_an_error(peer: Any, mode: str) -> None:
    a = solo(peer, fragments=((0, 1),), mode=mode)
    a.feed(Merge())
    with pytest.raises(ValueError, match="zip"):
        a.feed(Contribute((0, 1), 1.0, 1, ("Δ",)))
    with pytest.raises(ValueError, match="zip"):
        peer("a", epoch=None, live="").feed(Found(0, ("x", "y")))


def test_a_run_ends_when_each_shard_has_reached_stop_after_epochs(peer: Any) -> None:
    """Finished comes once, and nothing is due any more."""
    a = solo(peer, fragments=TWO, stop_after_epochs=2)
    assert Finished() not in round_alone(a, 0)
    assert (a.replica.finished, a.feed(Merge())[0].due) == (False, (1,))
    effects = round_alone(a, 1)
    assert effects == [Accept(((1, "n2"),)), Changed(), Finished(), Release(sent=True)]
    assert a.replica.finished
    assert a.feed(Merge())[0].due == ()


def test_a_run_ends_when_each_shard_has_reached_stop_after_samples(peer: Any) -> None:
    """One sample less does not end it."""
    a = solo(peer, stop_after_samples=21)
    assert Finished() not in round_alone(a)  # 10 + 5
    assert Finished() not in round_alone(a)  # 20
    assert Finished() in round_alone(a)
    exact = solo(peer, stop_after_samples=20)
    round_alone(exact)
    assert Finished() in round_alone(exact)


def test_a_run_that_ended_is_restored_as_ended(peer: Any) -> None:
    a = peer("a", epoch=None, live="", stop_after_epochs=5)
    assert a.feed(Restore((a.state(0, 5, plan=a.plan("a")),))) == [Ready(), Changed(), Finished()]


def test_a_run_that_ended_is_not_taken_over(peer: Any) -> None:
    b = peer("b", stop_after_epochs=1)
    assert [type(e) for e in b.lose("a")] == [Note, Died]


def test_a_peer_that_leaves_tells_all_live_peers(peer: Any) -> None:
    a = peer("a", group="abc")
    a.lose("b")
    a.meet("d")
    goodbye = Leave(a.replica.own.incarnation)
    assert a.feed(Depart()) == [Send("c", goodbye), Send("d", goodbye)]


def test_the_successor_of_a_peer_that_left_takes_over_at_once(peer: Any) -> None:
    b = peer("b", group="ab")
    b.contribute()
    notes = b.hear("a", Leave(1))
    assert [e.kind for e in notes if isinstance(e, Note)] == ["left", "takeover"]
    assert isinstance(notes[-1], Average)


def test_a_peer_whose_trainer_died_says_so(peer: Any) -> None:
    """The others count a death, and wait for it no longer than for a peer that leaves."""
    a, b = peer("a", group="ab"), peer("b", group="ab")
    assert a.feed(Depart(died=True)) == [Send("b", Leave(a.replica.own.incarnation, died=True))]
    b.contribute()
    effects = b.hear("a", Leave(1, died=True))
    assert [e.kind for e in effects if isinstance(e, Note)] == ["died", "takeover"]
    assert effects[0] == Note("died", "a lost its trainer, which ended without leaving")
    assert Died("a", 1, "trainer") in effects


def test_a_replica_that_left_does_nothing_more(peer: Any) -> None:
    """A message after Leave would look like a return."""
    a = peer("a", group="ab")
    a.feed(Depart())
    assert a.feed(Wakeup(), after=10.0) == []
    assert a.hear("b", a.contribution(a.held)) == []


def test_a_replica_that_left_plans_no_wakeup(peer: Any) -> None:
    """A node that keeps to next_wakeup() would spin until it ends."""
    a = peer("a", group="ab")
    a.feed(Depart())
    assert a.replica.next_wakeup() == float("inf")


# -- what is told at once


def test_a_peer_that_an_epoch_does_not_count_tells_all(peer: Any, life: int) -> None:
    """The next commit may name it then. A peer that is counted does not tell it."""
    b = peer("b", group="abc", live="a")
    assert told(moves_on(b)) == ["a", "c"]
    mine = Counted("b", ContributionId(life, 1), 2.0, 5)
    assert told(moves_on(b, counted=(mine,))) == []
    assert told(moves_on(b, counted=(replace(mine, peer="a"),))) == ["a", "c"]


def test_a_peer_that_is_left_out_tells_it_once_the_fragment_is_even(peer: Any, life: int) -> None:
    """Its Summary has the lowest epoch; a shard that counts it does not make up for one that does not."""
    b = peer("b", group="ab", fragments=((0, 1), (2,)))
    mine = (Counted("b", ContributionId(life, 1), 2.0, 5),)
    assert told(moves_on(b, 0)) == []
    assert told(moves_on(b, 1, counted=mine)) == ["a"]
    assert told(moves_on(b, 2, counted=mine)) == []


def test_a_peer_that_fetched_an_epoch_tells_all(peer: Any, life: int) -> None:
    """Whatever the commits counted that it missed, none on its way counted it."""
    b = peer("b", group="ab")
    assert told(moves_on(b, counted=(Counted("b", ContributionId(life, 1), 2.0, 5),))) == []
    state = b.state(0, 4, plan=b.plan("ab"))
    b.hear("a", state)
    assert told(filled(b, state)) == ["a"]


@pytest.mark.parametrize("why", ["idle", "aggregator", "asynchronous"])
def test_a_peer_that_does_not_contribute_does_not_tell_that_it_is_left_out(peer: Any, why: str) -> None:
    """It would only cost probes."""
    match why:
        case "idle":
            b = peer("b", group="ab", pause_timeout=0.0)
            b.feed(Pause(True))
        case "aggregator":
            b = peer("b", group="ab", role="aggregator")
        case _:
            b = peer("b", group="ac", live="ac", mode="async")
    assert told(moves_on(b)) == []


def test_all_are_told_at_once_of_idleness_and_of_its_end(peer: Any) -> None:
    """Live and named peers are probed, dead ones are not; once for each change."""

    def told(effects: list[Any]) -> list[tuple[str, bool]]:
        return [(e.to, e.message.summary.idle) for e in effects if isinstance(e, Send) and isinstance(e.message, Probe)]

    a = peer("a", group="abcd", live="bc", pause_timeout=0.5)
    a.meet("e")
    a.lose("c")
    assert told(a.feed(Pause(True))) == []
    assert told(a.feed(Measured(1.0), after=0.6)) == [("b", True), ("d", True), ("e", True)]
    assert told(a.feed(Measured(1.0), after=0.1)) == []
    assert told(a.feed(Pause(False))) == [("b", False), ("d", False), ("e", False)]


def test_all_are_told_at_once_that_a_peer_turns_private_or_reachable(peer: Any) -> None:
    """A report that changes nothing is not told."""
    a = peer("a")
    assert a.feed(Reachable(True)) == []
    for reachable in (False, True):
        note, *probes = a.feed(Reachable(reachable))
        assert isinstance(note, Note)
        assert note.kind == "reachable"
        assert [(probe.to, probe.message.summary.eligible) for probe in probes] == [("b", reachable), ("c", reachable)]


def test_a_peer_that_turns_private_loses_a_claim_that_was_not_made(peer: Any) -> None:
    """A peer waits for the first reachable candidate; when that one turns private, the next one claims at once."""
    c = peer("c", group="abc", succession="abc")
    c.contribute()
    c.lose("a")
    assert "takeover" in [e.kind for e in c.meet("b", eligible=False) if isinstance(e, Note)]


def test_a_state_is_fetched_from_a_private_peer(peer: Any) -> None:
    n = peer("n", epoch=None, live="")
    effects = n.meet("a", model=model_version([n.version(7)]), epochs=(7,), eligible=False)
    assert [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Fetch)] == ["a"]


def test_a_probe_is_answered_with_what_is_held_and_idleness(peer: Any) -> None:
    a = peer("a", group="ab", fragments=TWO)
    summary = Summary(a.replica.own.incarnation, "worker", True, model_version([a.version(1)] * 2), (1, 1), idle=False)
    assert a.hear("b", Probe(a.about()))[0] == Send("b", ProbeAck(summary))
    a.feed(Measured(1.0), after=10.1)
    assert a.hear("b", Probe(a.about()))[0].message.summary.idle


# -- membership


def test_a_discovered_peer_is_probed_once(peer: Any) -> None:
    """It becomes a member of the roster when it answers."""
    a = solo(peer)
    assert a.feed(Discovered("x")) == [Send("x", Probe(a.replica.roster.mine))]
    assert a.feed(Discovered("x")) == []
    assert a.feed(Discovered("a")) == []
    assert a.replica.roster.alive() == []


def test_a_peer_that_only_asks_is_answered_and_not_probed(peer: Any) -> None:
    """An observer, of which nothing but questions and payloads under way is seen: it stays unknown. A peer that was
    dead is probed as after any message."""
    a = peer("a", epoch=3, group="ab")
    for event in (Received("x", Fetch((None,), shards=())), Received("x", Fetch((None,), whole=True, shards=(0,)))):
        (answer,) = a.feed(event)
        assert isinstance(answer.message, Versions | State)
        assert a.feed(Moving("x")) == []
    assert not a.replica.roster.known("x")
    assert told_of("x", a.pass_time(30.0)) == []
    a.lose("b")
    assert Send("b", Probe(a.replica.roster.mine)) in a.hear("b", Fetch((None,), shards=()))


def told_of(peer: str, effects: list[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, Send) and effect.to == peer]


def test_a_discovered_peer_that_never_answers_is_no_death(peer: Any) -> None:
    """After the timeout nobody waits for it. It may have left on purpose before this peer came."""
    a = solo(peer)
    a.feed(Discovered("x"))
    effects = a.pass_time(11.0)
    assert [e for e in effects if isinstance(e, Note | Died)] == [Note("absent", "x never answered")]
    assert a.replica.roster.away("x")


def test_a_peer_that_answers_has_joined(peer: Any) -> None:
    """Noted once; and again if it was dead meanwhile."""
    a = peer("a", group="ab", live="")
    assert [e.kind for e in a.meet("b")] == ["joined"]
    assert a.meet("b") == []
    a.lose("b")
    assert [e.kind for e in a.meet("b")] == ["joined"]


def test_a_peer_that_probes_has_joined(peer: Any) -> None:
    a = solo(peer)
    answer, note = a.hear("x", Probe(a.about()))
    assert (answer, note.kind) == (Send("x", ProbeAck(a.replica.roster.mine)), "joined")


def test_a_dead_peer_that_probes_has_joined_again(peer: Any) -> None:
    a = peer("a", group="ab")
    a.lose("b")
    assert Note("joined", "b joined") in a.hear("b", Probe(a.about()))


def test_a_strangers_message_is_handled_and_its_sender_probed(peer: Any) -> None:
    """A second message causes no probe."""
    a = solo(peer)
    effects = a.hear("x", a.contribution(a.held))
    assert effects[0] == Send("x", Probe(a.replica.roster.mine))
    a.hear("x", ProbeAck(a.about()))
    assert a.hear("x", a.contribution(a.held, 2)) == []


def test_the_probe_of_a_stranger_starts_the_clock_of_its_silence(peer: Any) -> None:
    a = solo(peer)
    a.hear("x", a.contribution(a.held))
    assert a.replica.roster.members["x"].unanswered == a.now
    a.feed_tick()


def test_a_transfer_that_goes_on_is_a_sign_of_life(peer: Any) -> None:
    """Answers to probes may wait behind it for longer than the heartbeat timeout."""
    a = peer("a", group="ab", heartbeat_timeout=4.0)
    a.silent.add("b")
    for _ in range(10):
        a.pass_time(1.0)
        assert a.feed(Moving("b")) == []
    assert a.replica.roster.live("b")
    a.pass_time(6.0)
    assert not a.replica.roster.live("b")
    (probe,) = a.feed(Moving("b"))
    assert (probe.to, type(probe.message)) == ("b", Probe)
    assert a.replica.roster.live("b")


def test_a_peer_that_left_before_it_was_met_can_come_back(peer: Any) -> None:
    """It is sent again what its earlier life was sent."""
    b = peer("b", group="abc", succession="acb", live="c")
    (send,) = [e for e in b.contribute() if isinstance(e, Send)]
    b.feed(Delivered("a", send.message))
    b.hear("a", Leave(1))
    assert not b.replica.roster.may_aggregate("a")
    assert b.meet("a", incarnation=2) == [Note("joined", "a joined"), send]


def test_a_peer_that_left_and_comes_back_has_joined(peer: Any) -> None:
    b = peer("b", group="ab")
    b.hear("a", Leave(1))
    assert not b.meet("a")
    assert b.meet("a", incarnation=2)[0] == Note("joined", "a joined")


def test_a_broken_link_is_probed_at_once(peer: Any) -> None:
    """With a refused dial it makes the peer dead. A stranger's broken connection has no effect."""
    a = peer("a", group="ab")
    assert a.feed(Closed("b")) == [Send("b", Probe(a.replica.roster.mine))]
    assert a.replica.roster.live("b")
    assert [type(e) for e in a.refuse("b")] == [Note, Died]
    assert a.feed(Closed("b")) == []
    assert a.feed(Closed("stranger")) == []


def test_the_second_refused_dial_is_a_verdict(peer: Any) -> None:
    a = peer("a", group="ab")
    assert a.refuse("b") == [Send("b", Probe(a.replica.roster.mine))]
    assert a.refuse("b") == [Note("died", "b can't be reached any more"), Died("b", 1, "node")]
    assert a.refuse("b") == []


def test_a_passed_deadline_is_no_refusal(peer: Any) -> None:
    """A message that was not answered in time does not show the peer's death: only silence or refused dials do."""
    a = peer("a", group="ab")
    for _ in range(5):
        assert a.feed(SendFailed("b", Probe(a.replica.roster.mine), gone=False)) == []
    assert a.replica.roster.live("b")


def test_silence_is_death_after_the_timeout(peer: Any) -> None:
    """A frozen process closes no connection; a peer that is waited for is found dead within the heartbeat timeout."""
    b = peer("b", group="ab")
    b.contribute()
    b.silent.add("a")
    assert b.pass_time(10.5) == []
    effects = b.pass_time(1.0)
    assert [e.kind for e in effects if isinstance(e, Note)] == ["died", "takeover"]
    assert Died("a", 1, "silent") in effects


def test_peers_that_die_together_are_noticed_together(peer: Any) -> None:
    """Each has its own note; the contribution goes to the remaining successor."""
    d = peer("d", group="abcd")
    d.contribute()
    d.silent |= {"a", "b"}
    effects = d.pass_time(14.0)
    assert [e.text[0] for e in effects if isinstance(e, Note) and e.kind == "died"] == ["a", "b"]
    assert Send("c", d.replica.logs[0].own.mine) in effects


def test_the_receipt_of_a_probe_changes_nothing(peer: Any) -> None:
    a = peer("a", group="ab")
    assert a.feed(Delivered("b", Probe(a.replica.roster.mine))) == []


def test_a_late_wakeup_forgives_silence(peer: Any) -> None:
    """It shows that this process stood still. After a wakeup in time the same silence means death."""
    for late, dies in ((8.0, False), (1.5, True)):
        a = peer("a", group="ab")
        a.contribute()
        a.silent.add("b")
        a.pass_time(9.5)
        a.now = a.replica.next_wakeup() + late
        notes = [e.kind for e in a.feed(Wakeup()) if isinstance(e, Note)]
        assert notes == (["died"] if dies else [])


def test_after_a_late_wakeup_the_clock_of_silence_starts_again(peer: Any) -> None:
    """A peer that does not answer after that either is dead after the timeout."""
    a = peer("a", group="ab")
    a.contribute()
    a.silent.add("b")
    a.pass_time(9.5)
    a.now = a.replica.next_wakeup() + 8.0
    a.feed(Wakeup())
    assert [e.kind for e in a.pass_time(9.0) if isinstance(e, Note)] == []
    assert [e.kind for e in a.pass_time(3.0) if isinstance(e, Note)] == ["died"]


# -- probes and wakeups


def test_probes_do_not_grow_with_the_swarm(peer: Any) -> None:
    """A tick costs three probes with 10 peers or 100, besides those of the peers that are waited for."""
    costs = []
    for size in (10, 100):
        a = solo(peer)
        for i in range(size):
            a.meet(f"peer{i}")
        ticks = [a.feed_tick() for _ in range(5)]
        probed = [[e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Probe)] for effects in ticks]
        costs.append([len(names) for names in probed])
        assert len({name for names in probed for name in names}) >= 10
    assert costs == [[3] * 5, [3] * 5]


def test_an_aggregator_probes_the_missing_contributors_at_every_tick(peer: Any) -> None:
    """From the first contribution on."""
    a = peer("a", group="abcdefgh")

    def probed() -> set[str]:
        names = {e.to for e in a.feed_tick() if isinstance(e, Send)}
        for name in names:
            a.meet(name)
        return names

    assert len(probed()) == 3
    a.hear("h", a.contribution(a.held))
    assert set("bcdefg") <= probed()
    assert set("bcdefg") <= probed()
    for name in "bcde":
        a.hear(name, a.contribution(a.held))
    assert all(set("fg") <= probed() and len(probed()) <= 5 for _ in range(3))


def test_missing_contributors_that_answer_probes_are_not_suspected(peer: Any) -> None:
    """They are probed at every tick."""
    a = peer("a")
    a.contribute()
    for _ in range(3):
        asked = [e.to for e in a.feed_tick() if isinstance(e, Send) and isinstance(e.message, Probe)]
        assert {"b", "c"} <= set(asked)
        for name in asked:
            a.hear(name, ProbeAck(a.about()))


def test_a_contributor_probes_its_aggregator_at_every_tick(peer: Any) -> None:
    """While its contribution is under way, not before."""
    h = peer("h", group="abcdefgh")
    before = [{e.to for e in h.feed_tick() if isinstance(e, Send)} for _ in range(4)]
    assert not all("a" in names for names in before)
    h.contribute()
    for _ in range(4):
        assert "a" in {e.to for e in h.feed_tick() if isinstance(e, Send) and isinstance(e.message, Probe)}


def test_each_shard_adds_the_peers_that_it_waits_for(peer: Any) -> None:
    """Its aggregator, or the missing contributors if this peer aggregates; not the groups of other peers."""
    b = peer("b", epoch=None, group="", live="acdefgh", fragments=((0,), (1,), (2,)))
    plans = (b.plan("bc", "ac"), b.plan("bd", "b"), b.plan("efgh", "e"))
    b.feed(Restore(tuple(b.state(s, 1, plan=plan) for s, plan in enumerate(plans))))
    behind = {"epochs": (0, 0, 0), "model": ModelVersion()}  # they take part only where they are named
    for name in "acdefgh":
        b.meet(name, **behind)
    b.hear("e", b.contribution(b.held, shard=2))
    b.contribute(0, 1)
    for _ in range(4):
        probed = {e.to for e in b.feed_tick() if isinstance(e, Send) and isinstance(e.message, Probe)}
        assert {"a", "d"} <= probed
        assert len(probed) == 5
        for name in probed:
            b.meet(name, **behind)


def test_a_wakeup_for_a_round_leaves_the_ticks_as_they_were(peer: Any) -> None:
    """It closes the round and probes no peer."""
    a = peer("a", group="abc", round_timeout=0.3)
    a.feed_tick()
    tick = a.replica.next_wakeup()
    a.hear("b", a.contribution(a.held))
    a.contribute()
    assert a.replica.next_wakeup() == a.now + 0.3
    effects = a.feed_tick()
    assert [type(e) for e in effects] == [Average]
    assert a.replica.next_wakeup() == tick == pytest.approx(a.now + 0.7)


@pytest.mark.parametrize("why", ["empty", "too few", "working", "not mine"])
def test_no_wakeup_is_planned_for_a_round_that_can_not_close(peer: Any, why: str) -> None:
    """A round's deadline counts only if the round would close then."""
    a = peer("a", group="abc", round_timeout=0.3, min_peers=2 if why == "too few" else 1)
    a.feed_tick()
    tick = a.replica.next_wakeup()
    match why:
        case "too few":
            a.contribute()
        case "working":
            a.contribute()
            a.hear("b", a.contribution(a.held))
            a.hear("c", a.contribution(a.held))
        case "not mine":
            a.replica.logs[0].lead.holder = "b"
            a.hear("c", a.contribution(a.held))
    assert a.replica.next_wakeup() == tick


def test_the_first_wakeup_is_at_once_and_one_follows_each_interval(peer: Any) -> None:
    r = Replica("a", peer("a").rules, incarnation=1, now=50.0)
    assert r.next_wakeup() == 50.0
    r.handle(Wakeup(), 50.0)
    assert r.next_wakeup() == 51.0
    r.handle(Received("b", Probe(r.roster.mine)), 50.5)
    assert r.next_wakeup() == 51.0


# -- what a replica tells


def test_aggregates_lists_the_shards_that_this_peer_would_commit(peer: Any) -> None:
    a = peer("a", epoch=None, live="b", fragments=((0,), (1,), (2,)))
    assert a.replica.aggregates() == ()
    plans = (a.plan("ab", "ab"), a.plan("ab", "ba"), a.plan("ab", "ab"))
    a.feed(Restore(tuple(a.state(s, 3, plan=plan) for s, plan in enumerate(plans))))
    assert a.replica.aggregates() == (0, 2)
    a.lose("b")
    assert a.replica.aggregates() == (0, 1, 2)


def test_notes_name_their_peers_and_shards(peer: Any) -> None:
    """Kinds are for counting, texts for people."""
    b = peer("b", live="acd", fragments=TWO, counted=(("c", ContributionId(1, 9)),))
    notes = [*b.hear("c", b.contribution(b.version(1))), *b.lose("a"), *b.meet("a"), *b.hear("d", Leave(1))]
    b.silent.add("c")
    b.contribute()
    notes += b.pass_time(25.0)
    texts = {note.kind: note.text for note in notes if isinstance(note, Note)}
    assert re.fullmatch(r"c sent contribution #\d{4}\.\d+ again after it was counted", texts["refused"])
    assert texts["takeover"] == "shard 1: this peer aggregates from epoch 2; a is gone"
    assert texts["joined"] == "a joined"
    assert texts["left"] == "d left the run"
    assert next(n.text for n in notes if isinstance(n, Note) and n.kind == "died") == "a can't be reached any more"
    assert texts["died"] == "c was silent for 10 s"


def test_notes_name_the_shard_of_a_mismatch_and_the_lineage_that_was_joined(peer: Any) -> None:
    b = peer("b", group="ab")
    message = b.commit(plan=b.plan("ab"))
    b.hear("a", message)
    note = b.feed(Applied(0, message.base, "astray"))[1]
    assert note.text == "shard 0: a commit on epoch 1 led to another digest than it names"
    state = b.state(0, 2)
    b.hear("a", state)
    (note,) = b.feed(Filled(0, state.version, "astray"))
    assert note.text == "shard 0: a fetched state of epoch 2 has a wrong digest"
    theirs = Version(0, 99, 1, "other")
    b.hear("a", Versions((theirs,), forked=True), after=b.rules.fetch_again)  # a donor that failed gets another try
    b.hear("a", b.state(0, 1, version=theirs, history=((1, "other"),)))
    notes = [e for e in b.feed(Filled(0, theirs, "other")) if isinstance(e, Note)]
    assert [n.text for n in notes] == ["joined the lineage of a and dropped this peer's own state of epoch 1"]
