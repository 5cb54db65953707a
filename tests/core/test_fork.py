"""Forks: two lineages are compared once as whole models, and the lesser side takes all of the greater one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from p2p_diloco.core.events import Accept, Applied, Average, Changed, Note, Ready, Restore, Send
from p2p_diloco.core.messages import Commit, Fetch, Plan, Probe, State, TakeOver, Versions
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.version import ModelVersion, Version, model_version
from tests.core.conftest import FIVE, TWO, ahead, fetches, fill, filled, gathering, to


def fork(peer: Any, **more: Any) -> tuple[Any, Versions, tuple[State, State]]:
    """A peer at epoch 3, the versions of a greater lineage that forked at epoch 2, and its two states."""
    b = peer("b", epoch=3, group="ab", fragments=TWO, **more)
    theirs = Version(0, 99, 5, "other")
    history = ((2, "d2"), (3, "x3"), (4, "x4"), (5, "other"))
    states = (b.state(0, 5, version=theirs, history=history), b.state(1, 5, version=theirs, history=history))
    return b, Versions((theirs, theirs), forked=True), states


def asked_again(b: Any, seconds: float) -> list[Fetch]:
    """The requests to a donor that says it holds more, within the given time."""
    b.meet("a", model=model_version([Version(0, 99, 5, "other")] * 2), epochs=(5, 5))
    return [message for to, message in fetches(b.pass_time(seconds)) if to == "a"]


# -- the comparison


def test_a_forked_asker_is_told_the_versions_of_all_shards(peer: Any) -> None:
    """No shard is sent before the models are compared."""
    b = peer("b", epoch=3, group="ab", fragments=TWO)
    effects = b.hear("a", Fetch((b.version(1), b.version(3, "other"))))
    assert effects == [Send("a", Versions((b.version(3), b.version(3)), forked=True))]


@pytest.mark.parametrize("ask", ["contribution", "takeover"])
def test_a_message_of_a_forked_round_is_answered_with_the_versions_of_all_shards(peer: Any, ask: str) -> None:

    b = peer("b", epoch=3, group="ab")
    other = b.version(3, "other")
    message = b.contribution(other) if ask == "contribution" else TakeOver(0, other, 1)
    assert b.hear("a", message) == [Send("a", Versions((b.version(3),), forked=True))]


@pytest.mark.parametrize("theirs", [Version(0, 29, 900, "x"), Version(0, 31, 1, "x")])
def test_a_fork_older_than_the_memory_shows_by_its_samples(peer: Any, theirs: Version) -> None:
    """More epochs with fewer samples, or fewer epochs with more."""
    b = peer("b", epoch=None, group="ab", live="a")
    b.feed(Restore((b.state(0, 3, history=((2, "d2"), (3, "d3"))),)))
    assert b.hear("a", Fetch((theirs,))) == [Send("a", Versions((b.version(3),), forked=True))]


def test_the_lesser_lineage_asks_for_all_that_differs(peer: Any) -> None:
    b, theirs, _ = fork(peer)
    assert b.hear("a", theirs) == [Send("a", Fetch((b.version(3), b.version(3)), whole=True))]


def test_the_greater_lineage_tells_its_versions(peer: Any) -> None:
    """The other side, which is the lesser, then asks for its states."""
    b, _, _ = fork(peer)
    lesser = Versions((Version(0, 20, 9, "x"), Version(0, 20, 9, "x")), forked=True)
    assert b.hear("a", lesser) == [Send("a", Versions((b.version(3), b.version(3)), forked=True))]


def test_samples_decide_not_epochs(peer: Any) -> None:
    """A lineage of fewer but larger outer steps is the greater one."""
    b, _, _ = fork(peer)
    fewer_epochs = Versions((Version(0, 31, 1, "x"), Version(0, 30, 1, "x")), forked=True)
    assert b.said(b.hear("a", fewer_epochs)) == [Fetch((b.version(3), b.version(3)), whole=True)]


def test_whole_models_are_compared_not_shards(peer: Any) -> None:
    """A lineage that is ahead in one shard and behind in another wins or loses as a whole."""
    b, _, _ = fork(peer)
    mixed = Versions((Version(0, 70, 6, "x"), Version(0, 10, 1, "x")), forked=True)
    assert b.said(b.hear("a", mixed)) == [Fetch((b.version(3), b.version(3)), whole=True)]
    b, _, _ = fork(peer)
    mixed = Versions((Version(0, 40, 6, "x"), Version(0, 10, 1, "x")), forked=True)
    assert b.said(b.hear("a", mixed)) == [Versions((b.version(3), b.version(3)), forked=True)]


def test_equal_models_are_no_fork(peer: Any) -> None:
    """Nor is a difference along one lineage, or a vector of another length."""
    b, _, _ = fork(peer)
    assert b.hear("a", Versions(b.replica.versions, forked=True)) == []
    assert b.hear("a", Versions((b.version(9), b.version(2)), forked=False)) == []
    assert b.hear("a", Versions((Version(0, 99, 5, "x"),), forked=True)) == []


def test_versions_show_a_fork_that_their_sender_could_not_see(peer: Any) -> None:
    """The sender is behind the point where the lineages fork."""
    b, _, _ = fork(peer)
    theirs = Versions((Version(0, 99, 2, "other"), b.version(3)), forked=False)
    assert b.said(b.hear("a", theirs)) == [Fetch((b.version(3), b.version(3)), whole=True)]


def test_a_newcomer_that_holds_only_a_part_compares_nothing(peer: Any) -> None:
    """It has no whole model yet."""
    n = peer("n", epoch=None, live="", fragments=TWO)
    n.meet("a", model=ahead(n, 7), epochs=(7, 7))
    n.meet("c", model=ahead(n, 7), epochs=(7, 7))
    n.hear("a", n.state(0, 7))
    filled(n, n.state(0, 7))
    assert n.said(n.hear("c", n.contribution(n.version(7, "other")))) == []


# -- taking the greater lineage


def test_all_shards_that_differ_change_at_once(peer: Any) -> None:
    """The first of two shards changes nothing; with the last one both are accepted in one effect. Then the donor is
    asked for newer states."""
    b, theirs, (one, two) = fork(peer)
    b.hear("a", theirs)
    assert b.hear("a", one) == [fill(b, one)]
    assert filled(b, one) == []
    assert b.replica.versions == (b.version(3), b.version(3))
    assert b.hear("a", two) == [fill(b, two)]
    effects = filled(b, two)
    assert effects[0] == Accept(((0, "other"), (1, "other")))
    assert [e.kind for e in effects if isinstance(e, Note)] == ["fork"]
    assert [e for e in effects if isinstance(e, Send) and isinstance(e.message, Fetch)] == [
        Send("a", Fetch(theirs.versions))
    ]
    assert effects[-1] == Changed()
    assert b.replica.versions == theirs.versions
    assert b.replica.state(1) == two


def test_a_staged_state_is_not_filled_in_twice(peer: Any) -> None:
    b, theirs, (one, _) = fork(peer)
    b.hear("a", theirs)
    b.hear("a", one)
    filled(b, one)
    assert b.hear("a", one) == []


def test_a_shard_that_both_lineages_hold_alike_stays(peer: Any) -> None:
    b, theirs, (one, _) = fork(peer)
    b.hear("a", Versions((theirs.versions[0], b.version(3)), forked=True))
    b.hear("a", one)
    assert filled(b, one)[0] == Accept(((0, "other"),))
    assert b.replica.versions == (one.version, b.version(3))


def test_only_the_donors_states_are_staged(peer: Any) -> None:
    """A mixture of two peers' shards would be the state of no lineage."""
    b, theirs, (one, _) = fork(peer)
    b.meet("c")
    b.hear("a", theirs)
    assert b.hear("c", one) == []
    assert b.hear("c", b.state(0, 4)) == []


def test_a_newcomer_that_holds_a_part_takes_one_lineage_whole(peer: Any) -> None:
    """A part of one lineage and the rest of another never become a state."""
    n = peer("n", epoch=None, live="", fragments=TWO)
    n.meet("a", model=ahead(n, 7), epochs=(7, 7))
    n.hear("a", Versions((n.version(7),) * 2, forked=False))
    n.hear("a", n.state(0, 7))
    filled(n, n.state(0, 7))
    n.lose("a")
    n.meet("c", model=ahead(n, 7), epochs=(7, 7))
    theirs = Versions((n.version(6, "x"), n.version(6, "x")), forked=True)
    assert n.said(n.hear("c", theirs)) == [Fetch((n.version(7), None), whole=True)]
    states = [n.state(s, 6, version=n.version(6, "x"), history=((5, "y"), (6, "x"))) for s in (0, 1)]
    for state in states:
        n.hear("c", state)
        effects = filled(n, state)
    assert effects[0] == Accept(((0, "x"), (1, "x")))
    assert Ready() in effects


def test_states_newer_than_told_are_taken(peer: Any) -> None:
    """Their lineage is the greater one in any case."""
    b, theirs, (one, two) = fork(peer)
    b.hear("a", theirs)
    newer = replace(one, version=Version(0, 120, 6, "newer"), history={**one.history, 6: "newer"})
    for state in (newer, two):
        b.hear("a", state)
        effects = filled(b, state)
    assert effects[0] == Accept(((0, "newer"), (1, "other")))


def test_one_lineage_is_taken_at_a_time(peer: Any) -> None:
    """A second, greater one is only begun after the first is taken or given up."""
    b, theirs, _ = fork(peer)
    b.meet("c")
    b.hear("a", theirs)
    greater = Versions((Version(0, 500, 9, "y"), Version(0, 500, 9, "y")), forked=True)
    assert b.hear("c", greater) == []
    assert b.replica.catchup.donor == "a"


def test_a_plain_fetch_gives_way_to_a_fork(peer: Any) -> None:
    b, theirs, _ = fork(peer)
    b.replica.catchup.fetch("c", ahead(b, 4), b.now)
    assert b.said(b.hear("a", theirs)) == [Fetch((b.version(3), b.version(3)), whole=True)]


@pytest.mark.parametrize("lineage", [False, True])
def test_a_doubt_replaces_a_plain_fetch_but_not_a_change_of_lineage(peer: Any, lineage: bool) -> None:
    """A plain fetch was asked without the doubt; another lineage replaces all doubted shards anyway."""
    b, theirs, _ = fork(peer)
    if lineage:
        b.hear("a", theirs)
    else:
        b.replica.catchup.fetch("c", ahead(b, 4), b.now)
    effects = b.replica.mending.doubt(0, "a", b.now)
    assert effects == ([] if lineage else [Send("a", Fetch((None, b.version(3))))])


def test_nothing_is_appended_while_the_lineage_changes(peer: Any) -> None:
    """Not by this peer's rounds, nor by commits of the old lineage, nor by work under way."""
    b, theirs, _ = fork(peer)
    b.feed_tick()
    working = Commit(1, b.held, b.version(4), 0, "a", (), Plan(("a", "b"), ("a", "b")))
    b.hear("a", working)
    b.hear("a", theirs)
    assert b.feed(Applied(1, working.base, "d4")) == []
    assert b.hear("a", replace(working, shard=0)) == []
    own, theirs, _ = fork(peer)
    own.replica.logs[0].lead.holder = "b"
    own.hear("a", theirs)
    effects = [*own.contribute(0), *own.hear("a", own.contribution(own.held))]
    assert not [e for e in effects if isinstance(e, Average)]
    assert own.averages(own.pass_time(8.0)) == []


def test_a_claim_is_not_repeated_while_the_lineage_changes(peer: Any) -> None:
    """Nothing may be committed then."""
    b, theirs, _ = fork(peer, live="acd")
    b.contribute(0)
    b.lose("a")
    request = TakeOver(0, b.version(3), 1)
    assert to(b.pass_time(1.1), "d") == [request, replace(request, shard=1)]
    b.hear("c", theirs)
    assert to(b.pass_time(1.1), "d", TakeOver) == []


def test_a_mean_that_comes_back_while_the_lineage_changes_is_not_committed(peer: Any) -> None:
    b, theirs, _ = fork(peer)
    b.replica.logs[0].lead.holder = "b"
    b.contribute(0)
    effects = b.hear("a", b.contribution(b.held))
    b.hear("a", theirs)
    assert b.averaged(effects) == []
    assert b.replica.versions == (b.version(3), b.version(3))


def test_a_mean_that_came_while_another_lineage_was_taken_is_computed_again(peer: Any) -> None:
    """Once that is given up."""
    b, theirs, _ = fork(peer)
    b.replica.logs[0].lead.holder = "b"
    b.contribute(0)
    effects = b.hear("a", b.contribution(b.held))
    b.hear("a", theirs)
    b.averaged(effects)
    assert b.averages(b.lose("a")) == [["a", "b"]]


# -- asking again, and giving up


def test_the_donor_of_a_lineage_is_probed_at_every_tick(peer: Any) -> None:
    """Its death is noticed as soon as that of any peer that is waited for."""
    b, theirs, _ = fork(peer, live="acdefghij")
    b.hear("a", theirs)
    for _ in range(5):
        assert Send("a", Probe(b.replica.roster.mine)) in b.feed_tick()


def test_the_missing_states_of_a_lineage_are_asked_for_again(peer: Any) -> None:
    """A state may take longer than a fetch may stand still. Staged states are kept."""
    b, theirs, (one, two) = fork(peer)
    b.hear("a", theirs)
    b.now += 20.0
    b.hear("a", one)
    filled(b, one)
    assert asked_again(b, 29.0) == []
    assert asked_again(b, 2.0) == [Fetch((b.version(3), b.version(3)), whole=True, shards=(1,))]
    b.hear("a", two)
    assert filled(b, two)[0] == Accept(((0, "other"), (1, "other")))


def test_the_missing_states_of_a_lineage_are_asked_of_each_donor_in_turn(peer: Any) -> None:
    """One donor may be unable to send. States of any of them are taken."""
    b, theirs, (one, two) = fork(peer, live="ac")
    b.hear("a", theirs)
    b.hear("a", one)
    filled(b, one)
    for name in "ac":
        b.meet(name, model=model_version(theirs.versions), epochs=(3, 3))
    asked = fetches(b.pass_time(62.0))
    assert [(to, message.shards) for to, message in asked] == [("c", (1,)), ("a", (1,))]
    assert b.hear("c", two) == [fill(b, two)]
    assert filled(b, two)[0] == Accept(((0, "other"), (1, "other")))


def test_a_lineage_is_given_up_after_fetch_repeats_questions(peer: Any) -> None:
    """A state that arrives restarts the count."""
    b, theirs, (one, _) = fork(peer, fetch_repeats=2)
    b.hear("a", theirs)
    assert [m.shards for m in asked_again(b, 65.0)] == [(0, 1), (0, 1)]
    b.hear("a", one)
    filled(b, one)
    assert [m.shards for m in asked_again(b, 65.0)] == [(1,), (1,)]
    assert b.replica.catchup.donor is not None
    assert not any(m.whole for m in asked_again(b, 30.0))
    assert b.replica.catchup.donor is None
    assert not any(log.frozen for log in b.replica.logs)


def test_a_lineage_whose_donor_sends_nothing_new_is_given_up(peer: Any) -> None:
    """A staged state that comes again is no progress."""
    b, theirs, (one, _) = fork(peer)
    b.hear("a", theirs)
    b.hear("a", one)
    filled(b, one)
    for _ in range(32):
        b.pass_time(1.0)
        b.hear("a", one)
    assert b.replica.catchup.switching is None or not b.replica.catchup.switching.staged


def test_a_donor_that_holds_no_more_than_this_peer_is_given_up(peer: Any) -> None:
    """It has left the lineage whose versions it told."""
    b, theirs, _ = fork(peer)
    b.hear("a", theirs)
    b.meet("a", model=ahead(b, 3), epochs=(3, 3))
    assert fetches(b.pass_time(32.0)) == []
    assert b.replica.catchup.donor is None


def test_states_older_than_told_are_not_taken(peer: Any) -> None:
    """If the donor now holds less than it told, the change of lineage is given up."""
    b, theirs, _ = fork(peer)
    b.hear("a", theirs)
    poor = [b.state(s, 1, version=Version(0, 1, 1, "poor"), history=((1, "poor"),)) for s in (0, 1)]
    assert [b.hear("a", state) for state in poor] == [[], []]
    b.meet("a", model=ModelVersion(0, 2, 2, "poor"), epochs=(1, 1))
    b.pass_time(32.0)
    assert b.replica.versions == (b.version(3), b.version(3))
    assert not any(log.frozen for log in b.replica.logs)


def test_a_donor_that_changed_its_lineage_is_given_up(peer: Any) -> None:
    """Its states do not descend from the versions that it told."""
    b, theirs, (one, _) = fork(peer)
    b.hear("a", theirs)
    elsewhere = replace(one, version=Version(0, 150, 6, "y"), history={4: "z", 5: "else", 6: "y"})
    assert b.hear("a", elsewhere) == []
    assert b.replica.catchup.donor is None


def test_a_lineage_that_is_not_the_greater_one_any_more_is_given_up(peer: Any) -> None:
    """More samples in one shard do not make up for what another has lost."""
    b, _, (one, _) = fork(peer)
    b.hear("a", Versions((Version(0, 99, 5, "other"), Version(1, 0, 0, "new")), forked=True))
    assert b.replica.catchup.donor is not None
    b.replica.logs[1].state = replace(b.replica.state(1), version=Version(1, 70, 9, "newer"))
    b.hear("a", one)
    filled(b, one)
    new = b.state(1, 0, version=Version(1, 0, 0, "new"))
    b.hear("a", new)
    assert filled(b, new) == []
    assert not any(log.frozen for log in b.replica.logs)


def test_the_old_lineage_goes_on_when_the_other_is_given_up(peer: Any) -> None:
    """The donor died before the last shard came: nothing has changed, and rounds close again."""
    b, theirs, (one, _) = fork(peer)
    b.replica.logs[0].lead.holder = "b"
    b.hear("a", theirs)
    b.contribute(0)
    b.hear("a", one)
    filled(b, one)
    effects = b.lose("a")
    assert b.replica.versions == (b.version(3), b.version(3))
    assert b.averages(effects) == [["b"]]
    assert filled(b, one) == []


def test_a_state_that_comes_late_ends_no_fetch(peer: Any) -> None:
    """It was sent before its donor told its versions, and does not show the donor's lineage."""
    b, theirs, (one, _) = fork(peer)
    b.hear("a", theirs)
    old = b.state(0, 4, version=Version(0, 80, 4, "x4"), history=((2, "d2"), (3, "x3"), (4, "x4")))
    assert b.hear("a", old) == []
    assert b.hear("a", one) == [fill(b, one)]
    n, _ = gathering(peer)
    assert n.hear("a", n.state(0, 6)) == []  # it can't tell whose ancestor this is
    assert n.replica.catchup.gathering is not None
    assert n.hear("a", n.state(0, 7)) == [fill(n, n.state(0, 7))]
    far = peer("n", epoch=1, fragments=FIVE)
    far.now += 2.0
    far.meet("a", model=ahead(far, 20), epochs=(20,) * 5)
    far.now += 2.0
    far.meet("a", model=ahead(far, 20), epochs=(20,) * 5)
    far.hear("a", Versions((far.version(20),) * 5, forked=False))
    assert far.replica.catchup.gathering.vector is not None
    assert far.hear("a", far.state(0, 15)) == [fill(far, far.state(0, 15))]
    assert far.replica.catchup.gathering is not None


@pytest.mark.parametrize("revision", [FOUNDED, Revision(1, outer_lr=0.5)])
def test_after_a_change_of_lineage_peers_are_compared_with_the_new_one_alone(peer: Any, revision: Revision) -> None:
    """The new state is at unlike epochs. A peer of its lineage that waits for the last commit counts fewer samples than
    this peer did before. A revision that comes with the new state is told of before the state is."""
    b = peer("b", epoch=3, group="ab", live="a", fragments=((0, 1),))
    ahead, level = Version(0, 45, 4, "x4"), Version(0, 25, 3, "x3")
    history = ((2, "d2"), (3, "x3"))
    one = b.state(0, 4, version=ahead, history=(*history, (4, "x4")))
    b.meet("c", model=ModelVersion(0, 50, 6, "c"), epochs=(3,))
    assert b.replica.roster.elsewhere(b.replica.roster.summary("c"))
    b.hear("a", Versions((ahead, level), forked=True))
    for state in (replace(one, revision=revision), b.state(1, 3, version=level, history=history)):
        b.hear("a", state)
        filled(b, state)
    assert b.replica.versions == (ahead, level)
    assert not b.replica.roster.elsewhere(b.replica.roster.summary("c"))


def test_a_round_that_closes_during_a_change_of_lineage_names_the_peers_of_the_new_one(peer: Any) -> None:
    """The first shard's new state descends from the old one, and its round has all contributions already."""
    b = peer("b", epoch=3, group="ad", live="ad", fragments=TWO, role="aggregator")
    newer, other = Version(0, 50, 4, "n4"), Version(0, 25, 3, "x3")
    state = b.state(0, 4, version=newer, plan=Plan(("d",), ("b",)))
    b.meet("c", model=ModelVersion(0, 55, 6, "c"), epochs=(3, 3))
    b.hear("d", b.contribution(newer))
    b.hear("a", Versions((newer, other), forked=True))
    for taken in (b.state(1, 3, version=other, history=((2, "d2"), (3, "x3"))), state):
        b.hear("a", taken)
        effects = filled(b, taken)
    assert any(isinstance(effect, Average) for effect in effects)
    assert b.replica.logs[0].round.draft.plan.group == ("a", "c", "d")
