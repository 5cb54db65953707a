"""Which peers take part in a fragment's rounds: what a peer sent decides whether it is named and waited for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from p2p_diloco.core.attendance import DOUBLINGS_MAX, ROUNDS_KEPT, STRANGERS_MAX, Attendance
from p2p_diloco.core.messages import Commit, Counted, Plan, Summary
from p2p_diloco.core.roster import Roster
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ContributionId, ModelVersion, Version

RULES = Rules(run="run", fragments=((0, 1), (2,)), heartbeat_interval=1.0)
SETTLE = 2.0
ID = ContributionId(1, 1)


def plan(group: str) -> Plan:
    return Plan(tuple(group), ("a",))


def commit(base: int, counted: str, by: str = "a") -> Commit:
    """The commit that leads a shard from epoch ``base`` to the next."""
    listed = tuple(Counted(peer, ID, 1.0, 1) for peer in counted)
    return Commit(0, Version(0, base, base, ""), Version(0, base + 1, base + 1, ""), 0, by, listed, plan("a"))


def attendance(fragment: int = 0, **said: int) -> Attendance:
    """The attendance of the peer "a", at epoch 5. ``said``: the epoch in a live worker's last Summary; its other
    fragment is at 0 or more."""
    assert RULES.settle == SETTLE
    mine = Summary(1, "worker", True, ModelVersion(), (5, 5), idle=False)
    made = Attendance(fragment, RULES, Roster("a", RULES, mine))
    for peer, epoch in said.items():
        says(made, peer, epochs=(epoch, 0))
    return made


def says(attendance: Attendance, peer: str, **what: object) -> None:
    """The peer sends its Summary."""
    plain = Summary(1, "worker", True, ModelVersion(), (0, 0), idle=False)
    attendance.roster.heard(peer)
    attendance.roster.summarized(peer, replace(plain, **what))  # type: ignore[arg-type]


def round_of(attendance: Attendance, base: int, group: str, counted: str, now: float = 0.0) -> None:
    """A shard whose plan names a group moves on from an epoch by a commit."""
    attendance.appended(plan(group), commit(base, counted), now)


# -- taking part


def test_a_named_peer_takes_part() -> None:
    """Whatever epoch it holds. Dead and idle peers are left out by the shard."""
    assert attendance(b=0).group(plan("bc"), 7) == ["b", "c"]


def test_a_peer_named_in_one_shard_takes_part_in_all_of_the_fragment() -> None:
    """For the same epoch; another shard's plan for an earlier or later epoch does not count."""
    a = attendance()
    a.planned(plan("ab"), 7)
    a.planned(plan("c"), 7)
    a.planned(plan("d"), 6)
    assert a.group(plan("e"), 7) == ["a", "b", "c", "e"]
    assert a.group(plan("e"), 8) == ["e"]
    a.planned(plan("b"), 8)
    a.planned(plan("b"), 7)
    assert a.group(plan("e"), 8) == ["b", "e"]
    assert a.group(plan("e"), 7) == ["a", "c", "e"]


def test_a_worker_that_holds_the_base_takes_part() -> None:
    """Whether named or not, this peer included. A worker that holds an earlier epoch does not take part."""
    a = attendance(b=5, c=9, d=4)
    round_of(a, 2, "", "bcd")
    assert a.group(plan(""), 5) == ["a", "b", "c"]
    assert a.newcomers(plan(""), 5) == []


def test_a_newcomer_takes_part_once_it_is_named_or_has_contributed() -> None:
    """It has begun its steps in the midst of the round, so that the others would stand still until it has made all of
    them. Until then it has missed nothing, and the next commit names it."""
    a = attendance(b=5, c=4)
    assert (a.group(plan("a"), 5), a.newcomers(plan("a"), 5)) == (["a"], ["b"])
    assert (a.group(plan("ab"), 5), a.newcomers(plan("ab"), 5)) == (["a", "b"], [])
    round_of(a, 5, "a", "a")
    assert a.names("b", plan("a"), 6, "a")
    a.shows("b", 5)
    assert (a.group(plan("a"), 5), a.newcomers(plan("a"), 5)) == (["a", "b"], [])


def test_a_peer_that_came_in_an_earlier_round_is_no_newcomer() -> None:
    """It may have fetched a state that was one commit old, and sent nothing to this aggregator yet. One that restarts
    is a newcomer again."""
    a = attendance(b=4)
    says(a, "b", epochs=(5, 0))
    assert (a.group(plan("a"), 5), a.newcomers(plan("a"), 5)) == (["a", "b"], [])
    says(a, "b", epochs=(5, 0), incarnation=2)
    assert (a.group(plan("a"), 5), a.newcomers(plan("a"), 5)) == (["a"], ["b"])


@pytest.mark.parametrize("what", [{"idle": True}, {"role": "aggregator"}, {"epochs": ()}, {"model": ModelVersion(9)}])
def test_a_peer_that_does_not_work_here_takes_part_only_if_it_is_named(what: dict[str, object]) -> None:
    """It is idle, has no trainer or no state, or is on another lineage."""
    a = attendance(b=5)
    round_of(a, 2, "", "bz")
    a.shows("z", 5)
    says(a, "z", **{"epochs": (5, 0), **what})
    assert a.group(plan("a"), 5) == ["a", "b"]
    assert a.group(plan("az"), 5) == ["a", "b", "z"]


def test_only_the_epoch_of_this_fragment_counts() -> None:
    assert attendance(1, b=5).group(plan(""), 5) == ["a"]


@pytest.mark.parametrize("epoch", [0, 1])
def test_the_first_epochs_count_like_any_other(epoch: int) -> None:
    """A peer is named for them, or shows that it holds them and no more."""
    a = attendance()
    a.planned(plan("d"), epoch)
    assert a.is_named("d", plan(""), epoch)
    a.shows("z", epoch)
    assert [a.sure("z", at) for at in (epoch, epoch + 1)] == [True, False]


def test_a_peer_is_named_by_the_plan_of_its_shard_or_of_another_at_the_same_epoch() -> None:
    a = attendance()
    a.planned(plan("d"), 5)
    assert [a.is_named(peer, plan("ab"), 5) for peer in "abcd"] == [True, True, False, True]
    assert not a.is_named("d", plan("ab"), 6)


# -- being sure to contribute


def test_a_peer_that_holds_the_base_is_sure() -> None:
    """Its Summary, its messages, or a commit that it wrote can show that it holds the base."""
    a = attendance(b=7, c=6)
    a.shows("d", 7)
    a.appended(plan(""), commit(6, "", by="e"), 0.0)
    assert [p for p in "abcdef" if a.sure(p, 7)] == ["b", "d", "e"]


def test_an_older_message_that_comes_late_takes_nothing_back() -> None:
    a = attendance()
    a.shows("b", 7)
    a.shows("b", 3)
    assert a.sure("b", 7)


def test_a_peer_that_the_base_counts_is_sure() -> None:
    """It only waits for that commit. A peer counted only by an earlier commit may not have received any since."""
    a = attendance()
    round_of(a, 6, "bc", "bc")
    assert a.sure("b", 7)
    round_of(a, 7, "bc", "c")
    assert not a.sure("b", 8)


def test_a_count_in_one_shard_holds_for_the_others() -> None:
    """A later commit of a shard that is behind does not lower it."""
    a = attendance()
    round_of(a, 7, "b", "b")
    round_of(a, 6, "b", "b")
    assert a.sure("b", 8)


def test_a_peer_left_out_of_one_shard_is_not_sure_in_the_others() -> None:
    """In the same round, whatever it holds: the other shards wait for it only for a grace. In the next round it may be
    sure again."""
    a = attendance(b=7)
    assert a.sure("b", 7)
    round_of(a, 7, "ab", "a")
    assert not a.sure("b", 7)
    a.shows("b", 8)
    assert not a.sure("b", 7)
    assert a.sure("b", 8)


# -- being named


def test_a_contributor_is_named() -> None:
    """Whatever was known of it before."""
    a = attendance()
    round_of(a, 6, "b", "")
    assert a.names("b", plan("b"), 7, "b")


def test_a_peer_that_holds_a_state_is_named_however_far_behind() -> None:
    """Until a round that named it has closed without it. A peer without a state is not named."""
    a = attendance(b=0)
    assert a.names("b", plan("a"), 1000, "a")
    assert not a.names("c", plan("a"), 1000, "a")


def test_an_expected_peer_that_did_not_contribute_is_not_named_again() -> None:
    """A plan named it, this shard's or another's, or it holds the base."""
    a = attendance(b=5, c=5, d=4)
    round_of(a, 2, "", "c")
    a.planned(plan("d"), 5)
    assert not any(a.names(p, plan("ab"), 5, "a") for p in "bcd")


def test_a_peer_that_missed_a_round_is_named_again_once_it_shows_a_later_epoch() -> None:
    """Later than the epoch of the round that it missed, after any number of rounds, and by any kind of evidence."""
    a = attendance(b=5)
    round_of(a, 4, "ab", "ab")
    round_of(a, 5, "ab", "a")
    assert not any(a.names("b", plan("a"), epoch, "a") for epoch in (6, 9))
    a.shows("b", 6)
    assert a.names("b", plan("a"), 9, "a")
    assert a.names("b", plan("a"), 6, "a") is False  # it takes part in the round on 6, and did not contribute


def test_a_peer_that_is_ahead_is_named_though_it_did_not_contribute() -> None:
    """It has the commit already."""
    assert attendance(b=6).names("b", plan("ab"), 5, "a")


# -- the grace of the others


def test_a_grace_is_settle_or_a_usual_round_if_that_is_longer() -> None:
    """Until the length of a round is known, it is settle."""
    a = attendance()
    assert a.waits_until("b", 100.0) == 100.0 + SETTLE
    take_rounds(a, [0.5] * 3)
    assert a.waits_until("b", 100.0) == 100.0 + SETTLE
    take_rounds(a, [30.0] * 5, base=20)
    assert a.waits_until("b", 100.0) == 130.0


def take_rounds(attendance: Attendance, lasting: Iterable[float], base: int = 10, group: str = "a") -> None:
    """Rounds on epoch ``base`` and the following ones, which count only "a"; the others of the group miss them."""
    now = 1000.0
    round_of(attendance, base - 1, group, "a", now)
    for epoch, seconds in enumerate(lasting, base):
        now += seconds
        round_of(attendance, epoch, group, "a", now)


def test_a_grace_doubles_with_each_miss_in_a_row() -> None:
    """It counts from the miss, or from when the round opened if that is later. The doublings are bounded."""
    a = attendance()
    ends = []
    for epoch in range(10, 17):
        a.planned(plan("b"), epoch)
        round_of(a, epoch, "ab", "a", now=50.0)
        ends.append(a.waits_until("b", 100.0))
    assert ends == [100.0 + SETTLE * times for times in (2, 4, 8, 16, 32, 32, 32)]
    assert DOUBLINGS_MAX == 5
    assert a.waits_until("b", 40.0) == 50.0 + 32 * SETTLE


def test_a_miss_of_one_round_in_two_shards_is_one() -> None:
    """They are one round. A shard that is behind does not change a later miss."""
    a = attendance()
    for now, base in ((50.0, 10), (60.0, 10), (70.0, 9)):
        round_of(a, base, "ab", "a", now)
    assert a.waits_until("b", 0.0) == 50.0 + 2 * SETTLE


def test_a_count_ends_the_misses_in_a_row() -> None:
    """The next miss is a first one again."""
    a = attendance()
    for base in (10, 11, 12):
        round_of(a, base, "ab", "a", now=50.0)
    round_of(a, 13, "a", "ab", now=50.0)
    assert a.waits_until("b", 100.0) == 100.0 + SETTLE
    round_of(a, 14, "ab", "a", now=50.0)
    assert a.waits_until("b", 100.0) == 100.0 + 2 * SETTLE


def test_after_a_peer_that_contributes_nothing_later_peers_of_its_grant_are_waited_for_only_briefly() -> None:
    """They say that they work, as it did. After two such peers that goes for all of their grant, and for no other."""
    a = attendance(b=9, c=9, d=9, e=9, f=9)
    for peer, grant, when in (("b", "one", 0.0), ("c", "one", 0.0), ("d", "other", 0.0)):
        a.roster.granted(peer, grant, when)
    for base in (5, 6):
        round_of(a, base, "ab", "a", now=1.0)
    for peer, grant in (("e", "one"), ("f", "other")):
        a.roster.granted(peer, grant, 2.0)
    assert [p for p in "bcdef" if a.sure(p, 7)] == ["c", "d", "f"]
    for base in (7, 8):
        round_of(a, base, "ac", "a", now=3.0)
    a.roster.granted("g", "one", 2.0)
    says(a, "g", epochs=(9, 0))
    assert [p for p in "bcdefg" if a.sure(p, 9)] == ["d", "f"]
    a.roster.expire(3.0 + RULES.behind_for)
    assert [p for p in "bcdefg" if a.sure(p, 9)] == ["d", "e", "f", "g"]


def test_a_peer_that_was_not_expected_misses_nothing() -> None:
    """It holds a state, but no plan named it for the round."""
    a = attendance(b=3)
    round_of(a, 10, "a", "a", now=50.0)
    assert a.waits_until("b", 0.0) == SETTLE


def test_a_commit_that_counts_nobody_is_missed_by_nobody() -> None:
    """It mends damaged tensors. It is no usual round either."""
    a = attendance(b=10)
    round_of(a, 9, "ab", "ab", now=10.0)
    round_of(a, 10, "ab", "", now=90.0)
    round_of(a, 11, "ab", "a", now=91.0)
    assert not a.misses_often("b")
    assert a.waits_until("b", 0.0) == 91.0 + 2 * SETTLE
    round_of(a, 12, "ab", "ab", now=92.0)
    assert a.grace == SETTLE


def test_the_usual_round_is_the_median_of_the_last() -> None:
    """One long round hardly counts, and old rounds do not count at all."""
    a = attendance()
    take_rounds(a, [100.0] * ROUNDS_KEPT + [10.0] * (ROUNDS_KEPT // 2 + 1) + [300.0] * (ROUNDS_KEPT // 2))
    assert a.grace == 10.0


def test_a_round_that_a_peer_missed_is_not_usual() -> None:
    """Such a round includes the wait for that peer: otherwise a grace would lengthen the next one."""
    a = attendance()
    take_rounds(a, [30.0] * 5, group="ab")
    assert a.grace == SETTLE


def test_a_round_counts_once_and_whole() -> None:
    """The other shards of an epoch are not further rounds; epochs skipped by a fetch are no rounds."""
    a = attendance()
    round_of(a, 1, "a", "a", now=100.0)
    round_of(a, 1, "a", "a", now=140.0)  # of the other shard
    round_of(a, 9, "a", "a", now=180.0)
    assert a.grace == SETTLE
    round_of(a, 10, "a", "a", now=188.0)
    assert a.grace == 8.0
    round_of(a, 9, "a", "a", now=189.0)  # of a shard that is behind
    round_of(a, 10, "a", "a", now=190.0)
    round_of(a, 11, "a", "a", now=208.0)
    assert a.grace == 14.0


# -- being near


@pytest.mark.parametrize(("lasting", "least"), [((), 29), ((50.0,), 29), ((1.0,), 27), ((0.1,), 9)])
def test_a_peer_is_near_if_it_was_at_most_an_epoch_behind_when_it_was_heard(
    lasting: tuple[float, ...], least: int
) -> None:
    """A Summary may be one or two heartbeats old, and as many rounds may have passed since."""
    a = attendance()
    take_rounds(a, lasting, base=1)
    a.shows("b", least)
    a.shows("c", least - 1)
    assert [a.is_near(p, 30) for p in "bc"] == [True, False]


# -- what is forgotten


def test_a_restarted_peer_is_known_by_nothing_that_its_earlier_life_did() -> None:
    """Only its new Summary counts. No plan has named it, and it has missed nothing."""
    a = attendance()
    a.planned(plan("b"), 7)
    a.shows("b", 7)
    round_of(a, 6, "b", "b")
    round_of(a, 7, "bc", "c", now=50.0)
    a.forget("b")
    assert not a.sure("b", 1)
    assert a.group(plan(""), 7) == []
    assert a.waits_until("b", 0.0) == SETTLE
    assert a.sure("c", 8)


def test_nothing_is_known_of_attendance_on_another_lineage() -> None:
    """Another lineage has other epochs. The usual length of a round stays."""
    a = attendance()
    take_rounds(a, [30.0], base=5)
    a.planned(plan("bc"), 7)
    for peer in "bc":
        a.shows(peer, 7)
    round_of(a, 7, "bc", "c", now=50.0)
    a.clear()
    assert not any(a.sure(p, 1) for p in "bc")
    assert a.group(plan(""), 7) == []
    assert a.waits_until("b", 0.0) == 30.0
    round_of(a, 2, "a", "a", now=2000.0)  # fewer epochs than before: the first of this lineage is no round yet
    round_of(a, 3, "a", "a", now=2010.0)
    assert a.grace == 20.0


def test_the_first_epoch_of_another_lineage_is_no_round() -> None:
    """How long it took nobody has seen, however low it is."""
    a = attendance()
    round_of(a, 7, "a", "a", now=50.0)
    a.clear()
    round_of(a, 1, "a", "a", now=2000.0)
    assert a.grace == SETTLE


def test_peers_that_the_roster_does_not_know_are_forgotten_once_they_are_many() -> None:
    """Not before; and neither the peers that it knows nor this one are forgotten."""
    a = attendance(b=0)
    strangers = [f"s{i}" for i in range(STRANGERS_MAX - 1)]
    for peer in ("a", "b", *strangers):
        a.shows(peer, 7)
    round_of(a, 8, "", "a", now=50.0)
    assert all(a.sure(peer, 7) for peer in ("a", "b", *strangers))
    a.shows("one more", 7)
    round_of(a, 9, "", "a", now=60.0)
    assert [peer for peer in ("a", "b", *strangers, "one more") if a.sure(peer, 7)] == ["a", "b"]


def test_a_miss_is_news_until_it_was_asked_for() -> None:
    """It shortens waits in other shards. A later round that nobody missed takes nothing back."""
    a = attendance()
    round_of(a, 5, "ab", "ab")
    assert not a.has_news()
    round_of(a, 6, "ab", "a")
    round_of(a, 7, "a", "a")
    assert [a.has_news(), a.has_news()] == [True, False]


def test_a_peer_that_misses_two_rounds_in_a_row_is_not_sure() -> None:
    """Though it tells that it holds the base, the round waits only a grace for it. A count makes it sure again."""
    a = attendance(b=20)
    sure = []
    for base in (10, 11):
        round_of(a, base, "ab", "a", now=50.0)
        sure.append(a.sure("b", base + 1))
    assert sure == [True, False]
    assert RULES.misses_max == 2
    round_of(a, 12, "ab", "ab", now=60.0)
    assert a.sure("b", 13)
