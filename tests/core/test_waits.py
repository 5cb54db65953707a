"""Which peers a synchronous round waits for, for how long, and how many contributions it needs to close."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_diloco.core.events import Average, Found, Note, Pause, Restore, Revised, Stepped
from p2p_diloco.core.messages import Leave
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.version import ModelVersion, model_version


def round_with(a: Any, *others: str) -> float:
    """The next round, in which others contribute at once; returns how long it waited for the rest."""
    began, effects = a.now, list[Any]()
    for name in others:
        effects += a.hear(name, a.contribution(a.held, a.replica.epoch + 1))
    effects += a.contribute()
    while not a.averages(effects):
        assert a.now < began + 100.0
        effects += a.pass_time(0.5)
    assert a.averages(effects) == [["a", *others]]
    held = a.now - began
    a.averaged([e for e in effects if isinstance(e, Average)], a.version(a.replica.epoch + 1).digest)
    return round(held, 1)  # type: ignore[no-any-return]


# -- shards of one fragment


def test_no_round_closes_while_its_shard_is_ahead_of_the_fragment(peer: Any) -> None:
    """Otherwise a member could drive one shard ahead alone: all others send to the lowest shards first, and would seem
    to miss each of its rounds. The round's clock begins when the other shards have come."""
    a = peer("a", group="abc", round_timeout=8.0)
    attendance, another_shard = a.replica.attendances[0], 9
    attendance.at(another_shard, 0, a.now)
    for name in "bc":
        assert a.hear(name, a.contribution(a.held)) == []
    assert a.averages(a.pass_time(9.0)) == []
    a.feed(Stepped(0.5))
    attendance.at(another_shard, 1, a.now)
    assert a.averages(a.pass_time(7.0)) == []
    assert a.averages(a.pass_time(2.0)) == [["b", "c"]]


def test_a_shard_whose_run_has_ended_holds_up_no_other(peer: Any) -> None:
    """It never gets any further."""
    a = peer("a", group="ab", live="b")
    a.replica.attendances[0].at(9, 0, a.now)
    a.contribute()
    assert a.hear("b", a.contribution(a.held)) == []
    a.replica.attendances[0].at(9, None, a.now)
    assert a.averages(a.pass_time(1.0)) == [["a", "b"]]


# -- how many contributions a round needs


def test_no_round_closes_with_fewer_contributions_than_min_peers(peer: Any) -> None:
    """Not even after its deadline."""
    a = peer("a", group="a", live="d", min_peers=2)
    assert a.contribute() == []
    assert a.averages(a.pass_time(60.0)) == []
    assert isinstance(a.hear("d", a.contribution(a.held))[-1], Average)


def test_only_the_first_round_needs_start_peers(peer: Any) -> None:
    a = peer("a", epoch=None, group="", start_peers=2)
    a.feed(Found(0, ("zero",)))
    assert a.contribute() == []
    a.meet("b", epochs=(0,))
    assert a.averages(a.pass_time(60.0)) == []
    effects = a.hear("b", a.contribution(a.held))
    assert isinstance(effects[-1], Average)
    a.averaged(effects)
    a.lose("b")
    assert isinstance(a.contribute()[-1], Average)


def test_the_first_round_needs_the_greater_of_min_peers_and_start_peers(peer: Any) -> None:
    a = peer("a", epoch=None, group="", start_peers=1, min_peers=2)
    a.feed(Found(0, ("zero",)))
    assert a.contribute() == []


@pytest.mark.parametrize(("names", "least"), [("a", 1), ("ab", 2), ("abc", 2), ("abcd", 2), ("abcde", 3)])
def test_a_quorum_is_half_of_the_participants_and_at_least_two(peer: Any, names: str, least: int) -> None:
    """With fewer contributions no outer step is taken, however late: it would follow one peer's data. A lone peer goes
    on alone."""
    for came in range(1, len(names) + 1):
        a = peer("a", group=names, round_timeout=5.0)
        assert a.replica.logs[0].waits.quorum(a.now) == least
        effects = []
        for name in names[1:came]:
            effects += a.hear(name, a.contribution(a.held))
        effects += a.contribute()
        effects += a.pass_time(9.0)
        assert a.averages(effects) == ([sorted(names[:came])] if came >= least else [])


@pytest.mark.parametrize(("said", "goes_on"), [(None, False), (2, False), (1, True)])
def test_one_of_a_pair_goes_on_alone_only_if_the_founder_says_so(peer: Any, said: int | None, goes_on: bool) -> None:
    """The other one lives, takes part, and stands still. The word counts from the present round on; of three, one is
    still not enough. It waits for the timeout even so."""
    for names, alone in (("ab", goes_on), ("abc", False)):
        a = peer("a", group=names, round_timeout=5.0)
        effects = [*a.contribute(), *a.pass_time(9.0)]
        assert a.averages(effects) == []
        if said is not None:
            effects = a.feed(Revised(Revision(1, min_peers=said)))
        assert a.averages([*effects, *a.pass_time(1.0)]) == ([["a"]] if alone else [])
    a = peer("a", group="ab", round_timeout=5.0)
    if said is not None:
        a.feed(Revised(Revision(1, min_peers=said)))
    a.contribute()
    assert a.averages(a.pass_time(4.0)) == []


def test_only_the_missing_members_of_the_group_are_asked(peer: Any) -> None:
    """Others that work are asked only where no member is missing and more contributions are needed."""
    a = peer("a", group="ab", live="bc", min_peers=2)
    a.meet("c", epochs=(0,))
    waits = a.replica.logs[0].waits
    assert waits.to_ask() == ["a", "b"]
    a.contribute()
    a.meet("b", idle=True)
    assert waits.to_ask() == ["c"]
    a.hear("b", a.contribution(a.held))
    assert waits.to_ask() == []


@pytest.mark.parametrize("gone", ["dead", "left", "idle"])
def test_a_quorum_does_not_count_peers_that_are_gone(peer: Any, gone: str) -> None:
    """Two of five are too few; two of four are half; the last peer is alone."""
    for names, came, left in (("abcde", "ab", "c"), ("ab", "a", "b")):
        a = peer("a", group=names, round_timeout=5.0)
        effects = a.contribute()
        for name in came[1:]:
            effects += a.hear(name, a.contribution(a.held))
        effects += a.pass_time(6.0)
        assert a.averages(effects) == []
        match gone:
            case "dead":
                effects = a.lose(left)
            case "left":
                effects = a.hear(left, Leave(1))
            case _:
                effects = a.meet(left, idle=True)
        assert a.averages(effects) == [[*came]]


def test_a_quorum_does_not_count_peers_past_their_grace(peer: Any) -> None:
    """Four are named, and three of them hold no base: the remaining one is alone."""
    a = peer("a", group="abcd", live="", epoch=5, round_timeout=60.0)
    for name in "bcd":
        a.meet(name, epochs=(3,), model=model_version([a.version(3)]))
    a.contribute()
    assert a.averages(a.pass_time(1.9)) == []
    assert a.averages(a.pass_time(0.2)) == [["a"]]


def test_a_quorum_is_at_least_min_peers(peer: Any) -> None:
    assert peer("a", group="ab", min_peers=3).replica.logs[0].waits.quorum(100.0) == 3
    assert peer("a", group="abcdefgh", min_peers=3).replica.logs[0].waits.quorum(100.0) == 4


def test_a_quorum_does_not_close_a_round_before_its_time(peer: Any) -> None:
    """The missing peers are waited for."""
    a = peer("a", group="abc", round_timeout=5.0)
    a.hear("b", a.contribution(a.held))
    a.contribute()
    assert a.averages(a.pass_time(4.9)) == []
    assert a.averages(a.pass_time(0.2)) == [["a", "b"]]


# -- the deadline


def test_a_round_closes_at_round_timeout_with_what_came(peer: Any) -> None:
    """A live peer that makes progress is waited for until then."""
    a = peer("a", round_timeout=5.5)
    opened = a.now
    a.hear("b", a.contribution(a.held))
    assert a.contribute() == []
    assert a.averages(a.pass_time(5.4)) == []
    assert a.averages(a.pass_time(0.2)) == [["a", "b"]]
    assert a.replica.logs[0].waits.deadline == opened + 5.5


def test_round_timeout_counts_from_the_first_contribution(peer: Any) -> None:
    """Not from the last one, and not from the beginning of the epoch."""
    a = peer("a", round_timeout=5.5)
    a.pass_time(4.0)
    a.hear("b", a.contribution(a.held))
    a.pass_time(3.0)
    assert a.contribute() == []
    assert a.averages(a.pass_time(2.4)) == []
    assert a.averages(a.pass_time(0.2)) == [["a", "b"]]


def test_a_round_waits_for_its_aggregator_while_that_pauses(peer: Any) -> None:
    """As long as for any other pausing peer: back in time it is counted; later the other two are a quorum without
    it."""
    for pause, counted in ((6.5, ["a", "b", "c"]), (7.5, ["b", "c"])):
        a = peer("a", group="abc", round_timeout=60.0, pause_timeout=7.0)
        a.feed(Pause(True))
        effects = [*a.hear("b", a.contribution(a.held)), *a.hear("c", a.contribution(a.held)), *a.pass_time(pause)]
        a.feed(Pause(False))
        effects += a.contribute()
        assert a.averages(effects) == [counted]


# -- peers that are not waited for


@pytest.mark.parametrize("why", ["idle", "dead", "left"])
def test_a_round_does_not_wait_for_a_peer_that_is_idle_dead_or_gone(peer: Any, why: str) -> None:
    a = peer("a")
    a.contribute()
    a.hear("b", a.contribution(a.held))
    match why:
        case "idle":
            effects = a.meet("c", idle=True)
        case "dead":
            effects = a.lose("c")
        case "left":
            effects = a.hear("c", Leave(1))
    assert isinstance(effects[-1], Average)
    assert [name for name, _ in effects[-1].contributions] == ["a", "b"]


def test_a_round_waits_again_for_a_peer_that_is_idle_no_more(peer: Any) -> None:
    """A peer that was idle may resume while the round is open."""
    a = peer("a", group="abc", min_peers=2)
    a.contribute()
    a.meet("b", idle=True)
    a.meet("b", idle=False)
    assert a.hear("c", a.contribution(a.held)) == []


def test_a_round_does_not_wait_for_a_peer_without_trainer(peer: Any) -> None:
    """The plan names it because it trained in an earlier life."""
    a = peer("a", group="ab", min_peers=1)
    a.meet("b", role="aggregator", incarnation=2)
    assert a.replica.logs[0].waited_for() == ["a"]


def test_a_worker_that_misses_rounds_in_a_row_is_noted_once(peer: Any) -> None:
    """It says that it works and holds each base, and contributes nothing."""
    a = peer("a", group="abc", succession="a", round_timeout=2.0)
    notes = list[str]()
    for _ in range(5):
        for name in "bc":
            a.meet(name, epochs=(a.replica.epoch,), eligible=False, model=model_version([a.held]))
        effects = [*a.hear("b", a.contribution(a.held, a.replica.epoch + 1)), *a.contribute()]
        for _ in range(20):
            if a.averages(effects):
                break
            effects += a.pass_time(0.5)
        notes += [e.text for e in effects if isinstance(e, Note) and e.kind == "missed"]
        a.averaged([e for e in effects if isinstance(e, Average)], a.version(a.replica.epoch + 1).digest)
        notes += [e.text for e in a.pass_time(1.0) if isinstance(e, Note) and e.kind == "missed"]
    text = "says that it works, and has missed 2 rounds in a row: rounds wait for it only briefly (noted once)"
    assert notes == [f"c {text}"]


# -- peers that are waited for during a grace


def test_a_named_peer_that_may_not_hold_the_base_has_a_grace(peer: Any) -> None:
    """It begins with the first contribution; the peer may be fetching what the others have."""
    a = peer("a", group="abd", live="b", epoch=5, round_timeout=60.0)
    a.meet("d", epochs=(3,), model=model_version([a.version(3)]))
    a.now += 0.3
    a.hear("b", a.contribution(a.held))
    assert a.contribute() == []
    assert a.replica.logs[0].closes_at() == a.now + a.rules.settle
    assert a.averages(a.pass_time(1.95)) == []
    assert a.averages(a.pass_time(0.1)) == [["a", "b"]]


def test_a_peer_that_misses_its_grace_is_left_out_until_it_shows_a_later_epoch(peer: Any) -> None:
    """Its next grace is twice as long, so a peer that fetches for long costs the others one grace each time, ever less
    often."""
    a = peer("a", group="abd", succession="a", live="", epoch=5, round_timeout=600.0)
    a.meet("b", eligible=False)
    shown, waited, group = 3, list[float](), a.replica.logs[0]
    for _ in range(3):
        a.meet("d", epochs=(shown,), eligible=False, model=model_version([a.version(shown)]))
        if shown > 3:
            waited.append(round_with(a, "b"))  # its Summary came after the plan
        assert group.state.plan.group == ("a", "b", "d")
        waited.append(round_with(a, "b"))
        assert group.state.plan.group == ("a", "b")
        waited.append(round_with(a, "b"))
        assert group.state.plan.group == ("a", "b")
        shown = a.held.epoch - 1
    assert waited == [2.0, 0.0, 0.0, 4.0, 0.0, 0.0, 8.0, 0.0]


def test_a_peer_left_out_of_one_shard_has_a_grace_in_the_others(peer: Any) -> None:
    """Not another round_timeout: the shards of a fragment share their attendance."""
    a = peer("a", group="abc", fragments=((0, 1),), round_timeout=20.0)
    a.hear("b", a.contribution(a.held), after=0.3)
    a.pass_time(19.0)
    a.feed(Stepped(0.5))
    a.contribute(0, 1)
    a.hear("b", a.contribution(a.held, shard=1))
    effects = a.pass_time(1.1)
    assert a.averages(effects) == [["a", "b"]]
    a.averaged([e for e in effects if isinstance(e, Average)])
    log = a.replica.logs[1]
    assert log.waited_for() == ["c"]
    assert log.closes_at() == a.now + 2 * a.rules.settle
    assert a.averages(a.pass_time(3.9)) == []
    assert a.averages(a.pass_time(0.2)) == [["a", "b"]]


# -- peers that are sure to come


def test_a_named_peer_that_was_not_met_is_waited_for_until_it_falls_silent(peer: Any) -> None:
    """Longer than a grace, because the peer that named it has met it."""
    a = peer("a", group="abx", live="b", round_timeout=60.0)
    a.hear("b", a.contribution(a.held))
    a.contribute()
    assert a.averages(a.pass_time(9.0)) == []
    assert a.averages(a.pass_time(3.0)) == [["a", "b"]]


def test_a_named_peer_that_was_not_met_is_waited_for_until_a_dial_is_refused(peer: Any) -> None:
    a = peer("a", group="abc", live="b", round_timeout=60.0)
    a.contribute()
    assert not [e for e in a.hear("b", a.contribution(a.held)) if isinstance(e, Average)]
    assert a.replica.logs[0].waited_for() == ["c"]
    assert [e for e in a.lose("c") if isinstance(e, Average)]


def test_a_peer_named_in_one_shard_is_waited_for_in_all_of_the_fragment(peer: Any) -> None:
    """A peer that was counted in one shard is expected in all: no shard's round closes without it."""
    a = peer("a", epoch=None, group="", live="", fragments=((0, 1), (2,)), round_timeout=60.0)
    plans = ("abd", "ab", "ab")
    a.feed(Restore(tuple(a.state(s, 5, plan=a.plan(group, "a")) for s, group in enumerate(plans))))
    a.meet("b")
    a.meet("d", epochs=(4, 4), model=ModelVersion())
    assert [log.waited_for() for log in a.replica.logs] == [["a", "b", "d"], ["a", "b", "d"], ["a", "b"]]


def test_a_contribution_to_one_shard_makes_its_author_sure_in_the_others(peer: Any) -> None:
    """It holds the base, whatever its last Summary said: no grace ends its turn."""
    a = peer("a", group="ab", live="", fragments=((0, 1),), epoch=5, round_timeout=60.0)
    a.meet("b", epochs=(3,), model=model_version([a.version(3)] * 2))
    a.contribute(0, 1)
    a.hear("b", a.contribution(a.held))
    assert a.replica.logs[1].closes_at() is None
    assert a.averages(a.pass_time(9.0)) == []


def test_a_late_contribution_brings_its_author_into_the_next_round(peer: Any) -> None:
    """It will soon hold the next base, so it is named again before its next heartbeat."""
    a = peer("a", group="abc", succession="a", live="", round_timeout=5.0)
    for name in "bc":
        a.meet(name, eligible=False)
    assert round_with(a, "b", "c") == 0.0
    assert round_with(a, "b") == 5.0
    log = a.replica.logs[0]
    assert "c" not in {*log.state.plan.group, *log.waited_for()}
    a.hear("c", a.contribution(a.version(2)))
    assert round_with(a, "b") == 5.0
    a.hear("c", a.contribution(a.version(3)))
    assert round_with(a, "b", "c") == 0.0
    assert "c" in log.state.plan.group


def test_a_peer_that_restarted_is_not_sure_to_come(peer: Any) -> None:
    """The messages of its earlier life prove nothing."""
    a = peer("a", group="ab", live="")
    a.hear("b", a.contribution(a.held))
    a.meet("b")
    assert a.replica.logs[0].attendance.sure("b", 1)
    a.meet("b", incarnation=2, **a.blank())
    assert not a.replica.logs[0].attendance.sure("b", 1)


def test_attendance_is_forgotten_with_its_lineage(peer: Any) -> None:
    """Another lineage has other epochs. A state that descends from the present one is of the same lineage."""
    b = peer("b", group="abc", epoch=5)
    b.hear("a", b.contribution(b.version(9)))
    b.replica.logs[0].attendance.shows("a", 8)
    b.feed(Restore((b.state(0, 7),)))
    assert b.replica.logs[0].attendance.sure("a", 8)
    b.feed(Restore((b.state(0, 7, version=b.version(7, "x"), history=((7, "x"),)),)))
    assert not b.replica.logs[0].attendance.sure("a", 8)
