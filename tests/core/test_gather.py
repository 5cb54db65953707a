"""Gathering a state from several donors: a few shards of each at a time, others asked again, none fetched twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.events import Fill, Send, SendFailed
from p2p_diloco.core.gather import Gathering
from p2p_diloco.core.messages import Fetch, Probe, Summary, Versions
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion, Version, model_version
from tests.core.conftest import FIVE, TWO, ahead, commits, fetches, fill, filled, gathering

RULES = Rules(run="run", fragments=((0, 1, 2, 3, 4),))
OLD, NEW = Version(0, 10, 1, "d1"), Version(0, 20, 2, "d2")

ALL = range(5)
BOTH = {"b": ALL, "c": ALL}


def begun(shards: int = 5) -> Gathering:
    """A gathering whose first donor has told its versions."""
    gathering = Gathering(RULES, "b", ModelVersion(), 0.0)
    gathering.begin((NEW,) * shards)
    return gathering


def at(*epochs: int) -> Summary:
    """The Summary of a donor whose fragments are at these epochs."""
    return Summary(1, "worker", True, ModelVersion(), epochs, idle=False)


def test_each_donor_is_asked_for_a_few() -> None:
    """No more than the window at a time; each shard that arrives makes room for another."""
    gathering = begun()
    assert gathering.ask(BOTH, [None] * 5, 0.0) == [("b", (0, 1)), ("c", (2, 3))]
    assert gathering.ask(BOTH, [None] * 5, 1.0) == []
    gathering.came([1])
    assert gathering.ask(BOTH, [None] * 5, 2.0) == [("b", (4,))]
    assert (gathering.of("b"), gathering.of("c")) == ([0, 4], [2, 3])


def test_a_shard_that_has_moved_since_it_was_asked_for_has_come() -> None:
    """Also if an older state was held before. A shard that was never asked for does no harm."""
    gathering = begun(2)
    gathering.ask({"b": ALL}, [OLD, OLD], 0.0)
    assert gathering.moved([OLD, OLD]) == []
    assert gathering.moved([NEW, OLD]) == [0]
    gathering.came([0, 4])
    assert gathering.moved([NEW, OLD]) == []
    assert not gathering.done
    gathering.came([1])
    assert gathering.done


def test_a_shard_that_does_not_come_is_asked_for_again() -> None:
    """After fetch_again and not before, in the order of shards."""
    gathering = begun(3)
    gathering.ask(BOTH, [None] * 3, 5.0)
    assert gathering.overdue(5.0 + RULES.fetch_again - 0.1) == []
    assert gathering.overdue(5.0 + RULES.fetch_again) == [0, 1, 2]
    gathering.again([1, 0])
    assert gathering.of("b") == []
    assert gathering.ask({"c": ALL}, [None] * 3, 50.0) == [("c", (0,))]


def test_donors_that_hold_what_was_told_are_asked_first() -> None:
    """Other donors are only tried for shards that such donors have no room for."""
    donors = {"b": [], "c": [1, 2, 3]}
    assert begun(3).ask(donors, [None] * 3, 0.0) == [("b", (0,)), ("c", (1, 2))]
    assert begun().ask(donors, [None] * 5, 0.0) == [("b", (0, 3)), ("c", (1, 2))]


def test_a_donor_that_was_found_behind_in_a_shard_is_not_asked_for_it_again() -> None:
    """Unless its Summary shows now that it holds the told version. For other shards it is asked as before."""
    gathering = begun(3)
    gathering.ask({"b": []}, [None] * 3, 0.0)
    gathering.lacks("b", 0)
    assert gathering.ask({"b": []}, [None] * 3, 0.0) == [("b", (2,))]
    gathering.came([1, 2])
    assert gathering.ask({"b": []}, [None] * 3, 0.0) == []
    assert gathering.ask({"b": [0]}, [None] * 3, 0.0) == [("b", (0,))]


def test_a_gathering_is_hopeless_only_when_no_donor_may_have_what_is_left() -> None:
    """Not while a request is under way, or while a donor was not tried or now holds the told version."""
    gathering = begun(2)
    assert gathering.hopeless({})
    assert not gathering.hopeless({"b": []})
    gathering.ask({"b": []}, [None] * 2, 0.0)
    gathering.lacks("b", 0)
    assert not gathering.hopeless({"b": []})
    gathering.lacks("b", 1)
    assert gathering.hopeless({"b": []})
    assert not gathering.hopeless({"b": [1]})
    assert not gathering.hopeless({"b": [], "c": []})


def test_a_donor_holds_what_was_told_if_its_lowest_epoch_is_as_high() -> None:
    """The first donor holds all that it told; a donor without a state holds nothing."""
    gathering = Gathering(replace(RULES, fragments=((0, 1), (2,))), "b", ModelVersion(), 0.0)
    gathering.begin((OLD, NEW, NEW))
    assert gathering.told_to_hold("b", at(0, 0)) == {0, 1, 2}
    assert gathering.told_to_hold("c", at(1, 2)) == {0, 2}
    assert gathering.told_to_hold("c", at()) == gathering.told_to_hold("c", None) == set()


def test_nothing_is_asked_for_before_the_first_donor_has_told() -> None:
    """The gathering is not finished either, and no donor is known to hold anything."""
    gathering = Gathering(RULES, "b", ModelVersion(), 0.0)
    assert gathering.told_to_hold("b", at(9)) == set()
    assert gathering.ask({"b": ALL}, [], 0.0) == []
    assert not gathering.done


def take(n: Any, sender: str, shard: int, epoch: int = 7) -> list[Any]:
    """A shard's state arrives with the right digest."""
    state = n.state(shard, epoch)
    assert n.hear(sender, state) == [fill(n, state)]
    return [(to, message.shards) for to, message in fetches(filled(n, state))]


def behind(peer: Any) -> tuple[Any, list[Any]]:
    """A newcomer that b told of epoch 9 of shard 1, of which a holds epoch 8; with the shards that it asks of each
    donor."""
    n = peer("n", epoch=None, live="", fragments=TWO)
    n.meet("b", model=ahead(n, 7), epochs=(7, 7))
    n.meet("a", model=ahead(n, 8), epochs=(8, 8))
    n.meet("c", model=ahead(n, 9), epochs=(8, 8))
    effects = n.hear("b", Versions((n.version(7), n.version(9)), forked=False))
    return n, [(to, message.shards) for to, message in fetches(effects)]


# -- a whole newcomer


def test_shards_are_asked_of_all_donors(peer: Any) -> None:
    """A few of each at a time; after each delivery the donor is asked for the next, until all have arrived."""
    n, asked = gathering(peer, fetch_window=2)
    assert asked == [("a", (0, 1)), ("c", (2, 3))]
    assert n.replica.catchup.donors() == ["a", "c"]
    assert take(n, "c", 3) == [("c", (4,))]
    assert [take(n, "a", 0), take(n, "a", 1), take(n, "c", 2)] == [[], [], []]
    assert not n.replica.has_state
    take(n, "c", 4)
    assert n.replica.has_state
    assert n.replica.catchup.donors() == []


def test_a_donor_that_comes_later_takes_its_part(peer: Any) -> None:
    """If it holds at least the told versions."""
    n, asked = gathering(peer, "a", fetch_window=1)
    assert asked == [("a", (0,))]
    later = n.meet("d", model=ahead(n, 8), epochs=(8,) * 5)
    assert [(to, message.shards) for to, message in fetches(later)] == [("d", (1,))]
    assert asked_again_after(n) == n.rules.fetch_again
    assert not fetches(n.meet("e", model=ahead(n, 6), epochs=(6,) * 5))  # has less than was told


def test_the_shards_of_a_dead_donor_are_asked_of_the_others(peer: Any) -> None:
    """Delivered shards are not asked for again."""
    n, _ = gathering(peer, fetch_window=1)
    assert take(n, "a", 0) == [("a", (2,))]
    effects = n.lose("a")
    assert fetches(effects) == []  # c is busy
    assert take(n, "c", 1) == [("c", (3,))]
    assert take(n, "c", 3) == [("c", (4,))]
    assert take(n, "c", 4) == [("c", (2,))]


def test_the_shards_of_a_restarted_donor_are_asked_of_the_others(peer: Any) -> None:
    n, _ = gathering(peer, fetch_window=5)
    effects = n.meet("a", incarnation=9, **n.blank())
    assert [(to, message.shards) for to, message in fetches(effects)] == [("c", (0, 1, 2, 3, 4))]
    assert asked_again_after(n) == n.rules.fetch_again


def asked_again_after(n: Any) -> float:
    """When the newest question is taken for lost, in seconds."""
    asked = n.replica.catchup.gathering.asked.values()
    return max(one.when for one in asked) + n.rules.fetch_again - n.now


def test_a_question_to_another_donor_has_its_own_time(peer: Any) -> None:
    """It is taken for lost later than the first, whyever that one came to nothing."""
    n, _ = behind(peer)
    n.now += 5.0
    n.lose("b")
    assert asked_again_after(n) == n.rules.fetch_again
    n.now += 5.0
    n.hear("a", n.state(1, 8))
    assert asked_again_after(n) == n.rules.fetch_again


def test_a_lost_request_goes_to_another_donor(peer: Any) -> None:
    """At once; to the same donor only if there is no other, and then at the next tick."""
    n, _ = gathering(peer, fetch_window=5)
    lost = Fetch((None,) * 5, shards=(0, 1, 2, 3, 4))
    effects = n.feed(SendFailed("a", lost, gone=False))
    assert [(to, message.shards) for to, message in fetches(effects)] == [("c", (0, 1, 2, 3, 4))]
    assert asked_again_after(n) == n.rules.fetch_again
    alone, _ = gathering(peer, "a", fetch_window=5)
    assert fetches(alone.feed(SendFailed("a", lost, gone=False))) == []
    assert [to for to, _ in fetches(alone.pass_time(1.5))] == ["a"]


def test_the_shards_of_a_donor_that_delivers_nothing_are_asked_of_the_others(peer: Any) -> None:
    """After fetch_again."""
    n, asked = gathering(peer, fetch_window=3)
    assert asked == [("a", (0, 1, 2)), ("c", (3, 4))]
    for shard in (3, 4):
        take(n, "c", shard)
    assert fetches(n.pass_time(n.rules.fetch_again - 1.5)) == []
    assert [(to, m.shards) for to, m in fetches(n.pass_time(2.5))] == [("c", (0, 1, 2))]


def test_a_lone_donor_that_delivers_nothing_is_asked_again_and_again(peer: Any) -> None:
    """Each time after fetch_again."""
    n, _ = gathering(peer, "a", fetch_window=5)
    for _ in range(3):
        assert [to for to, _ in fetches(n.pass_time(n.rules.fetch_again + 1.0))] == ["a"]


def test_a_donor_that_falls_silent_is_dropped_when_it_is_dead(peer: Any) -> None:
    n = peer("n", epoch=None, live="", heartbeat_timeout=4.0)
    n.meet("a", model=model_version([n.version(7)]), epochs=(7,))
    n.silent.add("a")
    n.hear("a", Versions((n.version(7),), forked=False))
    n.pass_time(3.0)
    assert n.replica.catchup.donors() == ["a"]
    n.pass_time(7.0)
    assert n.replica.catchup.donors() == []


def test_a_donor_with_nothing_newer_says_so(peer: Any) -> None:
    """Then its shards are done: this peer's own are as new."""
    b = peer("b", epoch=3, group="ab", fragments=TWO)
    assert b.hear("a", Fetch((b.version(3), b.version(1)), shards=(0,))) == [
        Send("a", Versions((b.version(3),) * 2, forked=False))
    ]
    assert b.hear("a", Fetch((b.version(3), b.version(1)), shards=())) == [
        Send("a", Versions((b.version(3),) * 2, forked=False))
    ]
    assert b.said(b.hear("a", Fetch((b.version(2), b.version(1)), shards=(1,)))) == [b.replica.state(1)]
    # also beside a state: the other shard's request would wait for fetch_again
    assert b.said(b.hear("a", Fetch((b.version(3), b.version(1)), shards=(0, 1)))) == [
        b.replica.state(1),
        Versions((b.version(3),) * 2, forked=False),
    ]
    n = peer("n", epoch=7, group="an", fragments=FIVE)
    n.meet("a", model=ahead(n, 20), epochs=(20,) * 5)
    n.now += 2.0
    assert fetches(n.meet("a", model=ahead(n, 20), epochs=(20,) * 5)) == [("a", Fetch((n.version(7),) * 5, shards=()))]
    told = Versions((n.version(7), *[n.version(20)] * 4), forked=False)
    assert [m.shards for _, m in fetches(n.hear("a", told))] == [(0, 1)]
    assert [m.shards for _, m in fetches(n.hear("a", told))] == [(2,)]  # 0 is as new as told
    assert n.replica.catchup.gathering.of("a") == [1, 2]
    older = Versions((n.version(7), n.version(5), *[n.version(20)] * 3), forked=False)
    assert [m.shards for _, m in fetches(n.hear("a", older))] == [(3,)]  # of 1 it holds less
    assert n.replica.catchup.gathering.of("a") == [2, 3]
    # it is not asked for 1 again, though it told more: there are no endless questions
    assert n.replica.catchup.gathering.left == [4]


def test_a_shard_is_asked_of_the_next_donor_if_one_has_nothing_newer(peer: Any) -> None:
    """c is ahead of this peer in shard 4, and has what this peer has of the others; a has told more."""
    n = peer("n", epoch=7, group="acn", fragments=FIVE, fetch_window=2)
    told = Versions((n.version(20),) * 5, forked=False)
    for name, epochs in (("a", (20,) * 5), ("c", (7, 7, 7, 7, 8))):
        n.meet(name, model=ahead(n, 20), epochs=epochs)
    n.now += 2.0
    assert fetches(n.meet("a", model=ahead(n, 20), epochs=(20,) * 5)) == [("a", Fetch((n.version(7),) * 5, shards=()))]
    assert [(to, m.shards) for to, m in fetches(n.hear("a", told))] == [("a", (0, 1)), ("c", (2, 3))]
    equal = Versions((*[n.version(7)] * 4, n.version(8)), forked=False)
    assert [(to, m.shards) for to, m in fetches(n.hear("c", equal))] == [("c", (4,))]
    assert [take(n, "a", 0, 20), take(n, "a", 1, 20)] == [[("a", (2,))], [("a", (3,))]]


def test_a_donor_that_turns_out_to_be_on_another_lineage_ends_the_gathering(peer: Any) -> None:
    """It has failed before, so the change to its lineage has to wait. Asked for the same shards meanwhile, it would
    fail again, and this peer would wait for ever."""
    n = peer("n", epoch=7, group="an", fragments=FIVE)
    n.meet("a", model=ahead(n, 20), epochs=(20,) * 5)
    n.now += 2.0
    n.meet("a", model=ahead(n, 20), epochs=(20,) * 5)
    n.hear("a", Versions((n.version(20),) * 5, forked=False))
    n.pass_time(n.rules.fetch_again + 1.0)
    assert n.replica.catchup.failures.times("a") == 1
    assert n.replica.catchup.donors() == ["a"]
    forked = Versions((n.version(20, "other"),) * 5, forked=True)
    assert fetches(n.hear("a", forked)) == []
    assert n.replica.catchup.donors() == []
    n.now += n.rules.fetch_again
    assert fetches(n.hear("a", forked)) == [("a", Fetch((n.version(7),) * 5, whole=True))]


@pytest.mark.parametrize(("says", "asked"), [(7, []), (10, [("a", ())])])
def test_commits_that_are_missing_after_a_gathering_are_gathered(peer: Any, says: int, asked: list[Any]) -> None:
    """The rounds were faster than the state. Only an author that says that it is ahead is asked: one that has started
    again with less would answer that it has nothing newer, and be asked at once again, without end."""
    n = peer("n", epoch=None, live="")
    n.meet("a", model=ahead(n, 7), epochs=(7,))
    n.hear("a", Versions((n.version(7),), forked=False))
    n.hear("a", commits(n, 9, 10)[0])
    n.meet("a", model=ahead(n, says), epochs=(says,))
    assert take(n, "a", 0, 7) == asked
    # a hostile author may say more than it holds
    assert (
        fetches(n.hear("a", Versions((n.version(7),), forked=False)))
        == [("a", Fetch((n.version(7),), shards=(0,)))][: len(asked)]
    )
    assert fetches(n.hear("a", Versions((n.version(7),), forked=False))) == []


def test_two_lineages_do_not_mix(peer: Any) -> None:
    """A state that does not descend from what the first donor told is not taken, and gathering begins anew."""
    n, _ = gathering(peer)
    other = n.state(0, 8, version=n.version(8, "other"), history=((6, "d6"), (7, "other7"), (8, "other")))
    assert n.hear("c", other) == []
    effects = n.meet("c", model=ahead(n, 8), epochs=(8,) * 5)
    assert fetches(effects) == [("c", Fetch((None,) * 5, shards=()))]
    n, _ = gathering(peer)
    assert isinstance(n.hear("c", n.state(0, 8))[0], Fill)


def test_a_shard_is_asked_of_a_donor_that_holds_what_was_told(peer: Any) -> None:
    """The state that a sent for shard 1 could not be taken."""
    assert behind(peer)[1] == [("a", (0,)), ("b", (1,))]


def test_a_donor_that_is_behind_is_passed_over_at_once(peer: Any) -> None:
    """Its state can't be taken, so another donor is asked. When no peer that may hold it is left, gathering begins
    again with the peers that remain."""
    n, _ = behind(peer)
    effects = n.lose("b")
    assert [(to, m.shards) for to, m in fetches(effects)] == [("a", (1,))]
    effects = n.hear("a", n.state(1, 8))
    assert [(to, m.shards) for to, m in fetches(effects)] == [("c", (1,))]
    assert n.hear("a", n.state(1, 8)) == [], "it was not asked for"
    take(n, "a", 0, 8)
    assert n.hear("c", n.state(1, 8)) == []
    assert [m.shards for _, m in fetches(n.meet("a", model=ahead(n, 8), epochs=(8, 8)))] == [()]
    n.hear("a", Versions((n.version(8),) * 2, forked=False))
    take(n, "a", 1, 8)
    assert n.replica.has_state


def test_a_first_donor_that_restarted_holds_what_it_says_now(peer: Any) -> None:
    """That may be less than it told before. Gathering begins again if no other peer holds more."""
    n, _ = behind(peer)
    n.meet("b", incarnation=9, model=ahead(n, 8), epochs=(8, 8))
    for donor in "abc":
        n.hear(donor, n.state(1, 8))
    take(n, "a", 0, 8)
    assert [m.shards for _, m in fetches(n.meet("a", model=ahead(n, 8), epochs=(8, 8)))] == [()]


def test_a_state_that_nobody_was_asked_for_and_is_too_old_changes_nothing(peer: Any) -> None:
    n, _ = gathering(peer, "a", fetch_window=1)
    assert n.hear("a", n.state(4, 6)) == []
    assert n.replica.catchup.gathering.left == [1, 2, 3, 4]


def test_a_state_that_comes_late_does_not_show_its_donor_as_behind(peer: Any) -> None:
    """It was sent before the donor told its versions; the newer one is still to arrive."""
    n, _ = behind(peer)
    assert n.hear("b", n.state(1, 8)) == []
    take(n, "b", 1, 9)


def test_less_is_gathered_when_all_donors_that_held_more_are_gone(peer: Any) -> None:
    """The greatest version may be lost with its holders; a newcomer does not wait for it."""
    n, _ = gathering(peer, "a")
    n.meet("e", model=ahead(n, 6), epochs=(6,) * 5)
    n.lose("a")
    assert fetches(n.meet("e", model=ahead(n, 6), epochs=(6,) * 5)) == [("e", Fetch((None,) * 5, shards=()))]


def test_a_first_donor_that_does_not_tell_is_replaced(peer: Any) -> None:
    n = peer("n", epoch=None, live="", fragments=FIVE)
    n.meet("a", model=ahead(n, 7), epochs=(7,) * 5)
    n.silent.add("a")
    n.pass_time(n.rules.settle + 1.0)
    assert n.replica.catchup.donors() == []
    assert [to for to, _ in fetches(n.meet("c", model=ahead(n, 7), epochs=(7,) * 5))] == ["c"]


@pytest.mark.parametrize("how", ["dies", "could not be asked"])
def test_a_first_donor_that_is_gone_is_replaced(peer: Any, how: str) -> None:
    n = peer("n", epoch=None, live="", fragments=FIVE)
    n.meet("a", model=ahead(n, 7), epochs=(7,) * 5)
    if how == "dies":
        n.lose("a")
    else:
        n.feed(SendFailed("a", Fetch((None,) * 5, shards=()), gone=False))
    assert [to for to, _ in fetches(n.meet("c", model=ahead(n, 7), epochs=(7,) * 5))] == ["c"]


def test_a_newcomer_waits_settle_for_what_the_first_donor_holds(peer: Any) -> None:
    """Then it asks for missing shards. If the first donor does not answer, the next peer that is heard is asked."""
    n = peer("n", epoch=None, live="")
    summary = peer("a").replica.roster.mine
    assert n.said(n.hear("a", Probe(summary))) == [Fetch((None,), shards=())]
    n.pass_time(1.0)
    assert n.said(n.hear("a", Versions((n.version(1),), forked=False))) == [Fetch((None,), shards=(0,))]
    n = peer("n", epoch=None, live="")
    n.hear("a", Probe(summary))
    assert n.said(n.pass_time(n.rules.settle + 1.0)).count(Fetch((None,), shards=())) == 1
