"""Tensors that changed in memory, as a replica is told of them: what it does then, and what it says."""

from __future__ import annotations

from typing import Any

from p2p_diloco.core.events import Accept, Applied, Average, Damaged, Filled, Note, Send
from p2p_diloco.core.messages import Commit, Fetch, Plan, Versions
from p2p_diloco.core.replica import meta_of

FETCHING = "shard 0: the state of epoch 1 was changed in memory; fetching it anew"


def notes(effects: list[Any]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Note) and effect.kind == "mismatch"]


def test_the_damaged_fetches_and_commits_nothing_meanwhile(peer: Any) -> None:
    """The round that was about to end goes on with the same contributions once the state is there."""
    a = peer("a", group="ab")
    a.hear("b", a.contribution(a.held))
    assert peer.averages(a.contribute()) == [["a", "b"]]
    effects = a.feed(Damaged(0, a.held))
    assert notes(effects) == [FETCHING]
    assert effects[1:] == [Send("b", Fetch((None,)))]
    assert peer.averages(a.pass_time(1.0)) == []
    state = a.state(0, 1, plan=a.plan("ab"))
    a.hear("b", state)
    accept, average = a.feed(Filled(0, state.version, "d1"))
    assert accept == Accept(((0, "d1"),))
    assert [who for who, _ in average.contributions] == ["a", "b"]
    assert average.held == meta_of(a.replica.state(0))


def test_it_is_said_once_and_of_the_present_version(peer: Any) -> None:
    """The same damage seen again is no news, nor is what a state was like that is not held any more."""
    a = peer("a", group="ab")
    assert a.feed(Damaged(0, a.version(0))) == []
    assert a.replica.logs[0].damaged is None
    assert notes(a.feed(Damaged(0, a.held))) == [FETCHING]
    since = a.replica.logs[0].damaged
    a.now += 1.0
    assert a.feed(Damaged(0, a.held)) == []
    assert a.replica.logs[0].damaged == since


def test_a_round_that_damage_holds_open_wakes_nobody(peer: Any) -> None:
    """Its deadline passes, and nothing can be done before the tensors are there."""
    a = peer("a", group="ab", round_timeout=0.3)
    a.feed_tick()
    tick = a.replica.next_wakeup()
    a.contribute()
    assert a.replica.next_wakeup() < tick
    a.feed(Damaged(0, a.held), after=0.4)
    assert a.replica.next_wakeup() == tick


def test_another_is_asked_when_one_does_not_help(peer: Any) -> None:
    """Whoever is asked may have nothing better; the next time it is somebody else."""
    a = peer("a", group="abc")
    asked = [e.to for e in a.feed(Damaged(0, a.held)) if isinstance(e, Send)]
    a.replica.catchup.fetching = None
    asked += [e.to for e in a.replica.catchup.mend(a.now) if isinstance(e, Send)]
    assert sorted(asked) == ["b", "c"]


def test_what_nobody_else_has_is_made_true(peer: Any) -> None:
    """With nobody to ask, a commit of no contributions makes a version of what is there, below the floor and under the
    next term; the round goes on from it."""
    a = peer("a", group="ab", min_peers=2)
    a.lose("b")
    a.contribute()
    told = a.feed(Damaged(0, a.held))
    alone = "shard 0 was changed in memory and nobody has it as it was: going on with what is there"
    assert notes(told) == [FETCHING, alone]
    average = told[-1]
    assert isinstance(average, Average)
    assert (average.contributions, average.held) == ((), None)
    assert a.feed(Damaged(0, a.held)) == []
    term = a.replica.logs[0].term
    assert term == 1
    a.averaged(told)
    assert (a.held.epoch, a.held.digest, a.held.samples) == (2, "new", 10)
    assert a.replica.logs[0].made_term == term
    assert not a.replica.logs[0].trusted
    assert notes(a.feed(Damaged(0, a.held)))[0] == FETCHING.replace("epoch 1", "epoch 2")


def test_who_delivers_nothing_is_waited_for_a_while_only(peer: Any) -> None:
    """After the heartbeat timeout the run goes on with what is there, though somebody is alive who should have it."""
    a = peer("a", group="ab")
    a.feed(Damaged(0, a.held))
    a.hear("b", Versions((a.version(1),), forked=False))
    effects = a.pass_time(4 * a.rules.heartbeat_timeout)
    assert [e.contributions for e in effects if isinstance(e, Average)] == [()]


def test_a_run_that_has_ended_ends_damaged(peer: Any) -> None:
    """Nothing is committed past the end: it is said, and that is all."""
    a = peer("a", group="a", stop_after_epochs=1)
    told = a.feed(Damaged(0, a.held))
    assert notes(told) == [
        FETCHING,
        "shard 0 was changed in memory and nobody has it as it was: the run has ended with it damaged",
    ]
    assert not any(isinstance(effect, Average) for effect in told)
    assert a.feed(Damaged(0, a.held)) == []
    log = a.replica.logs[0]
    assert (log.damaged, log.past_mending, log.trusted) == (None, True, False)


def test_a_mismatch_that_lasts_is_counted(peer: Any) -> None:
    """The first is said at once, the next one a while later, with how many there were between."""
    b = peer("b", group="ab")

    def astray() -> list[str]:
        b.hear("a", Commit(0, b.held, b.version(2), 0, "a", (), Plan(("a", "b"), ("a", "b"))))
        return notes(b.feed(Applied(0, b.held, "astray")))

    plain = "shard 0: a commit on epoch 1 led to another digest than it names"
    assert astray() == [plain]
    assert [astray() for _ in range(3)] == [[], [], []]
    b.now += b.rules.say_again
    (told,) = astray()
    assert told.startswith(f"{plain}, as did 3 commits before it: ")
    assert astray() == []
    b.now += b.rules.say_again
    (told,) = astray()
    assert ", as did 1 commits" in told
    b.now += b.rules.say_again
    assert astray() == [plain]
