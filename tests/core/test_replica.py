"""The one door into the core: what the trainer, the clock and the life of the run bring about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.events import (
    Accept,
    Applied,
    Average,
    Averaged,
    Carry,
    Changed,
    Closed,
    Contribute,
    Delivered,
    Depart,
    Discovered,
    Filled,
    Finished,
    Found,
    Load,
    Loaded,
    Measured,
    Merge,
    Moving,
    Note,
    Pause,
    Progress,
    Ready,
    Received,
    Release,
    Restore,
    Send,
    SendFailed,
    Wakeup,
)
from p2p_diloco.core.messages import Commit, Counted, Fetch, Leave, Plan, Probe, ProbeAck, Summary, Versions
from p2p_diloco.core.replica import Replica, founding_meta, meta_of
from p2p_diloco.core.version import ContributionId, ModelVersion, Version, incarnation_after, model_version

TWO = ((0,), (1,))


def commit(
    p: Any, shard: int = 0, *, by: str = "a", counted: tuple[Counted, ...] = (), plan: Plan | None = None
) -> list[Any]:
    """The next commit of a shard, by another, is heard and applied. Without a plan it names whom the last one named."""
    log = p.replica.logs[shard]
    version = p.version(log.version.epoch + 1)
    message = Commit(shard, log.version, version, 0, by, counted, plan or log.state.plan)
    p.hear(by, message)
    return p.feed(Applied(shard, message.base, version.digest))


def solo(peer: Any, **more: Any) -> Any:
    """A peer that trains alone."""
    return peer("a", group="a", live="", **more)


def round_alone(a: Any, *shards: int) -> list[Any]:
    """A whole round of a peer that trains alone; the effects of its commit."""
    effects = []
    for average in a.contribute(*shards):
        effects += a.feed(Averaged(average.shard, average.base, f"n{average.base.epoch + 1}", "mean"))
    return effects


# -- life of the run


def test_founding(peer: Any) -> None:
    """The founder holds epoch 0 of every shard, and is alone in the first plan."""
    a = peer("a", epoch=None, live="", fragments=TWO)
    assert not a.replica.has_state
    assert a.feed(Found(3, ("x", "y"))) == [Ready(), Changed()]
    assert a.replica.versions == (Version(3, 0, 0, "x"), Version(3, 0, 0, "y"))
    state = a.replica.state(1)
    assert (state.plan, state.counted, state.history, state.term) == (Plan(("a",), ("a",)), {}, {0: "y"}, 0)
    assert meta_of(state) == founding_meta(3, "a", "worker")


def test_an_aggregator_that_founds_is_not_waited_for() -> None:
    """It has no trainer: the first round belongs to whoever comes."""
    assert founding_meta(0, "a", "worker") == b'[0,0,0,0,["a"],["a"],[]]'
    assert founding_meta(0, "a", "aggregator") == b'[0,0,0,0,[],["a"],[]]'


def test_restoring(peer: Any) -> None:
    """A checkpoint brings every shard back with plan, table and ancestors; training may start at once, and all that
    live or that its plans name are told."""
    table = (("a", ContributionId(3, 4)),)
    a = peer("a", epoch=None, live="b", fragments=TWO)
    states = (a.state(0, 5, counted=table), a.state(1, 4))
    effects = a.feed(Restore(states))
    told = [Send(name, Probe(a.replica.roster.mine)) for name in "bc"]
    assert effects == [*told, Ready(), Changed()]
    assert tuple(map(a.replica.state, (0, 1))) == states
    assert (a.replica.epoch, a.replica.roster.mine.epochs) == (4, (5, 4))


def test_training_starts_on_one_state_of_the_run(peer: Any) -> None:
    """While the shards of a fragment are at unlike epochs, commits are on their way; the one that makes it even brings
    Ready. Fragments may be at unlike epochs."""
    a = peer("a", epoch=None, live="b", fragments=((0, 1), (2,)))
    effects = a.feed(
        Restore(tuple(a.state(shard, epoch, plan=a.plan("ab", "b")) for shard, epoch in enumerate((5, 4, 4))))
    )
    assert Ready() not in effects
    assert Ready() not in commit(a, 2, by="b")
    assert Ready() in commit(a, 1, by="b")
    assert Ready() not in commit(a, 0, by="b")  # it was said


def test_training_starts_in_the_end_whatever_is_missing(peer: Any) -> None:
    """Who could bring what lies between this state and a commit that is kept may be gone. Until training starts this
    peer is not idle: it has no trainer that could be stuck."""
    a = peer("a", epoch=None, live="", fragments=((0, 1),))
    a.hear("b", Commit(0, a.version(7), a.version(8), 0, "b", (), a.plan("ab")))
    assert Ready() not in a.feed(Restore((a.state(0, 5), a.state(1, 5))))
    assert Ready() not in a.pass_time(a.rules.fetch_again - 1.5)
    assert not a.replica.roster.mine.idle
    assert Ready() in a.pass_time(2.0)
    a.pass_time(8.0)
    assert not a.replica.roster.mine.idle  # its time begins with Ready
    a.pass_time(4.0)
    assert a.replica.roster.mine.idle


def test_training_starts_soon_on_an_uneven_state_that_nothing_follows(peer: Any) -> None:
    """The run may stand where this peer stands: the shard that is behind waits for its contribution, and no commit
    comes before. So a state that is uneven is waited for as long as a Merge waits for it, and no longer."""
    a = peer("a", epoch=None, live="b", fragments=((0, 1),))
    assert Ready() not in a.feed(Restore((a.state(0, 5), a.state(1, 4))))
    assert Ready() in a.pass_time(a.rules.settle + 1.0)


def test_an_asynchronous_peer_starts_once_it_holds_all(peer: Any) -> None:
    """Its shards need not be at one epoch."""
    a = peer("a", epoch=None, live="b", fragments=((0, 1),), mode="async")
    assert Ready() in a.feed(Restore((a.state(0, 5), a.state(1, 4))))


def told(effects: list[Any]) -> list[str]:
    """Who is sent a probe."""
    return [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Probe)]


def test_who_adopts_an_epoch_that_does_not_count_it_tells_all(peer: Any, life: int) -> None:
    """That it is there: by their next commit they may name it. Who is counted has nothing to tell."""
    b = peer("b", group="abc", live="a")
    assert told(commit(b)) == ["a", "c"]
    mine = Counted("b", ContributionId(life, 1), 2.0, 5)
    assert told(commit(b, counted=(mine,))) == []
    assert told(commit(b, counted=(replace(mine, peer="a"),))) == ["a", "c"]


def test_it_tells_them_once_all_shards_of_the_fragment_are_there(peer: Any, life: int) -> None:
    """What it says is the lowest epoch; one that counts it does not make up for another that does not."""
    b = peer("b", group="ab", fragments=((0, 1), (2,)))
    mine = (Counted("b", ContributionId(life, 1), 2.0, 5),)
    assert told(commit(b, 0)) == []
    assert told(commit(b, 1, counted=mine)) == ["a"]
    assert told(commit(b, 2, counted=mine)) == []


@pytest.mark.parametrize("why", ["idle", "aggregator", "asynchronous"])
def test_who_has_nothing_to_be_counted_for_tells_nobody(peer: Any, why: str) -> None:
    """It would only cost probes."""
    match why:
        case "idle":
            b = peer("b", group="ab", pause_timeout=0.0)
            b.feed(Pause(True))
        case "aggregator":
            b = peer("b", group="ab", role="aggregator")
        case _:
            b = peer("b", group="ac", live="ac", mode="async")
    assert told(commit(b)) == []


def test_ending_by_epochs(peer: Any) -> None:
    """The commit that reaches the last epoch of every shard ends the run, once; nothing is due any more."""
    a = solo(peer, fragments=TWO, stop_after_epochs=2)
    assert Finished() not in round_alone(a, 0)
    assert (a.replica.finished, a.feed(Merge())[0].due) == (False, (1,))
    effects = round_alone(a, 1)
    assert effects == [Accept(((1, "n2"),)), Changed(), Finished(), Release(sent=True)]
    assert a.replica.finished
    assert a.feed(Merge())[0].due == ()


def test_ending_by_samples(peer: Any) -> None:
    """So does the commit that reaches the samples asked for; one sample less doesn't."""
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


def test_nobody_takes_over_a_run_that_ended(peer: Any) -> None:
    b = peer("b", stop_after_epochs=1)
    assert [type(e) for e in b.lose("a")] == [Note]


def test_leaving(peer: Any) -> None:
    """Whoever leaves says so to all that are live."""
    a = peer("a", group="abc")
    a.lose("b")
    a.meet("d")
    goodbye = Leave(a.replica.own.incarnation)
    assert a.feed(Depart()) == [Send("c", goodbye), Send("d", goodbye)]


def test_who_leaves_is_not_waited_for(peer: Any) -> None:
    """And its successor takes over at once."""
    b = peer("b", group="ab")
    b.contribute()
    notes = b.hear("a", Leave(1))
    assert [e.kind for e in notes if isinstance(e, Note)] == ["left", "takeover"]
    assert isinstance(notes[-1], Average)


# -- the trainer


def test_a_merge_loads_what_has_changed_since_the_last(peer: Any) -> None:
    """Every shard once per version, and what is due next."""
    b = peer("b", group="ab", fragments=TWO)
    one, two = Loaded(0, b.version(1), Carry.KEEP), Loaded(1, b.version(1), Carry.KEEP)
    assert b.feed(Merge()) == [Load((one, two), due=(0,))]
    assert b.feed(Merge()) == [Load((), due=(0,))]
    commit(b, 0)
    assert b.feed(Merge()) == [Load((Loaded(0, b.version(2), Carry.KEEP),), due=(1,))]


def test_nothing_to_load_before_all_shards_are_held(peer: Any) -> None:
    b = peer("b", epoch=None, live="")
    assert b.feed(Merge()) == [Load((), ())]


def test_a_counted_contribution_is_subtracted(peer: Any, life: int) -> None:
    """The commit counts what was sent, so the trainer takes it out of its progress."""
    b = peer("b", group="ab")
    b.contribute()
    mine = Counted("b", ContributionId(life, 1), 2.0, 5)
    assert commit(b, counted=(mine,))[-1] == Release(sent=True)
    assert b.feed(Merge()) == [Load((Loaded(0, b.version(2), Carry.SUBTRACT),), due=(0,))]


def test_an_uncounted_contribution_rides_in_the_next_one(peer: Any, life: int) -> None:
    """A commit without mine: the progress is kept, and the next contribution names the oldest within it."""
    b = peer("b", group="ab", carry_rounds=1)
    b.contribute()
    commit(b)
    assert b.feed(Merge())[0].shards == (Loaded(0, b.version(2), Carry.KEEP),)
    send = b.contribute()[-1]
    assert (send.message.id, send.message.oldest) == (ContributionId(life, 2), ContributionId(life, 1))
    commit(b)
    assert b.feed(Merge())[0].shards == (Loaded(0, b.version(3), Carry.DROP),)


@pytest.mark.parametrize("group", ["a", "ab"])
def test_progress_that_was_not_counted_is_carried_by_its_age(peer: Any, group: str) -> None:
    """As many epochs as carry_rounds beyond the first miss, then it is dropped: whether the rounds were to wait for it
    or not, so that nobody's parameters drift away from the others' without a bound."""
    b = peer("b", group=group, live="a", carry_rounds=2)
    carries = []
    for _ in range(6):
        b.contribute()
        commit(b, plan=b.plan(group))
        carries.append(b.feed(Merge())[0].shards[0].carry)
    assert carries == [Carry.KEEP, Carry.KEEP, Carry.DROP] * 2


def test_many_epochs_in_one_go_are_one_miss(peer: Any) -> None:
    """Cut off for longer than carry_rounds, a peer has sent its progress once: it rides in its next contribution."""
    b = peer("b", group="ab", carry_rounds=2)
    b.contribute()
    for _ in range(9):
        commit(b)
    assert b.feed(Merge())[0].shards == (Loaded(0, b.version(10), Carry.KEEP),)


def test_due_is_what_the_log_says(peer: Any) -> None:
    """The lowest epoch, then the lowest index; of its shards those at that epoch; nothing that has ended."""

    def due(epochs: tuple[int, ...], **rules: Any) -> Any:
        a = peer("a", epoch=None, live="", fragments=((0, 1), (2, 3)), **rules)
        a.feed(Restore(tuple(a.state(s, e) for s, e in enumerate(epochs))))
        (load,) = (e for e in [*a.feed(Merge()), *a.pass_time(a.rules.settle + 1.0)] if isinstance(e, Load))
        return load.due

    assert due((4, 4, 4, 4)) == (0, 1)
    assert due((5, 5, 4, 4)) == (2, 3)
    assert due((5, 4, 4, 4)) == (1,)
    assert due((5, 5, 5, 4)) == (3,)
    assert due((5, 5, 5, 4), stop_after_epochs=5) == (3,)
    assert due((5, 4, 5, 5), stop_after_epochs=5) == (1,)


def loads(effects: list[Any]) -> list[tuple[int, ...]]:
    """What is due by each answer to a Merge."""
    return [e.due for e in effects if isinstance(e, Load)]


def test_a_merge_is_answered_when_the_shards_of_each_fragment_are_at_one_epoch(peer: Any) -> None:
    """What is merged is one state of the run: the commit that makes it even brings the answer, to all of the shards."""
    b = peer("b", group="ac", fragments=((0, 1), (2,)))
    commit(b, 0)
    assert loads(b.feed(Merge())) == []
    assert loads(commit(b, 2)) == []
    assert loads(commit(b, 1)) == [(0, 1)]
    assert loads(b.pass_time(10.0)) == []  # it was answered


def test_a_merge_waits_no_longer_than_settle_for_that(peer: Any) -> None:
    """The commits that are missing may never come: then the shards that are behind are due."""
    b = peer("b", group="ac", fragments=((0, 1),))
    commit(b, 0)
    b.feed_tick()
    assert loads(b.feed(Merge())) == []
    b.feed(Progress(0.5))
    assert loads(b.pass_time(b.rules.settle - 0.5)) == []
    assert loads(b.pass_time(1.0)) == [(1,)]


def test_a_merge_does_not_wait_where_a_shard_that_is_behind_waits_for_this_trainer(peer: Any) -> None:
    """It is due at once: to wait for its commit would be to wait for oneself. What was sent to it already is no reason:
    then the commit comes."""
    b = peer("b", group="ab", fragments=((0, 1),))
    commit(b, 0)
    assert loads(b.feed(Merge())) == [(1,)]
    c = peer("b", group="ab", fragments=((0, 1),))
    c.contribute(0, 1)
    assert not c.replica.logs[1].awaits_me


def test_who_aggregates_only_is_not_waited_for(peer: Any) -> None:
    """It trained in an earlier life, so that the plan names it."""
    a = peer("a", group="ab", min_peers=1)
    a.meet("b", role="aggregator", incarnation=2)
    assert a.replica.logs[0].waited_for() == ["a"]


def test_fragments_may_be_at_unlike_epochs(peer: Any) -> None:
    """They take turns, so a Merge waits for none of them."""
    b = peer("b", group="ab", fragments=TWO)
    commit(b, 0)
    assert loads(b.feed(Merge())) == [(1,)]


def test_asynchronous_peers_merge_at_once(peer: Any) -> None:
    """There epochs say nothing of what belongs together."""
    b = peer("b", group="ab", fragments=((0, 1),), mode="async", succession="ac")
    commit(b, 0)
    assert len(loads(b.feed(Merge()))) == 1


def test_who_waits_for_the_answer_to_a_merge_is_not_idle(peer: Any) -> None:
    """Its trainer stands still because of others."""
    b = peer("b", group="ac", fragments=((0, 1),), heartbeat_interval=9.0, heartbeat_timeout=9.5)
    b.feed(Progress(0.5))
    commit(b, 0)
    b.feed(Merge())
    b.now += 9.6
    b.feed(Measured(1.0))
    assert not b.replica.roster.mine.idle


def test_nothing_is_merged_during_an_exchange(peer: Any) -> None:
    """Until the round is over the trainer's base stays; then everything that came meanwhile is loaded."""
    b = peer("b", group="ab", fragments=TWO)
    b.contribute(0)
    assert Release(sent=True) not in commit(b, 1)
    assert b.feed(Merge()) == [Load((), ())]
    assert commit(b, 0)[-1] == Release(sent=True)
    assert [loaded.shard for loaded in b.feed(Merge())[0].shards] == [0, 1]


def test_the_exchange_is_over_when_all_its_shards_have_moved(peer: Any) -> None:
    """One of two shards is not enough."""
    b = peer("b", group="ab", fragments=((0, 1),))
    b.contribute(0, 1)
    assert Release(sent=True) not in commit(b, 0)
    assert commit(b, 1)[-1] == Release(sent=True)


def test_a_base_that_changed_while_the_pseudo_gradient_was_made(peer: Any, life: int) -> None:
    """Nothing is sent, the trainer is told to merge and try again; the progress rides in the next contribution."""
    b = peer("b", group="ab")
    b.feed(Merge())
    commit(b)
    assert b.feed(Contribute((0,), 2.0, 5, ("Δ",))) == [Release(sent=False)]
    assert b.feed(Merge())[0].shards == (Loaded(0, b.version(2), Carry.KEEP),)
    (send,) = b.contribute()
    assert (send.message.id, send.message.oldest) == (ContributionId(life, 2), ContributionId(life, 1))


def test_a_base_that_changed_for_some_shards_only(peer: Any) -> None:
    """The others are exchanged."""
    b = peer("b", group="ab", fragments=((0, 1),))
    b.feed(Merge())
    commit(b, 0)
    effects = b.feed(Contribute((0, 1), 2.0, 5, ("Δ0", "Δ1")))
    assert [(e.to, e.message.shard, e.message.payload) for e in effects] == [("a", 1, "Δ1")]
    assert commit(b, 1)[-1] == Release(sent=True)


def test_every_contribution_has_a_number_of_its_own(peer: Any, life: int) -> None:
    """All shards of one sending share it; the next sending has the next."""
    b = peer("b", group="ab", fragments=((0, 1), (2,)))
    first = [e.message.id.sequence for e in b.contribute(0, 1)]
    commit(b, 0)
    commit(b, 1)
    second = [e.message.id.sequence for e in b.contribute(2)]
    assert (first, second) == ([1, 1], [2])


def test_a_life_below_an_earlier_one_rises_above_it(peer: Any, life: int) -> None:
    """With a clock that went back a restarted peer would be mute: its contributions would look like old ones."""
    earlier = ContributionId(life + (7 << 20), 12)
    b = peer("b", group="ab", counted=(("b", earlier),))
    risen = incarnation_after(earlier.incarnation, life)
    (send,) = b.contribute()
    assert send.message.id == ContributionId(risen, 1) > earlier
    assert b.replica.roster.mine.incarnation == risen


def test_a_life_above_an_earlier_one_stays(peer: Any, life: int) -> None:
    b = peer("b", group="ab", counted=(("b", ContributionId(life - 1, 99)),))
    (send,) = b.contribute()
    assert send.message.id == ContributionId(life, 1)


def test_what_is_counted_of_this_very_life_raises_nothing(peer: Any, life: int) -> None:
    b = peer("b", group="ab")
    b.contribute()
    commit(b, counted=(Counted("b", ContributionId(life, 1), 2.0, 5),))
    assert (b.replica.own.incarnation, b.replica.own.sequence) == (life, 1)


# -- idleness


def idle(p: Any) -> bool:
    p.feed(Wakeup())
    return p.replica.roster.mine.idle


def test_a_trainer_without_steps_is_idle(peer: Any) -> None:
    """After the heartbeat timeout, or after three of its usual steps if these are longer."""
    a = solo(peer)
    a.feed(Progress(0.5))
    a.now += 10.0
    assert not idle(a)
    a.now += 0.1
    assert idle(a)
    a.feed(Progress(5.0))
    assert not idle(a)
    a.now += 15.0
    assert not idle(a)
    a.now += 0.1
    assert idle(a)


def test_a_pause_is_waited_for_until_it_is_too_long(peer: Any) -> None:
    """Who pauses comes back, and is not idle for ``pause_timeout``; back at once, and its clock starts anew."""
    a = solo(peer, pause_timeout=30.0)
    a.feed(Pause(True))
    a.now += 29.9
    assert not idle(a)
    a.now += 0.1
    assert idle(a)
    a.now += 60.0
    a.feed(Pause(False))
    assert not a.replica.roster.mine.idle
    a.now += 10.0
    assert not idle(a)
    a.now += 0.1
    assert idle(a)


def test_a_pause_in_asynchronous_mode_is_idling_at_once(peer: Any) -> None:
    """There nobody waits for anybody, and what it says is only who trains."""
    a = solo(peer, mode="async")
    a.feed(Pause(True))
    assert a.replica.roster.mine.idle


def test_all_are_told_at_once_of_idleness_and_of_its_end(peer: Any) -> None:
    """Rounds hang on it: everybody who lives, and whom a plan names, hears it by a probe; who is dead doesn't, and
    what hasn't changed isn't said."""

    def told(effects: list[Any]) -> list[tuple[str, bool]]:
        return [(e.to, e.message.summary.idle) for e in effects if isinstance(e, Send) and isinstance(e.message, Probe)]

    a = peer("a", group="abcd", live="bc", pause_timeout=0.5)
    a.meet("e")
    a.lose("c")
    assert told(a.feed(Pause(True))) == []
    assert told(a.feed(Measured(1.0), after=0.6)) == [("b", True), ("d", True), ("e", True)]
    assert told(a.feed(Measured(1.0), after=0.1)) == []
    assert told(a.feed(Pause(False))) == [("b", False), ("d", False), ("e", False)]


def test_whoever_waits_for_an_exchange_is_not_idle(peer: Any) -> None:
    """Its trainer stands still because of others; afterwards it has its time again."""
    b = peer("b", group="ab")
    b.contribute()
    b.now += 60.0
    assert not idle(b)
    commit(b)
    b.now += 9.0
    assert not idle(b)
    b.now += 2.0
    assert idle(b)


def test_an_aggregator_is_never_idle(peer: Any) -> None:
    """It has no trainer that could be stuck."""
    a = peer("a", group="b", live="", role="aggregator")
    a.now += 1000.0
    assert not idle(a)


def test_training_has_its_time_from_the_moment_all_is_held(peer: Any) -> None:
    a = peer("a", epoch=None, live="")
    a.now += 1000.0
    a.feed(Found(0, ("x",)))
    a.now += 9.0
    assert not idle(a)


def test_others_learn_of_idleness_and_of_progress(peer: Any) -> None:
    """Every probe says it: what is held, and whether this peer is waited for."""
    a = peer("a", group="ab", fragments=TWO)
    summary = Summary(a.replica.own.incarnation, "worker", True, model_version([a.version(1)] * 2), (1, 1), idle=False)
    assert a.hear("b", Probe(a.about()))[0] == Send("b", ProbeAck(summary))
    a.feed(Measured(1.0), after=10.1)
    assert a.hear("b", Probe(a.about()))[0].message.summary.idle


# -- membership


def test_who_is_discovered_is_probed_once(peer: Any) -> None:
    """Hearsay: it becomes a member when it answers."""
    a = solo(peer)
    assert a.feed(Discovered("x")) == [Send("x", Probe(a.replica.roster.mine))]
    assert a.feed(Discovered("x")) == []
    assert a.feed(Discovered("a")) == []
    assert a.replica.roster.alive() == []


def test_who_answers_has_joined(peer: Any) -> None:
    """Once; and again when it comes back from the dead."""
    a = peer("a", group="ab", live="")
    assert [e.kind for e in a.meet("b")] == ["joined"]
    assert a.meet("b") == []
    a.lose("b")
    assert [e.kind for e in a.meet("b")] == ["joined"]


def test_a_message_of_a_stranger_is_heard_and_its_sender_probed(peer: Any) -> None:
    """It is part of the run before anything was known of it; a second message needs no probe."""
    a = solo(peer)
    effects = a.hear("x", a.contribution(a.held))
    assert effects[0] == Send("x", Probe(a.replica.roster.mine))
    a.hear("x", ProbeAck(a.about()))
    assert a.hear("x", a.contribution(a.held, 2)) == []


def test_a_transfer_that_goes_on_is_a_sign_of_life(peer: Any) -> None:
    """Answers to probes may wait behind it for longer than the heartbeat timeout; it ends with the transfer."""
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


def test_a_peer_that_left_before_it_was_met_comes_back(peer: Any) -> None:
    """It is there at once, and is handed again what its earlier life was handed."""
    b = peer("b", group="ab", live="", eligible=False)
    (send,) = [e for e in b.contribute() if isinstance(e, Send)]
    b.feed(Delivered("a", send.message))
    b.hear("a", Leave(1))
    assert not b.replica.roster.may_aggregate("a")
    assert b.meet("a", incarnation=2) == [Note("joined", "a is there"), send]


def test_a_peer_that_left_and_comes_back_has_joined(peer: Any) -> None:
    b = peer("b", group="ab")
    b.hear("a", Leave(1))
    assert not b.meet("a")
    assert b.meet("a", incarnation=2)[0] == Note("joined", "a is there")


def test_a_broken_link_is_probed_at_once(peer: Any) -> None:
    """It is no verdict by itself; with a refused dial it is one. The link of a stranger means nothing."""
    a = peer("a", group="ab")
    assert a.feed(Closed("b")) == [Send("b", Probe(a.replica.roster.mine))]
    assert a.replica.roster.live("b")
    assert [e.kind for e in a.refuse("b")] == ["died"]
    assert a.feed(Closed("b")) == []
    assert a.feed(Closed("nobody")) == []


def test_a_refused_dial_is_probed_again_then_a_verdict(peer: Any) -> None:
    a = peer("a", group="ab")
    assert a.refuse("b") == [Send("b", Probe(a.replica.roster.mine))]
    assert [e.kind for e in a.refuse("b")] == ["died"]
    assert a.refuse("b") == []


def test_a_passed_deadline_is_no_refusal(peer: Any) -> None:
    """A message that wasn't answered in time says nothing about the peer's life: silence has its own clock."""
    a = peer("a", group="ab")
    for _ in range(5):
        assert a.feed(SendFailed("b", Probe(a.replica.roster.mine), gone=False)) == []
    assert a.replica.roster.live("b")


def test_silence_is_death_after_the_timeout(peer: Any) -> None:
    """A frozen process closes no link; whoever is waited for is found out within the heartbeat timeout."""
    b = peer("b", group="ab")
    b.contribute()
    b.silent.add("a")
    assert b.pass_time(10.5) == []
    assert [e.kind for e in b.pass_time(1.0) if isinstance(e, Note)] == ["died", "takeover"]


def test_a_receipt_changes_nothing_but_for_contributions(peer: Any) -> None:
    a = peer("a", group="ab")
    assert a.feed(Delivered("b", Probe(a.replica.roster.mine))) == []


def test_this_process_stood_still(peer: Any) -> None:
    """A wakeup that comes late proves a freeze of one's own: nobody dies by it. In time, the same silence is death."""
    for late, dies in ((8.0, False), (1.5, True)):
        a = peer("a", group="ab")
        a.contribute()
        a.silent.add("b")
        a.pass_time(9.5)
        a.now = a.replica.next_wakeup() + late
        notes = [e.kind for e in a.feed(Wakeup()) if isinstance(e, Note)]
        assert notes == (["died"] if dies else [])


def test_probes_of_a_large_swarm(peer: Any) -> None:
    """A tick costs three probes, whether there are 10 peers or 100, beside those that one waits for."""
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


def test_the_aggregator_watches_whom_it_waits_for(peer: Any) -> None:
    """From the first contribution on, at every tick, those whose contribution is missing."""
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


def test_the_contributor_watches_the_aggregator(peer: Any) -> None:
    """While its contribution is under way; not before it has anything to lose."""
    h = peer("h", group="abcdefgh")
    before = [{e.to for e in h.feed_tick() if isinstance(e, Send)} for _ in range(4)]
    assert not all("a" in names for names in before)
    h.contribute()
    for _ in range(4):
        assert "a" in {e.to for e in h.feed_tick() if isinstance(e, Send) and isinstance(e.message, Probe)}


def test_ticks_keep_their_interval(peer: Any) -> None:
    """A wakeup before the tick is for rounds that end; it probes nobody."""
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
def test_no_wakeup_for_a_round_that_can_not_end(peer: Any, why: str) -> None:
    """The deadline of a round counts only while passing it would close the round."""
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


def test_a_peer_that_begins_to_make_progress_again_is_waited_for_again(peer: Any) -> None:
    """Idleness is a state, no verdict: as long as the round is open, it may come back."""
    a = peer("a", group="abc", min_peers=2)
    a.contribute()
    a.meet("b", idle=True)
    a.meet("b", idle=False)
    assert a.hear("c", a.contribution(a.held)) == []


# -- what it tells


def test_what_it_waits_for(peer: Any) -> None:
    """One sentence for people: with whom the exchange stands."""
    n = peer("n", epoch=None, live="", fragments=TWO)
    assert n.replica.waiting() == "waiting for a peer that holds the state of the run"
    n.meet("b", model=model_version([n.version(7)] * 2), epochs=(7, 7))
    assert n.replica.waiting() == "fetching the state of the run from b: 0 of 2 shards"
    a = peer("a", group="abc")
    assert a.replica.waiting() == ""
    a.contribute()
    assert a.replica.waiting() == "waiting for the contributions of b, c"
    b = peer("b", group="abcd", fragments=((0, 1),))
    b.contribute(0, 1)
    assert b.replica.waiting() == "waiting for the commit of 2 shards, the next from a"
    commit(b, 0)
    assert b.replica.waiting() == "waiting for the commit of 1 shards, the next from a"
    b.lose("a")
    assert b.replica.waiting() == "taking over shard 1, waiting for c, d"


def test_what_it_waits_for_when_peers_are_missing(peer: Any) -> None:
    """The key of the setting is named, so that one knows what to change."""
    a = solo(peer, min_peers=3, start_peers=4)
    a.contribute()
    assert a.replica.waiting() == "waiting for peers: 1 of 3 (min_peers) have contributed"
    f = peer("a", epoch=None, live="", min_peers=2, start_peers=4)
    f.feed(Found(0, ("x",)))
    f.contribute()
    assert f.replica.waiting() == "waiting for peers: 1 of 4 (start_peers) have contributed"
    done = solo(peer)
    round_alone(done)
    assert done.replica.waiting() == ""


def test_the_round_it_aggregates(peer: Any) -> None:
    """(fragment, contributions that came, contributions expected); None when it aggregates none."""
    a = peer("a", epoch=4, group="abc", fragments=TWO)
    assert a.replica.round() is None
    a.hear("b", a.contribution(a.version(4), shard=1))
    assert a.replica.round() == (1, 1, 3)
    few = solo(peer, min_peers=5)
    few.contribute()
    assert few.replica.round() == (0, 1, 5)
    b = peer("b")
    b.hear("c", b.contribution(b.held))
    assert b.replica.round() is None


def test_the_shards_it_would_aggregate(peer: Any) -> None:
    a = peer("a", epoch=None, live="b", fragments=((0,), (1,), (2,)))
    assert a.replica.aggregates() == ()
    plans = (a.plan("ab", "ab"), a.plan("ab", "ba"), a.plan("ab", "ab"))
    a.feed(Restore(tuple(a.state(s, 3, plan=plan) for s, plan in enumerate(plans))))
    assert a.replica.aggregates() == (0, 2)
    a.lose("b")
    assert a.replica.aggregates() == (0, 1, 2)


def test_blank_replica(peer: Any) -> None:
    """What it says of itself before it holds anything."""
    n = peer("n", epoch=None, live="", fragments=TWO, eligible=False)
    mine = n.replica.roster.mine
    assert (mine.model, mine.epochs, mine.eligible, mine.role) == (ModelVersion(), (), False, "worker")
    assert (n.replica.versions, n.replica.epoch, n.replica.finished) == ((None, None), 0, False)


def test_shards_belong_to_their_fragments(peer: Any) -> None:
    """A plan waits for who is up to date in the fragment concerned."""
    a = peer("a", fragments=((0, 2), (1,)))
    assert [log.fragment for log in a.replica.logs] == [0, 1, 0]
    assert [log.shard for log in a.replica.logs] == [0, 1, 2]


def test_same_state_same_event_same_effects(peer: Any) -> None:
    """Nothing but the events plays a part: two replicas fed alike answer alike, event by event."""

    def story() -> list[Any]:
        b = peer("b", live="acd", fragments=((0, 1), (2,)))
        told = [b.contribute(0, 1), b.lose("a"), b.hear("c", b.contribution(b.held)), b.pass_time(7.0)]
        return [*told, b.meet("a", incarnation=3), b.hear("d", Fetch(b.replica.versions)), b.feed(Depart())]

    assert story() == story()


def test_the_replica_says_when_it_wants_to_be_woken(peer: Any) -> None:
    """At once after its beginning, then every interval."""
    r = Replica("a", peer("a").rules, incarnation=1, now=50.0)
    assert r.next_wakeup() == 50.0
    r.handle(Wakeup(), 50.0)
    assert r.next_wakeup() == 51.0
    r.handle(Received("b", Probe(r.roster.mine)), 50.5)
    assert r.next_wakeup() == 51.0


def test_meta_of_a_state_covers_term_plan_and_table(peer: Any) -> None:
    state = peer.state(0, 3, plan=peer.plan("ab", "b"), counted=(("x", ContributionId(1, 2)),), term=4)
    assert meta_of(state) == b'[0,30,3,4,["a","b"],["b"],[["x",1,2]]]'


def test_what_it_waits_for_while_the_mean_is_computed(peer: Any) -> None:
    """All have contributed: it is only the commit that is missing; another's shard doesn't hide one's own."""
    a = solo(peer)
    a.contribute()
    assert a.replica.waiting() == "waiting for the commit of 1 shards, the next from a"
    b = peer("b", group="ab", fragments=((0, 1),))
    b.replica.logs[1].lead.holder = "b"
    b.contribute(0, 1)
    assert b.replica.waiting() == "waiting for the contributions of a"


def test_who_probes_has_joined(peer: Any) -> None:
    """A probe introduces its sender as well as an answer does."""
    a = solo(peer)
    answer, note = a.hear("x", Probe(a.about()))
    assert (answer, note.kind) == (Send("x", ProbeAck(a.replica.roster.mine)), "joined")


def test_a_strangers_message_starts_the_clock_of_its_silence(peer: Any) -> None:
    """The probe that answers it is one like any other."""
    a = solo(peer)
    a.hear("x", a.contribution(a.held))
    assert a.replica.roster.members["x"].unanswered == a.now
    a.feed_tick()


def test_a_fragment_that_has_ended_by_samples_is_passed_over(peer: Any) -> None:
    """Though its epoch is the lowest."""
    a = peer("a", epoch=None, live="", fragments=TWO, stop_after_samples=100)
    a.feed(Restore((a.state(0, 3, version=a.version(3, samples=100)), a.state(1, 4))))
    assert a.feed(Merge())[0].due == (1,)


def test_shards_and_payloads_go_in_pairs(peer: Any) -> None:
    """A payload too few, or a digest too many, is a broken promise of the caller."""
    a = solo(peer, fragments=((0, 1),))
    a.feed(Merge())
    with pytest.raises(ValueError, match="zip"):
        a.feed(Contribute((0, 1), 1.0, 1, ("Δ",)))
    with pytest.raises(ValueError, match="zip"):
        peer("a", epoch=None, live="").feed(Found(0, ("x", "y")))


def test_notes_are_sentences_that_name_whom_they_are_about(peer: Any) -> None:
    """Kinds are for counting, texts for people."""
    b = peer("b", live="acd", fragments=TWO, counted=(("c", ContributionId(1, 9)),))
    notes = [*b.hear("c", b.contribution(b.version(1))), *b.lose("a"), *b.meet("a"), *b.hear("d", Leave(1))]
    b.silent.add("c")
    b.contribute()
    notes += b.pass_time(25.0)
    texts = {note.kind: note.text for note in notes if isinstance(note, Note)}
    assert texts["refused"].startswith("c sent contribution ")
    assert texts["takeover"] == "shard 1: this peer aggregates from epoch 2; a is gone"
    assert texts["joined"] == "a is there"
    assert texts["left"] == "d left the run"
    assert next(n.text for n in notes if isinstance(n, Note) and n.kind == "died") == "a can't be reached any more"
    assert texts["died"] == "c is silent for 10 s"


def test_notes_of_what_does_not_fit(peer: Any) -> None:
    """A mismatch names the shard and the epoch, a fork whose lineage was joined."""
    b = peer("b", group="ab")
    message = Commit(0, b.held, b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    b.hear("a", message)
    note = b.feed(Applied(0, message.base, "astray"))[0]
    assert note.text == "shard 0: a commit on epoch 1 led to another digest than it names"
    state = b.state(0, 2)
    b.hear("a", state)
    (note,) = b.feed(Filled(0, state.version, "astray"))
    assert note.text == "shard 0: a fetched state of epoch 2 has another digest"
    theirs = Version(0, 99, 1, "other")
    b.hear("a", Versions((theirs,), forked=True))
    b.hear("a", b.state(0, 1, version=theirs, history=((1, "other"),)))
    notes = [e for e in b.feed(Filled(0, theirs, "other")) if isinstance(e, Note)]
    assert [n.text for n in notes] == ["joined the lineage of a; left behind a state of 1 epochs"]


def test_each_shard_adds_to_those_watched(peer: Any) -> None:
    """The aggregator of one's own contribution, and whoever is missing where one aggregates; nobody else's group."""
    b = peer("b", epoch=None, group="", live="acdefgh", fragments=((0,), (1,), (2,)))
    plans = (b.plan("bc", "ac"), b.plan("bd", "b"), b.plan("efgh", "e"))
    b.feed(Restore(tuple(b.state(s, 1, plan=plan) for s, plan in enumerate(plans))))
    behind = {"epochs": (0, 0, 0), "model": ModelVersion()}  # they take part where they are named, and nowhere else
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


def test_those_who_die_together_are_noticed_together(peer: Any) -> None:
    """Each by a note of its own, and the contribution goes to the successor that is left."""
    d = peer("d", group="abcd")
    d.contribute()
    d.silent |= {"a", "b"}
    effects = d.pass_time(14.0)
    assert [e.text[0] for e in effects if isinstance(e, Note) and e.kind == "died"] == ["a", "b"]
    assert Send("c", d.replica.logs[0].own.mine) in effects


def test_after_standing_still_the_clock_of_silence_starts_again(peer: Any) -> None:
    """Who doesn't answer after that either is dead after the timeout."""
    a = peer("a", group="ab")
    a.contribute()
    a.silent.add("b")
    a.pass_time(9.5)
    a.now = a.replica.next_wakeup() + 8.0
    a.feed(Wakeup())
    assert [e.kind for e in a.pass_time(9.0) if isinstance(e, Note)] == []
    assert [e.kind for e in a.pass_time(3.0) if isinstance(e, Note)] == ["died"]


def test_a_silent_donor_that_dies_is_let_go(peer: Any) -> None:
    """Its fetch ends with it."""
    n = peer("n", epoch=None, live="", heartbeat_timeout=4.0)
    n.meet("a", model=model_version([n.version(7)]), epochs=(7,))
    n.silent.add("a")
    n.hear("a", Versions((n.version(7),), forked=False))
    n.pass_time(3.0)
    assert n.replica.catchup.donors() == ["a"]
    n.pass_time(7.0)
    assert n.replica.catchup.donors() == []


def test_a_plain_peer(peer: Any) -> None:
    """Unless told otherwise a replica works, can be reached, and is not idle from its first word on."""
    r = Replica("a", peer("a").rules, incarnation=77, now=50.0)
    assert r.roster.mine == Summary(77, "worker", True, ModelVersion(), (), idle=False)


def test_what_it_waits_for_when_nobody_can_be_reached(peer: Any) -> None:
    """It names those whom the plan would let aggregate."""
    b = peer("b", group="abd", live="a", eligible=False)
    b.contribute()
    b.lose("a")
    b.meet("d", eligible=False)
    assert b.replica.waiting() == "waiting for a peer that may aggregate and can be reached; of a, b, d none can"


def test_hearsay_that_never_answers(peer: Any) -> None:
    """A name that the DHT keeps and nobody bears is dead after the timeout, and the note says that it never spoke."""
    a = solo(peer)
    a.feed(Discovered("x"))
    assert [e.text for e in a.pass_time(11.0) if isinstance(e, Note)] == ["x never answered"]


def test_who_has_left_does_nothing_more(peer: Any) -> None:
    """Nothing is sent after the farewell: it would look like a return."""
    a = peer("a", group="ab")
    a.feed(Depart())
    assert a.feed(Wakeup(), after=10.0) == []
    assert a.hear("b", a.contribution(a.held)) == []


def test_who_has_left_is_not_woken_over_and_over(peer: Any) -> None:
    """A node that keeps to next_wakeup() would spin until it ends."""
    a = peer("a", group="ab")
    a.feed(Depart())
    assert a.replica.next_wakeup() == float("inf")
