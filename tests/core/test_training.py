"""What the trainer does, as its replica knows it: when it starts, when it merges, when it is idle."""

from __future__ import annotations

from typing import Any

from p2p_diloco.core.events import Applied, Apply, Found, Load, Measured, Merge, Pause, Ready, Restore, Stepped, Wakeup
from p2p_diloco.core.messages import Commit
from tests.core.conftest import TWO, moves_on, solo


def loads(effects: list[Any]) -> list[tuple[int, ...]]:
    """The due shards of each answer to a Merge."""
    return [e.due for e in effects if isinstance(e, Load)]


def idle(p: Any) -> bool:
    p.feed(Wakeup())
    return p.replica.roster.mine.idle


def becomes_idle_after(p: Any, seconds: float) -> bool:
    """Whether the peer becomes idle once so much time has passed, and not before."""
    p.now += seconds
    before = idle(p)
    p.now += 0.1
    return not before and idle(p)


# -- the start


def test_training_starts_when_the_shards_of_each_fragment_are_at_one_epoch(peer: Any) -> None:
    """The commit that makes them even brings Ready, once. Fragments may be at different epochs."""
    a = peer("a", epoch=None, live="b", fragments=((0, 1), (2,)))
    effects = a.feed(
        Restore(tuple(a.state(shard, epoch, plan=a.plan("ab", "b")) for shard, epoch in enumerate((5, 4, 4))))
    )
    assert Ready() not in effects
    assert Ready() not in moves_on(a, 2, by="b")
    assert Ready() in moves_on(a, 1, by="b")
    assert Ready() not in moves_on(a, 0, by="b")  # sent already


def test_training_starts_after_a_while_whatever_is_missing(peer: Any) -> None:
    """The peers that could send the commits before a kept one may be gone. This peer is not idle before training
    starts."""
    a = peer("a", epoch=None, live="", fragments=((0, 1),))
    a.hear("b", Commit(0, a.version(7), a.version(8), 0, "b", (), a.plan("ab")))
    assert Ready() not in a.feed(Restore((a.state(0, 5), a.state(1, 5))))
    assert Ready() not in a.pass_time(a.rules.fetch_again - 1.5)
    assert not a.replica.roster.mine.idle
    assert Ready() in a.pass_time(2.0)
    a.pass_time(8.0)
    assert not a.replica.roster.mine.idle  # its idle time begins with Ready
    a.pass_time(4.0)
    assert a.replica.roster.mine.idle


def test_training_starts_soon_on_an_uneven_state(peer: Any) -> None:
    """The shard that is behind may wait for this very peer. So the wait is no longer than that of a Merge."""
    a = peer("a", epoch=None, live="b", fragments=((0, 1),))
    a.pass_time(100.0)
    assert Ready() not in a.feed(Restore((a.state(0, 5), a.state(1, 4))))
    assert Ready() in a.pass_time(a.rules.settle + 1.0)


def test_training_does_not_start_on_an_uneven_state_while_shards_move_on(peer: Any) -> None:
    """Rounds may be so short that one shard or another is always ahead when its commit comes."""
    a = peer("a", epoch=None, live="b", fragments=((0, 1),))
    plan = a.plan("ab", "b")
    effects = a.feed(Restore((a.state(0, 5, plan=plan), a.state(1, 3, plan=plan))))
    for _ in range(2):
        effects += a.pass_time(a.rules.even_within - 0.5)
        effects += moves_on(a, 0, by="b") + moves_on(a, 1, by="b")
    assert Ready() not in effects
    assert Ready() not in moves_on(a, 1, by="b")
    assert Ready() in moves_on(a, 1, by="b")


def test_asynchronous_training_starts_once_all_shards_are_held(peer: Any) -> None:
    """They need not be at one epoch."""
    a = peer("a", epoch=None, live="b", fragments=((0, 1),), mode="async")
    assert Ready() in a.feed(Restore((a.state(0, 5), a.state(1, 4))))


# -- a merge


def test_a_merge_waits_until_the_shards_of_each_fragment_are_at_one_epoch(peer: Any) -> None:
    """So that one state of the run is merged. The commit that makes it even brings the answer."""
    b = peer("b", group="ac", fragments=((0, 1), (2,)))
    moves_on(b, 0)
    assert loads(b.feed(Merge())) == []
    assert loads(moves_on(b, 2)) == []
    assert loads(moves_on(b, 1)) == [(0, 1)]
    assert loads(b.pass_time(10.0)) == []  # it was answered already


def test_a_merge_waits_even_within_seconds_at_most(peer: Any) -> None:
    """The missing commits may never come: then the shards that are behind are due."""
    b = peer("b", group="ac", fragments=((0, 1),))
    moves_on(b, 0)
    b.feed_tick()
    assert loads(b.feed(Merge())) == []
    b.feed(Stepped(0.5))
    assert loads(b.pass_time(b.rules.settle - 0.5)) == []
    assert loads(b.pass_time(1.0)) == [(1,)]


def test_a_merge_does_not_wait_again_for_what_did_not_come_in_time(peer: Any) -> None:
    """A repaired shard is ahead for a round. If other epochs differ, the merge waits again."""
    b = peer("b", group="ac", fragments=((0, 1),))
    moves_on(b, 0)
    b.feed(Merge())
    b.pass_time(b.rules.even_within + 1.0)
    assert loads(b.feed(Merge())) == [(1,)]
    moves_on(b, 0)
    assert loads(b.feed(Merge())) == []


def test_a_merge_does_not_wait_for_a_shard_that_waits_for_this_trainer(peer: Any) -> None:
    """Its commit can't come before. A shard that has this peer's contribution no longer waits for it."""
    b = peer("b", group="ab", fragments=((0, 1),))
    moves_on(b, 0)
    assert loads(b.feed(Merge())) == [(1,)]
    c = peer("b", group="ab", fragments=((0, 1),))
    c.contribute(0, 1)
    assert not c.replica.logs[1].awaits_me


def test_a_merge_waits_though_a_shard_ahead_waits_for_this_trainer(peer: Any) -> None:
    """The commit of the one behind is on its way, and brings both to one epoch."""
    b = peer("b", group="ab", fragments=((0, 1),))
    moves_on(b, 0)
    log = b.replica.logs[1]
    log.own.begin(b.contribution(b.version(1), shard=1))
    assert (b.replica.logs[0].awaits_me, log.awaits_me) == (True, False)
    assert loads(b.feed(Merge())) == []


def test_a_merge_does_not_wait_for_another_fragment(peer: Any) -> None:
    """Fragments take turns, so they may be at different epochs."""
    b = peer("b", group="ab", fragments=TWO)
    moves_on(b, 0)
    assert loads(b.feed(Merge())) == [(1,)]


def chain(peer: Any, **rules: Any) -> Any:
    """A peer at epoch 1 whose trainer has no exchange, that applies the commit of epoch 2 and has stored that of 3."""
    b = peer("b", group="ab", **rules)
    b.hear("a", Commit(0, b.version(2), b.version(3), 0, "a", (), b.plan("ab")))
    assert any(isinstance(effect, Apply) for effect in b.hear("a", b.commit()))
    return b


def test_a_merge_waits_while_stored_commits_lead_on(peer: Any) -> None:
    """A peer that catches up would train on a version that the others have long left, and contribute too late."""
    b = chain(peer)
    assert loads(b.feed(Merge())) == []
    assert len(loads(b.feed(Applied(0, b.version(1), "d2")))) == 1
    b = chain(peer)
    assert loads(b.feed(Merge())) == []
    assert loads(b.pass_time(b.rules.even_within - 0.5)) == []
    assert len(loads(b.pass_time(1.0))) == 1


def test_a_merge_waits_for_no_single_commit(peer: Any) -> None:
    """Nor for one that the present one doesn't lead to: a hostile member could make such up."""
    b = peer("b", group="ab")
    b.hear("a", Commit(0, b.version(3), b.version(4), 0, "a", (), b.plan("ab")))
    b.hear("a", b.commit())
    assert len(loads(b.feed(Merge()))) == 1


def test_an_asynchronous_merge_is_answered_at_once(peer: Any) -> None:
    """There, unlike epochs are normal."""
    b = peer("b", group="ab", fragments=((0, 1),), mode="async", succession="ac")
    moves_on(b, 0)
    assert len(loads(b.feed(Merge()))) == 1


# -- idleness


def test_a_trainer_without_steps_becomes_idle(peer: Any) -> None:
    """After the heartbeat timeout, or after three of its usual steps if these take longer."""
    a = solo(peer)
    a.feed(Stepped(0.5))
    a.now += 10.0
    assert not idle(a)
    a.now += 0.1
    assert idle(a)
    a.feed(Stepped(5.0))
    assert not idle(a)
    a.now += 15.0
    assert not idle(a)
    a.now += 0.1
    assert idle(a)


def test_a_pause_is_idleness_after_pause_timeout(peer: Any) -> None:
    """A pause adds nothing to the time without steps."""
    a = solo(peer, pause_timeout=30.0)
    a.feed(Pause(True))
    assert a.replica.roster.mine.paused is True
    a.now += 29.9
    assert not idle(a)
    a.now += 0.1
    assert idle(a)
    a.now += 60.0
    a.feed(Pause(False))
    assert (a.replica.roster.mine.idle, a.replica.roster.mine.paused) == (False, False)
    assert becomes_idle_after(a, 10.0)


def test_a_stuck_trainer_that_pauses_again_and_again_becomes_idle(peer: Any) -> None:
    """A pause does not end the time without steps: before and after it the trainer was stuck."""
    a = solo(peer, pause_timeout=30.0)
    for _ in range(2):
        a.now += 5.0
        a.feed(Pause(True))
        a.now += 20.0
        a.feed(Pause(False))
    assert becomes_idle_after(a, 0.0)


def test_a_pause_does_not_end_idleness(peer: Any) -> None:
    """A trainer that was idle when the pause began stays idle until it makes a step."""
    a = solo(peer, pause_timeout=30.0)
    a.now += 10.1
    assert idle(a)
    a.feed(Pause(True))
    assert idle(a)
    a.feed(Pause(False))
    assert idle(a)
    a.feed(Stepped(0.5))
    assert not idle(a)


def test_a_second_pause_event_does_not_begin_the_pause_anew(peer: Any) -> None:
    a = solo(peer, pause_timeout=30.0)
    a.now += 5.0
    a.feed(Pause(True))
    a.now += 20.0
    a.feed(Pause(True))
    assert becomes_idle_after(a, 9.9)
    a.feed(Pause(False))
    a.feed(Pause(False))
    assert becomes_idle_after(a, 5.0)


def test_a_pause_in_which_an_exchange_ends_defers_no_idleness(peer: Any) -> None:
    """The time without steps begins when the exchange ends, and goes on when the pause ends."""
    b = peer("b", group="ab", pause_timeout=30.0)
    b.contribute()
    b.feed(Pause(True))
    b.now += 10.0
    moves_on(b)
    b.now += 10.0
    b.feed(Pause(False))
    assert becomes_idle_after(b, 10.0)


def test_an_asynchronous_pause_is_idleness_at_once(peer: Any) -> None:
    """There no peer waits for another; idleness only shows which peers train."""
    a = solo(peer, mode="async")
    a.feed(Pause(True))
    assert a.replica.roster.mine.idle


def test_a_trainer_that_waits_for_its_merge_is_not_idle(peer: Any) -> None:
    """Other peers delay it."""
    b = peer("b", group="ac", fragments=((0, 1),), heartbeat_interval=9.0, heartbeat_timeout=9.5)
    b.feed(Stepped(0.5))
    moves_on(b, 0)
    b.feed(Merge())
    b.now += 9.6
    b.feed(Measured(1.0))
    assert not b.replica.roster.mine.idle


def test_a_trainer_that_waits_for_its_exchange_is_not_idle(peer: Any) -> None:
    """Other peers delay it; afterwards its whole time starts again."""
    b = peer("b", group="ab")
    b.contribute()
    b.now += 60.0
    assert not idle(b)
    moves_on(b)
    b.now += 9.0
    assert not idle(b)
    b.now += 2.0
    assert idle(b)


def test_a_peer_without_trainer_is_never_idle(peer: Any) -> None:
    a = peer("a", group="b", live="", role="aggregator")
    a.now += 1000.0
    assert not idle(a)


def test_the_clock_of_idleness_starts_when_all_shards_are_held(peer: Any) -> None:
    a = peer("a", epoch=None, live="")
    a.now += 1000.0
    a.feed(Found(0, ("x",)))
    a.now += 9.0
    assert not idle(a)


# -- by itself


def test_the_speed_of_a_trainer_is_told_in_steps_a_second(peer: Any) -> None:
    """It is 0 while no step is known."""
    training = peer("a").replica.training
    training.stepped(0.25, 101.0)
    assert training.roster.mine.speed == 4.0
    training.stepped(0.0, 102.0)
    assert training.roster.mine.speed == 0.0


def test_the_answer_to_a_merge_has_a_time_only_while_one_waits(peer: Any) -> None:
    a = peer("b", group="ac", fragments=((0, 1),))
    training = a.replica.training
    assert training.loads_by == float("inf")
    moves_on(a, 0)
    assert training.merge(100.0) == []
    assert training.loads_by == 100.0 + a.rules.even_within
    assert training.load(100.0 + a.rules.even_within)
    assert training.loads_by == float("inf")
