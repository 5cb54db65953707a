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
    """Steps made since the base ride on, whatever the table counts."""
    progress = Carried()
    assert progress.merge(v(1), None, given_up=False) is Carry.KEEP
    assert progress.merge(v(2), id(9), given_up=False) is Carry.KEEP
    assert progress.base == v(2)


def test_what_was_counted_is_taken_out_once() -> None:
    """A round as it should be: sent, counted, subtracted; the next newer state finds nothing more to subtract."""
    progress = Carried(base=v(0))
    assert progress.send(id(1)) == id(1)
    assert progress.merge(v(1), id(1), given_up=False) is Carry.SUBTRACT
    assert progress.merge(v(2), id(1), given_up=False) is Carry.KEEP
    assert progress.merge(v(3), id(1), given_up=False) is Carry.KEEP


def test_what_was_not_counted_rides_in_the_next() -> None:
    """A commit without me keeps my progress; the next contribution names the oldest that rides in it."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), None, given_up=False) is Carry.KEEP
    assert progress.send(id(2)) == id(1)
    assert progress.merge(v(2), id(2), given_up=False) is Carry.SUBTRACT
    assert progress.send(id(3)) == id(3)  # a new beginning: nothing old rides in it


def test_an_earlier_count_of_mine_is_older_progress() -> None:
    """The table counting what was sent before ``oldest`` says nothing about what is carried now."""
    progress = Carried(base=v(0))
    progress.send(id(4))
    assert progress.merge(v(1), id(3), given_up=False) is Carry.KEEP
    assert progress.send(id(5)) == id(4)


@pytest.mark.parametrize("counted", [id(7, life=4), id(7, life=6)])
def test_an_other_lifes_contribution_is_not_mine(counted: ContributionId) -> None:
    """Another life of this peer, earlier or with a greater number, has trained other steps: mine are not in it."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), counted, given_up=False) is Carry.KEEP
    assert progress.last == id(1)


def test_both_numbers_of_a_life_that_had_to_rise_are_mine() -> None:
    """A life that took a greater number on its way still knows what it sent under the first."""
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
def test_when_a_part_is_counted_the_rest_can_not_be_told_from_it(counted: int) -> None:
    """Contribution 3 contains 1 and 2. If one of these is counted after all, the progress is dropped, not doubled."""
    progress = Carried(base=v(0))
    for sequence in (1, 2):
        progress.send(id(sequence))
        assert progress.merge(v(sequence), None, given_up=False) is Carry.KEEP
    progress.send(id(3))
    assert progress.merge(v(3), id(counted), given_up=False) is Carry.DROP
    assert progress.send(id(4)) == id(4)
    assert progress.merge(v(4), id(4), given_up=False) is Carry.SUBTRACT


def test_what_is_given_up_is_dropped() -> None:
    """Carried that is not counted, and was sent too often, is dropped whole: what follows is a new beginning."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), None, given_up=True) is Carry.DROP
    assert progress.merge(v(2), None, given_up=True) is Carry.KEEP  # there is nothing left to drop
    assert progress.send(id(99)) == id(99)
    assert progress.oldest_base == v(2)


def test_what_is_counted_is_taken_out_however_often_it_was_sent() -> None:
    """What was sent often is dropped if it is not counted, and only then."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(9), id(1), given_up=True) is Carry.SUBTRACT
    assert progress.merge(v(10), id(1), given_up=True) is Carry.KEEP


def test_progress_is_as_old_as_the_oldest_that_rides_in_it() -> None:
    """Sent again it is no younger; counted once, the next uncounted stretch begins anew, where the trainer stands."""
    progress = Carried(base=v(0))
    for sequence in (1, 2, 3):
        progress.send(id(sequence))
        progress.merge(v(sequence), None, given_up=False)
    assert progress.oldest_base == v(0)
    progress.send(id(4))
    assert progress.merge(v(4), id(4), given_up=False) is Carry.SUBTRACT
    progress.send(id(5))
    assert progress.oldest_base == v(4)


def test_sendings_are_counted_from_the_oldest_that_rides_along() -> None:
    """Each contribution that leaves with the same progress counts; a count or a drop begins anew."""
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


def test_refusals_are_of_what_is_carried() -> None:
    """What was refused before the last count, or before it was dropped, says nothing of what is sent next."""
    counted, dropped = Carried(base=v(0)), Carried(base=v(0))
    for progress in (counted, dropped):
        progress.send(id(1))
        progress.sends = 2
    counted.merge(v(1), id(1), given_up=False)
    counted.send(id(2))
    dropped.merge(v(1), None, given_up=True)
    assert (counted.sends, dropped.sends) == (0, 0)


def test_a_lineage_that_counts_me_lost_to_one_that_does_not() -> None:
    """What was counted in the base and isn't any more is restored, once, and may be sent again."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), id(1), given_up=False) is Carry.SUBTRACT
    assert progress.merge(v(2), None, given_up=False) is Carry.RESTORE
    assert progress.merge(v(3), None, given_up=False) is Carry.KEEP
    assert progress.send(id(2)) == id(1)
    assert progress.merge(v(4), id(2), given_up=False) is Carry.SUBTRACT


def test_restored_progress_that_is_counted_after_all_is_taken_out() -> None:
    """Back and forth between lineages, the contribution is in the sum exactly when the table says so."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    progress.merge(v(1), id(1), given_up=False)
    progress.merge(v(2), None, given_up=False)
    assert progress.merge(v(3), id(1), given_up=False) is Carry.SUBTRACT


def test_a_lineage_that_counts_only_a_part_takes_over() -> None:
    """The base held 1 and 2 as one contribution; the new state has 1 alone. Only what came since is kept."""
    progress = Carried(base=v(0))
    progress.send(id(1))
    progress.merge(v(1), None, given_up=False)
    progress.send(id(2))
    assert progress.merge(v(2), id(2), given_up=False) is Carry.SUBTRACT
    assert progress.merge(v(3), id(1), given_up=False) is Carry.KEEP
    assert (progress.last, progress.oldest, progress.included, progress.sends) == (None, None, False, 0)


def test_counted_at_last_nothing_more_happens_to_it() -> None:
    """Carried that was counted in its last round is neither subtracted nor dropped by the merges that follow."""
    progress = Carried(base=v(0))
    for sequence in (1, 2):
        progress.send(id(sequence))
        progress.merge(v(sequence), None, given_up=False)
    progress.send(id(3))
    assert progress.merge(v(3), id(3), given_up=False) is Carry.SUBTRACT
    assert [progress.merge(v(e), id(3), given_up=False) for e in (4, 5)] == [Carry.KEEP, Carry.KEEP]
