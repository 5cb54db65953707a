"""What becomes of local progress at each merge: counted progress is never carried, uncounted progress never lost."""

from __future__ import annotations

import pytest

from p2p_diloco.core.carry import Progress
from p2p_diloco.core.events import Carry
from p2p_diloco.core.version import ContributionId, Version

ROUNDS = 2


def v(epoch: int) -> Version:
    return Version(0, epoch, epoch, "")


def id(sequence: int, life: int = 5) -> ContributionId:
    return ContributionId(life, sequence)


def test_before_anything_is_sent_progress_is_kept() -> None:
    """Steps made since the base ride on, whatever the table counts."""
    progress = Progress()
    assert progress.merge(v(1), None, ROUNDS) is Carry.KEEP
    assert progress.merge(v(2), id(9), ROUNDS) is Carry.KEEP
    assert progress.base == v(2)


def test_what_was_counted_is_taken_out_once() -> None:
    """A round as it should be: sent, counted, subtracted; the next newer state finds nothing more to subtract."""
    progress = Progress(base=v(0))
    assert progress.send(id(1)) == id(1)
    assert progress.merge(v(1), id(1), ROUNDS) is Carry.SUBTRACT
    assert progress.merge(v(2), id(1), ROUNDS) is Carry.KEEP
    assert progress.merge(v(3), id(1), ROUNDS) is Carry.KEEP


def test_what_was_not_counted_rides_in_the_next() -> None:
    """A commit without me keeps my progress; the next contribution names the oldest that rides in it."""
    progress = Progress(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), None, ROUNDS) is Carry.KEEP
    assert progress.send(id(2)) == id(1)
    assert progress.merge(v(2), id(2), ROUNDS) is Carry.SUBTRACT
    assert progress.send(id(3)) == id(3)  # a new beginning: nothing old rides in it


def test_an_earlier_count_of_mine_is_older_progress() -> None:
    """The table counting what was sent before ``oldest`` says nothing about what is carried now."""
    progress = Progress(base=v(0))
    progress.send(id(4))
    assert progress.merge(v(1), id(3), ROUNDS) is Carry.KEEP
    assert progress.send(id(5)) == id(4)


@pytest.mark.parametrize("counted", [id(7, life=4), id(7, life=6)])
def test_an_other_lifes_contribution_is_not_mine(counted: ContributionId) -> None:
    """Another life of this peer, earlier or with a greater number, has trained other steps: mine are not in it."""
    progress = Progress(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), counted, ROUNDS) is Carry.KEEP
    assert progress.last == id(1)


def test_both_numbers_of_a_life_that_had_to_rise_are_mine() -> None:
    """A life that took a greater number on its way still knows what it sent under the first."""
    early = Progress(base=v(0))
    early.send(id(1, life=5))
    early.merge(v(1), None, ROUNDS)
    early.send(id(1, life=8))
    assert early.merge(v(2), id(1, life=5), ROUNDS) is Carry.DROP  # only the first of the two is counted
    late = Progress(base=v(0))
    late.send(id(1, life=5))
    late.merge(v(1), None, ROUNDS)
    late.send(id(1, life=8))
    assert late.merge(v(2), id(1, life=8), ROUNDS) is Carry.SUBTRACT


@pytest.mark.parametrize("counted", [1, 2])
def test_when_a_part_is_counted_the_rest_can_not_be_told_from_it(counted: int) -> None:
    """Contribution 3 contains 1 and 2. If one of these is counted after all, the progress is dropped, not doubled."""
    progress = Progress(base=v(0))
    for sequence in (1, 2):
        progress.send(id(sequence))
        assert progress.merge(v(sequence), None, 9) is Carry.KEEP
    progress.send(id(3))
    assert progress.merge(v(3), id(counted), 9) is Carry.DROP
    assert progress.send(id(4)) == id(4)
    assert progress.merge(v(4), id(4), 9) is Carry.SUBTRACT


def test_carry_is_bounded() -> None:
    """Progress that is never counted rides in ``carry_rounds`` later contributions, then it is dropped."""
    for rounds in (0, 1, 2, 3):
        progress = Progress(base=v(0))
        kept = []
        for sequence in range(1, rounds + 2):
            progress.send(id(sequence))
            kept.append(progress.merge(v(sequence), None, rounds))
        assert kept == [Carry.KEEP] * rounds + [Carry.DROP]
        assert progress.send(id(99)) == id(99)
        assert progress.sends == 1


def test_merging_twice_in_a_round_does_not_age_the_carry() -> None:
    """The bound counts contributions, not merges."""
    progress = Progress(base=v(0))
    progress.send(id(1))
    assert [progress.merge(v(e), None, 1) for e in range(1, 6)] == [Carry.KEEP] * 5


def test_the_carry_begins_anew_after_a_count() -> None:
    """Counted once, the next uncounted stretch has all its rounds again."""
    progress = Progress(base=v(0))
    progress.send(id(1))
    progress.merge(v(1), None, 1)
    progress.send(id(2))
    assert progress.merge(v(2), id(2), 1) is Carry.SUBTRACT
    progress.send(id(3))
    assert progress.merge(v(3), id(2), 1) is Carry.KEEP


def test_a_lineage_that_counts_me_lost_to_one_that_does_not() -> None:
    """What was counted in the base and isn't any more is restored, once, and may be sent again."""
    progress = Progress(base=v(0))
    progress.send(id(1))
    assert progress.merge(v(1), id(1), ROUNDS) is Carry.SUBTRACT
    assert progress.merge(v(2), None, ROUNDS) is Carry.RESTORE
    assert progress.merge(v(3), None, ROUNDS) is Carry.KEEP
    assert progress.send(id(2)) == id(1)
    assert progress.merge(v(4), id(2), ROUNDS) is Carry.SUBTRACT


def test_restored_progress_that_is_counted_after_all_is_taken_out() -> None:
    """Back and forth between lineages, the contribution is in the sum exactly when the table says so."""
    progress = Progress(base=v(0))
    progress.send(id(1))
    progress.merge(v(1), id(1), ROUNDS)
    progress.merge(v(2), None, ROUNDS)
    assert progress.merge(v(3), id(1), ROUNDS) is Carry.SUBTRACT


def test_a_lineage_that_counts_only_a_part_takes_over() -> None:
    """The base held 1 and 2 as one contribution; the new state has 1 alone. Only what came since is kept."""
    progress = Progress(base=v(0))
    progress.send(id(1))
    progress.merge(v(1), None, ROUNDS)
    progress.send(id(2))
    assert progress.merge(v(2), id(2), ROUNDS) is Carry.SUBTRACT
    assert progress.merge(v(3), id(1), ROUNDS) is Carry.KEEP
    assert (progress.last, progress.oldest, progress.included, progress.sends) == (None, None, False, 0)


def test_counted_at_last_nothing_more_happens_to_it() -> None:
    """Progress that was counted in its last round is neither subtracted nor dropped by the merges that follow."""
    progress = Progress(base=v(0))
    for sequence in (1, 2):
        progress.send(id(sequence))
        progress.merge(v(sequence), None, ROUNDS)
    progress.send(id(3))
    assert progress.merge(v(3), id(3), ROUNDS) is Carry.SUBTRACT
    assert [progress.merge(v(e), id(3), ROUNDS) for e in (4, 5)] == [Carry.KEEP, Carry.KEEP]
