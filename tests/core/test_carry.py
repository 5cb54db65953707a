"""What becomes of local progress at each merge: counted progress is never carried."""

from __future__ import annotations

import pytest

from p2p_diloco.core.carry import Carried
from p2p_diloco.core.events import Carry
from p2p_diloco.core.version import ContributionId, Version


def v(epoch: int) -> Version:
    return Version(0, epoch, epoch, "")


def id(sequence: int, life: int = 5) -> ContributionId:
    return ContributionId(life, sequence)


def test_before_anything_is_sent_progress_is_kept() -> None:
    """Steps made since the base stay, whatever the table counts."""
    progress = Carried()
    assert progress.merge(v(1), None, kin=True, given_up=False) is Carry.KEEP
    assert progress.merge(v(2), id(9), kin=True, given_up=False) is Carry.KEEP
    assert progress.base == v(2)


def test_counted_progress_is_subtracted_once() -> None:
    """It is sent, counted and subtracted; a later state subtracts nothing more."""
    progress = Carried(base=v(0))
    assert progress.send(id(1)) == id(1)
    assert progress.merge(v(1), id(1), kin=True, given_up=False) is Carry.SUBTRACT
    assert progress.merge(v(2), id(1), kin=True, given_up=False) is Carry.KEEP
    assert progress.merge(v(3), id(1), kin=True, given_up=False) is Carry.KEEP


def test_uncounted_progress_rides_in_the_next_contribution() -> None:
    """A commit that does not count this peer keeps its progress; the next contribution names the oldest one in it."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), None, kin=True, given_up=False) is Carry.KEEP
    assert progress.send(id(2)) == id(1)
    assert progress.merge(v(2), id(2), kin=True, given_up=False) is Carry.SUBTRACT
    assert progress.send(id(3)) == id(3)  # nothing old is carried in it


def test_a_count_of_what_was_sent_earlier_says_nothing_of_what_is_carried() -> None:
    """The table counts a contribution that was sent before ``oldest``."""
    progress = Carried(base=v(0))
    progress.send(id(4))
    assert progress.merge(v(1), id(3), kin=True, given_up=False) is Carry.KEEP
    assert progress.send(id(5)) == id(4)


@pytest.mark.parametrize("counted", [id(7, life=4), id(7, life=6)])
def test_a_contribution_of_another_life_is_not_this_ones(counted: ContributionId) -> None:
    """An earlier life of this peer, or one with a greater number, made other steps than this life."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), counted, kin=True, given_up=False) is Carry.KEEP
    assert progress.last == id(1)


def test_both_incarnations_of_a_life_that_had_to_rise_are_its_own() -> None:
    """A life whose incarnation had to rise still recognises the contributions that it sent under the first number."""
    early = Carried(base=v(0))
    early.send(id(1, life=5))
    early.merge(v(1), None, kin=True, given_up=False)
    early.send(id(1, life=8))
    assert (
        early.merge(v(2), id(1, life=5), kin=True, given_up=False) is Carry.PART
    )  # only the first of the two is counted
    late = Carried(base=v(0))
    late.send(id(1, life=5))
    late.merge(v(1), None, kin=True, given_up=False)
    late.send(id(1, life=8))
    assert late.merge(v(2), id(1, life=8), kin=True, given_up=False) is Carry.SUBTRACT


@pytest.mark.parametrize("counted", [1, 2])
def test_progress_of_which_a_part_is_counted_is_dropped(counted: int) -> None:
    """Contribution 3 contains 1 and 2. If one of them is counted, the rest can't be separated from it."""
    progress = Carried(base=v(0))
    for sequence in (1, 2):
        progress.send(id(sequence))
        assert progress.merge(v(sequence), None, kin=True, given_up=False) is Carry.KEEP
    progress.send(id(3))
    assert progress.merge(v(3), id(counted), kin=True, given_up=False) is Carry.PART
    assert progress.send(id(4)) == id(4)
    assert progress.merge(v(4), id(4), kin=True, given_up=False) is Carry.SUBTRACT


def test_progress_that_is_given_up_is_dropped() -> None:
    """The next contribution carries nothing old."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), None, kin=True, given_up=True) is Carry.OLD
    assert progress.merge(v(2), None, kin=True, given_up=True) is Carry.KEEP  # there is nothing left to drop
    assert progress.send(id(99)) == id(99)
    assert progress.oldest_base == v(2)


def test_counted_progress_is_subtracted_however_often_it_was_sent() -> None:
    """Only progress that is not counted is given up."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(9), id(1), kin=True, given_up=True) is Carry.SUBTRACT
    assert progress.merge(v(10), id(1), kin=True, given_up=True) is Carry.KEEP


def test_progress_is_as_old_as_the_oldest_contribution_in_it() -> None:
    """Sent again it keeps its age. After it is counted, new progress begins at the trainer's base."""
    progress = Carried(base=v(0))
    for sequence in (1, 2, 3):
        progress.send(id(sequence))
        progress.merge(v(sequence), None, kin=True, given_up=False)
    assert progress.oldest_base == v(0)
    progress.send(id(4))
    assert progress.merge(v(4), id(4), kin=True, given_up=False) is Carry.SUBTRACT
    progress.send(id(5))
    assert progress.oldest_base == v(4)


def test_sendings_are_counted_from_the_oldest_contribution_in_it() -> None:
    """Each contribution with the same progress counts; after it is counted or dropped the number starts again."""
    progress = Carried(base=v(0))
    for sends in (1, 2, 3):
        progress.send(id(sends))
        progress.sends += 1
        assert progress.sends == sends
        progress.merge(v(sends), None, kin=True, given_up=False)
    progress.send(id(4))
    progress.merge(v(4), id(4), kin=True, given_up=False)
    progress.send(id(5))
    assert progress.sends == 0
    progress.sends += 1
    progress.merge(v(5), None, kin=True, given_up=True)
    assert progress.sends == 0


@pytest.mark.parametrize("counted", [None, id(1)])
@pytest.mark.parametrize(("included", "kin"), [(True, False), (False, False), (True, True)])
def test_progress_of_a_lost_lineage_is_dropped(counted: ContributionId | None, *, included: bool, kin: bool) -> None:
    """Once, whether that lineage counted it or not, also if the new state counts a part of it. Where the fork is too
    old to be remembered, a contribution that is counted no more shows it. A state that counts it in the end changes
    nothing, and the next contribution carries nothing old."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    progress.merge(v(1), None, kin=True, given_up=False)
    progress.send(id(2))
    progress.merge(v(2), id(2) if included else None, kin=True, given_up=False)
    assert progress.merge(v(3), counted, kin=kin, given_up=False) is Carry.LEFT
    assert (progress.last, progress.oldest, progress.included, progress.sends) == (None, None, False, 0)
    assert progress.merge(v(4), id(2), kin=True, given_up=False) is Carry.KEEP
    assert progress.send(id(3)) == id(3)
    assert progress.merge(v(5), id(3), kin=True, given_up=False) is Carry.SUBTRACT


def test_what_was_never_sent_is_dropped_with_its_lineage() -> None:
    """There is no contribution to be counted."""
    assert Carried(base=v(0)).merge(v(1), None, kin=False, given_up=False) is Carry.LEFT


@pytest.mark.parametrize("included", [True, False])
def test_what_both_lineages_count_is_not_dropped(*, included: bool) -> None:
    """Only what was trained since."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    progress.merge(v(1), id(1) if included else None, kin=True, given_up=False)
    assert progress.merge(v(2), id(1), kin=False, given_up=False) is Carry.SINCE
    assert progress.merge(v(3), id(1), kin=True, given_up=False) is Carry.KEEP
    assert progress.merge(v(4), None, kin=False, given_up=False) is Carry.LEFT
