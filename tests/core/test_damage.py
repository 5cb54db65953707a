"""Tensors that changed in memory, as a replica is told of them: what it does then, and what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from p2p_diloco.core.events import Accept, Applied, Average, Averaged, Damaged, Filled, Note, Send
from p2p_diloco.core.messages import Commit, Fetch, Plan, Probe, State, TakeOver, Versions
from p2p_diloco.core.replica import meta_of

FETCHING = "shard 0: the state of epoch 1 was changed in memory; fetching it anew"


def notes(effects: list[Any]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Note) and effect.kind == "mismatch"]


def next_commit(b: Any) -> Commit:
    """What "a" commits on what b holds."""
    return Commit(0, b.held, b.version(b.held.epoch + 1), 0, "a", (), Plan(("a", "b"), ("a", "b")))


def astray(b: Any) -> list[str]:
    """A commit leads b to another digest than it names; what b says of it."""
    commit = next_commit(b)
    b.hear("a", commit)
    return notes(b.feed(Applied(0, commit.base, "astray")))


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
    assert a.replica.logs[0].round.damaged is None
    assert notes(a.feed(Damaged(0, a.held))) == [FETCHING]
    since = a.replica.logs[0].round.damaged
    a.now += 1.0
    assert a.feed(Damaged(0, a.held)) == []
    assert a.replica.logs[0].round.damaged == since


def test_a_round_that_damage_holds_open_wakes_nobody(peer: Any) -> None:
    """Its deadline passes, and nothing can be done before the tensors are there."""
    a = peer("a", group="abc", round_timeout=0.3)
    a.feed_tick()
    tick = a.replica.next_wakeup()
    a.contribute()
    a.hear("b", a.contribution(a.held))
    assert a.replica.next_wakeup() < tick
    a.feed(Damaged(0, a.held), after=0.4)
    assert a.replica.next_wakeup() == tick


def test_another_is_asked_when_one_does_not_help(peer: Any) -> None:
    """Whoever is asked may have nothing better; the next time it is somebody else."""
    a = peer("a", group="abc")
    asked = [e.to for e in a.feed(Damaged(0, a.held)) if isinstance(e, Send)]
    a.replica.catchup.fetching = None
    asked += [e.to for e in a.replica.mending.mend(a.now) if isinstance(e, Send)]
    assert sorted(asked) == ["b", "c"]


def test_nothing_is_made_true_while_better_tensors_are_filled_in(peer: Any) -> None:
    """They came at the last moment: what is there would else be averaged, and then be put in the place of what came."""
    a = peer("a", group="ab", fragments=((0,), (1,)))
    a.feed(Damaged(0, a.held))
    a.pass_time(a.rules.dead_after + 1.0)
    a.hear("b", a.state(0, 1, plan=a.plan("ab")))
    a.replica.catchup.fetching = None  # as when another shard moves on
    a.pass_time(1.1)
    assert a.replica.logs[0].round.working is None
    assert a.feed(Filled(0, a.held, "d1"))[0] == Accept(((0, "d1"),))


def test_what_nobody_else_has_is_made_true(peer: Any) -> None:
    """With nobody to ask, a commit of no contributions makes a version of what is there, below the floor and under the
    next term; the round goes on from it."""
    a = peer("a", group="ab", min_peers=2)
    a.lose("b")
    a.contribute()
    told = a.feed(Damaged(0, a.held))
    alone = "shard 0 was changed in memory and no peer has it as it was: going on with what is there"
    assert notes(told) == [FETCHING, alone]
    average = told[-1]
    assert isinstance(average, Average)
    assert (average.contributions, average.held) == ((), None)
    assert a.feed(Damaged(0, a.held)) == []
    term = a.replica.logs[0].lead.term
    assert term == 1
    a.averaged(told)
    assert (a.held.epoch, a.held.digest, a.held.samples) == (2, "new", 10)
    assert a.replica.logs[0].state.term == term
    assert not a.replica.logs[0].round.trusted
    assert notes(a.feed(Damaged(0, a.held)))[0] == FETCHING.replace("epoch 1", "epoch 2")


def test_what_is_made_true_may_lie_past_the_end(peer: Any) -> None:
    """A shard that has reached the end of the run, in a run that has not: its damaged state gets a version, too."""
    a = peer("a", group="a", fragments=((0,), (1,)), stop_after_epochs=2)
    a.contribute(0)
    a.feed(Averaged(0, a.held, "d2", "mean"))
    assert a.replica.logs[0].final
    assert not a.replica.finished
    told = a.feed(Damaged(0, a.held))
    assert [e.contributions for e in told if isinstance(e, Average)] == [()]


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
        "shard 0 was changed in memory and no peer has it as it was: the run has ended with it damaged",
    ]
    assert not any(isinstance(effect, Average) for effect in told)
    assert a.feed(Damaged(0, a.held)) == []
    log = a.replica.logs[0]
    assert (log.round.damaged, log.round.past_mending, log.round.trusted) == (None, True, False)


def test_a_mismatch_that_lasts_is_counted(peer: Any) -> None:
    """The first is said at once, the next one a while later, with how many there were between."""
    b = peer("b", group="ab")

    plain = "shard 0: a commit on epoch 1 led to another digest than it names"
    assert astray(b) == [plain]
    assert [astray(b) for _ in range(3)] == [[], [], []]
    b.now += b.rules.say_again
    assert astray(b) == [f"{plain}, as did 3 others since it was last said"]
    b.replica.mismatches.in_a_row = 0
    assert astray(b) == []
    b.now += b.rules.say_again
    assert astray(b) == [f"{plain}, as did 1 others since it was last said"]
    b.now += b.rules.say_again
    assert astray(b) == [plain]


def test_who_is_led_astray_by_every_commit_is_unlike_the_others(peer: Any) -> None:
    """So many in a row, and it says so to all; one that leads right begins the count anew. Said once."""
    b = peer("b", group="ab")
    most = b.rules.astray_max
    for _ in range(most - 1):
        astray(b)
    right = next_commit(b)
    b.hear("a", right)
    b.feed(Applied(0, right.base, right.version.digest))
    assert b.replica.epoch == 2
    for _ in range(most - 1):
        astray(b)
    assert not b.replica.roster.mine.unlike
    assert b.feed(Applied(0, b.version(1), "what nobody waits for")) == []
    (told,) = astray(b)
    assert told == (
        "shard 0: a commit on epoch 2 led to another digest than it names, as did all of the last "
        f"{most}: this machine computes the outer step unlike those that make the commits. It is sent whole states "
        "from now on, several times the bytes, and aggregates only where all are unlike. outer_optimizer=sgd "
        "computes alike everywhere; if it is set, test the memory"
    )
    assert b.replica.roster.mine.unlike
    b.now += 2 * b.rules.say_again
    assert "others since it was last said" in "".join(astray(b))
    assert astray(b) == []


def committed(a: Any) -> list[Any]:
    """All of a, b and c contribute, and a commits; its effects."""
    for name in "bc":
        a.hear(name, a.contribution(a.held, a.held.epoch))
    return list(a.averaged(a.contribute(), f"d{a.held.epoch + 1}"))


def test_who_is_unlike_gets_states_and_is_elected_last(peer: Any) -> None:
    """In place of a commit that it could not apply, asked for or not. Where all are unlike, they are elected."""
    a = peer("a", group="abc", succession="abc")
    a.hear("b", Probe(a.about(unlike=True)))
    base = a.held
    told = committed(a)
    sent = {e.to: e.message for e in told if isinstance(e, Send) and isinstance(e.message, (Commit, State))}
    assert isinstance(sent["b"], State)
    assert sent["b"] == a.replica.logs[0].state
    assert isinstance(sent["c"], Commit)
    assert set(sent["c"].plan.group) == set("abc")
    assert set(sent["c"].plan.succession) == set("ac")
    assert a.hear("b", Fetch((base,))) == [Send("b", sent["b"])]
    assert a.hear("c", Fetch((base,))) == [Send("c", sent["c"])]
    for late in (a.contribution(base, 2), TakeOver(0, base, 1)):
        assert a.hear("b", late) == [Send("b", sent["b"])]
        assert a.hear("c", late) == [Send("c", sent["c"])]
    a = peer("a", group="abc", succession="abc")
    a.replica.roster.mine = replace(a.replica.roster.mine, unlike=True)
    for name in "bc":
        a.hear(name, Probe(a.about(unlike=True)))
    told = committed(a)
    states = [e.message for e in told if isinstance(e, Send) and isinstance(e.message, State)]
    assert [set(state.plan.succession) for state in states] == [set("abc")] * 2
