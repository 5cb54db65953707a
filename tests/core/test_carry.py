"""What becomes of local progress at each merge: counted progress is never carried, uncounted progress never lost."""

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
    assert progress.merge(v(1), None, given_up=False) is Carry.KEEP
    assert progress.merge(v(2), id(9), given_up=False) is Carry.KEEP
    assert progress.base == v(2)


def test_counted_progress_is_subtracted_once() -> None:
    """It is sent, counted and subtracted; a later state subtracts nothing more."""
    progress = Carried(base=v(0))
    assert progress.send(id(1)) == id(1)
    assert progress.merge(v(1), id(1), given_up=False) is Carry.SUBTRACT
    assert progress.merge(v(2), id(1), given_up=False) is Carry.KEEP
    assert progress.merge(v(3), id(1), given_up=False) is Carry.KEEP


def test_uncounted_progress_rides_in_the_next_contribution() -> None:
    """A commit that does not count this peer keeps its progress; the next contribution names the oldest one in it."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), None, given_up=False) is Carry.KEEP
    assert progress.send(id(2)) == id(1)
    assert progress.merge(v(2), id(2), given_up=False) is Carry.SUBTRACT
    assert progress.send(id(3)) == id(3)  # nothing old is carried in it


def test_a_count_of_what_was_sent_earlier_says_nothing_of_what_is_carried() -> None:
    """The table counts a contribution that was sent before ``oldest``."""
    progress = Carried(base=v(0))
    progress.send(id(4))
    assert progress.merge(v(1), id(3), given_up=False) is Carry.KEEP
    assert progress.send(id(5)) == id(4)


@pytest.mark.parametrize("counted", [id(7, life=4), id(7, life=6)])
def test_a_contribution_of_another_life_is_not_this_ones(counted: ContributionId) -> None:
    """An earlier life of this peer, or one with a greater number, made other steps than this life."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), counted, given_up=False) is Carry.KEEP
    assert progress.last == id(1)


def test_both_incarnations_of_a_life_that_had_to_rise_are_its_own() -> None:
    """A life whose incarnation had to rise still recognises the contributions that it sent under the first number."""
    early = Carried(base=v(0))
    early.send(id(1, life=5))
    early.merge(v(1), None, given_up=False)
    early.send(id(1, life=8))
    assert early.merge(v(2), id(1, life=5), given_up=False) is Carry.DROP  # only the first of the two is counted
    late = Carried(base=v(0))
    late.send(id(1, life=5))
    late.merge(v(1), None, given_up=False)
    late.send(id(1, life=8))
    assert late.merge(v(2), id(1, life=8), given_up=False) is Carry.SUBTRACT


@pytest.mark.parametrize("counted", [1, 2])
def test_progress_of_which_a_part_is_counted_is_dropped(counted: int) -> None:
    """Contribution 3 contains 1 and 2. If one of them is counted, the rest can't be separated from it."""
    progress = Carried(base=v(0))
    for sequence in (1, 2):
        progress.send(id(sequence))
        assert progress.merge(v(sequence), None, given_up=False) is Carry.KEEP
    progress.send(id(3))
    assert progress.merge(v(3), id(counted), given_up=False) is Carry.DROP
    assert progress.send(id(4)) == id(4)
    assert progress.merge(v(4), id(4), given_up=False) is Carry.SUBTRACT


def test_progress_that_is_given_up_is_dropped() -> None:
    """The next contribution carries nothing old."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), None, given_up=True) is Carry.DROP
    assert progress.merge(v(2), None, given_up=True) is Carry.KEEP  # there is nothing left to drop
    assert progress.send(id(99)) == id(99)
    assert progress.oldest_base == v(2)


def test_counted_progress_is_subtracted_however_often_it_was_sent() -> None:
    """Only progress that is not counted is given up."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(9), id(1), given_up=True) is Carry.SUBTRACT
    assert progress.merge(v(10), id(1), given_up=True) is Carry.KEEP


def test_progress_is_as_old_as_the_oldest_contribution_in_it() -> None:
    """Sent again it keeps its age. After it is counted, new progress begins at the trainer's base."""
    progress = Carried(base=v(0))
    for sequence in (1, 2, 3):
        progress.send(id(sequence))
        progress.merge(v(sequence), None, given_up=False)
    assert progress.oldest_base == v(0)
    progress.send(id(4))
    assert progress.merge(v(4), id(4), given_up=False) is Carry.SUBTRACT
    progress.send(id(5))
    assert progress.oldest_base == v(4)


def test_sendings_are_counted_from_the_oldest_contribution_in_it() -> None:
    """Each contribution with the same progress counts; after it is counted or dropped the number starts again."""
    progress = Carried(base=v(0))
    for sends in (1, 2, 3):
        progress.send(id(sends))
        progress.sends += 1
        assert progress.sends == sends
        progress.merge(v(sends), None, given_up=False)
    progress.send(id(4))
    progress.merge(v(4), id(4), given_up=False)
    progress.send(id(5))
    assert progress.sends == 0
    progress.sends += 1
    progress.merge(v(5), None, given_up=True)
    assert progress.sends == 0


def test_refusals_before_a_count_or_a_drop_are_forgotten() -> None:
    """They do not affect the next contribution."""
    counted, dropped = Carried(base=v(0)), Carried(base=v(0))
    for progress in (counted, dropped):
        progress.send(id(1))
        progress.sends = 2
    counted.merge(v(1), id(1), given_up=False)
    counted.send(id(2))
    dropped.merge(v(1), None, given_up=True)
    assert (counted.sends, dropped.sends) == (0, 0)


def test_progress_that_a_lost_lineage_counted_is_restored() -> None:
    """It is restored once, and may be sent again."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), id(1), given_up=False) is Carry.SUBTRACT
    assert progress.merge(v(2), None, given_up=False) is Carry.RESTORE
    assert progress.merge(v(3), None, given_up=False) is Carry.KEEP
    assert progress.send(id(2)) == id(1)
    assert progress.merge(v(4), id(2), given_up=False) is Carry.SUBTRACT


def test_restored_progress_that_is_counted_after_all_is_subtracted() -> None:
    """Also after several changes of lineage the progress is in the state exactly if the table counts it."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    progress.merge(v(1), id(1), given_up=False)
    progress.merge(v(2), None, given_up=False)
    assert progress.merge(v(3), id(1), given_up=False) is Carry.SUBTRACT


def test_progress_since_is_kept_when_a_lineage_that_counts_a_part_takes_over() -> None:
    """The base counted 1 and 2 as one contribution; the new state counts 1 only."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    progress.merge(v(1), None, given_up=False)
    progress.send(id(2))
    assert progress.merge(v(2), id(2), given_up=False) is Carry.SUBTRACT
    assert progress.merge(v(3), id(1), given_up=False) is Carry.KEEP
    assert (progress.last, progress.oldest, progress.included, progress.sends) == (None, None, False, 0)


def test_progress_that_is_counted_at_last_is_left_alone() -> None:
    """The following merges neither subtract nor drop it."""
    progress = Carried(base=v(0))
    for sequence in (1, 2):
        progress.send(id(sequence))
        progress.merge(v(sequence), None, given_up=False)
    progress.send(id(3))
    assert progress.merge(v(3), id(3), given_up=False) is Carry.SUBTRACT
    assert [progress.merge(v(e), id(3), given_up=False) for e in (4, 5)] == [Carry.KEEP, Carry.KEEP]
