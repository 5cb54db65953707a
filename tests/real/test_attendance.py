"""The judge of `newcomers.py`: which steps outer steps counted, tested with invented lines of peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from attendance import Attendance, Line, attendance, commits, shared, unlike
from newcomers import Played

Step = Sequence[Sequence[int]]
"""The inner steps that an outer step counts, by shard and slot."""
ALL: Step = [[1, 1, 1], [1, 1, 1]]
NOT_THE_LAST: Step = [[1, 1, 0], [1, 1, 0]]
IN_ONE_SHARD: Step = [[1, 1, 1], [1, 1, 0]]


def told(story: Sequence[Step], first: int = 0, **odd: Any) -> list[Line]:
    """The lines of a peer that looks at every epoch; at H = 1 it makes one step for each, from `first` on."""
    theta, lines = [[0.0] * 3, [0.0] * 3], []
    for epoch in range(len(story) + 1):
        if epoch:
            step = story[epoch - 1]
            means = [[steps / sum(map(bool, shard)) for steps in shard] for shard in step]
            theta = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(theta, means, strict=True)]
        line = {"epoch": epoch, "whole": True, "digest": f"d{epoch}", "theta": theta, **odd}
        if epoch == first:
            lines.append({"what": "in", **line})
        elif epoch > first:
            made = epoch - first
            lines.append({"what": "epoch", "before": epoch - 1, "step": made, "sync_count": made, **line})
    return lines


def judged(story: Sequence[Step], first: int = 0) -> Attendance:
    """The attendance of slot 2, as seen by slot 0."""
    return attendance(told(story, first), 2, 1, commits([told(story)]))


def test_a_peer_in_every_commit_missed_none() -> None:
    one = judged([ALL] * 5)
    assert one == Attendance(5, (), in_part=0, rounds_at_once=1, lost=0, said=5, counted=(5, 5))
    assert one.first == 1


def test_a_late_peer_is_judged_from_its_join_on() -> None:
    """Epochs before its join are not missed, and the first epoch that counts it has its first exchange."""
    one = judged([NOT_THE_LAST] * 3 + [ALL] * 4, first=3)
    assert (one.exchanges, one.missed, one.lost, one.counted) == (4, (), 0, (4, 4))


def test_a_starving_peer_missed_every_exchange() -> None:
    """However many exchanges it reports."""
    one = judged([NOT_THE_LAST] * 6, first=2)
    assert (one.missed, one.first, one.in_part, one.lost, one.said, one.counted) == (
        (1, 2, 3, 4),
        None,
        0,
        4,
        4,
        (0, 0),
    )


def test_one_shard_of_two_is_not_enough() -> None:
    one = judged([ALL, IN_ONE_SHARD, ALL])
    assert (one.missed, one.in_part, one.lost, one.counted) == ((2,), 1, 1, (2, 3))


def test_steps_that_come_at_once_are_seen() -> None:
    """Carried steps are not lost, and the commit that counts them shows their number."""
    late: Step = [[1, 1, 4], [1, 1, 4]]
    one = judged([NOT_THE_LAST] * 3 + [late, ALL])
    assert (one.missed, one.first, one.rounds_at_once, one.lost, one.counted) == ((1, 2, 3), 4, 4, 0, (2, 2))


def test_outer_steps_between_two_looks_are_taken_together() -> None:
    """One of the two that counts the peer is enough; whether both did is unknown, and the judge says so."""
    story = [ALL, NOT_THE_LAST, ALL, ALL]
    seen = [line for line in told(story) if line["epoch"] != 2]
    one = attendance(told(story), 2, 1, commits([seen]))
    assert one.missed == ()
    assert one.counted == (3, 4)


def test_unseen_outer_steps_are_not_taken_for_carried_progress() -> None:
    """Two commits that no peer saw separately count two rounds; neither counts more than one."""
    seen = [line for line in told([ALL] * 4) if line["epoch"] != 2]
    assert attendance(told([ALL] * 4), 2, 1, commits([seen])).rounds_at_once == 1


def test_only_exchanges_that_both_saw_are_judged() -> None:
    """Exchanges after the others' last look are left out; so are outer steps after the peer's own last look."""
    one = attendance(told([ALL] * 5), 2, 1, commits([told([ALL] * 3)]))
    assert (one.exchanges, one.missed, one.lost, one.said, one.counted) == (3, (), 0, 3, (3, 3))
    one = attendance(told([ALL] * 3), 2, 1, commits([told([ALL] * 5)]))
    assert (one.exchanges, one.missed, one.lost, one.said, one.counted) == (3, (), 0, 3, (3, 3))


def test_rounds_of_many_steps() -> None:
    """A newer epoch in the middle of a round is not an exchange; what is counted meanwhile belongs to the last one."""
    full, without = [[3, 3, 3]] * 2, [[3, 3, 0]] * 2
    log = commits([told([without, full, full])])

    def line(step: int, before: int, epoch: int, synced: int) -> Line:
        return {"what": "epoch", "step": step, "before": before, "epoch": epoch, "sync_count": synced}

    one = attendance([line(1, 0, 1, 0), line(3, 1, 1, 0), line(4, 1, 2, 1), line(6, 2, 3, 2)], 2, 3, log)
    assert (one.exchanges, one.missed, one.rounds_at_once, one.lost) == (2, (), 1, 0)


def test_a_look_across_two_epochs_is_dropped() -> None:
    """A line is dropped if the epoch changed while it was read."""
    torn = told([ALL] * 3, whole=False, digest="torn")
    assert unlike({"a": told([ALL] * 3), "b": torn}) == []
    assert commits([torn]) == []
    assert shared(torn, [told([ALL] * 3)]) == (0, 0)


def test_replicas_that_differ_are_named() -> None:
    """By their digests, and by their values where the digests are equal."""
    here, there = told([ALL] * 3), told([ALL, ALL, NOT_THE_LAST])
    assert unlike({"a": here, "b": there}) == ["epoch 3: theta of b and a differ"]
    assert unlike({"a": here, "b": told([ALL], digest="x")})[1] == "epoch 1: digest of b and a differ"
    assert shared(there, [here]) == (4, 3)


WELL = Attendance(20, (1,), in_part=0, rounds_at_once=2, lost=0, said=19, counted=(19, 19))
PLAYED = Played(
    what="a play",
    newcomer=WELL,
    wanted=20,
    every=1,
    survivors=(WELL, WELL),
    shared=(20, 20),
    unlike=(),
    looks=60,
    expected_s=0.1,
    round_s=0.2,
    stall_s=1.0,
)


def test_a_play_in_which_all_is_well_breaks_no_law() -> None:
    """Though the first exchange was missed."""
    assert PLAYED.broken == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wanted": 21}, "it made 20 of 21 exchanges in time"),
        ({"newcomer": replace(WELL, missed=(1, 7))}, "1 of its 20 exchanges were not counted, the first: [7]"),
        ({"newcomer": replace(WELL, rounds_at_once=5)}, "steps of 5 rounds of it were counted at once"),
        ({"newcomer": replace(WELL, lost=2)}, "2 steps of it were not counted"),
        ({"newcomer": replace(WELL, said=20)}, "it says sync_count=20, and 19 to 19 outer steps counted it"),
        ({"survivors": (WELL, replace(WELL, said=18))}, "a survivor says sync_count=18, and 19 to 19 outer steps"),
        ({"shared": (0, 0)}, "of 0 epochs that it and another looked at, 0 were alike"),
        ({"shared": (20, 19)}, "of 20 epochs that it and another looked at, 19 were alike"),
        ({"unlike": ("epoch 3",)}, "at 1 epochs looks differ, the first: epoch 3"),
        ({"round_s": 0.4}, "rounds with it take 0.400 s, and 0.100 s were to be expected"),
        ({"stall_s": 6.0}, "a round took 6.0 s longer than usual"),
    ],
)
def test_each_law_can_be_broken_alone(change: dict[str, Any], said: str) -> None:
    """And is named."""
    (broken,) = replace(PLAYED, **change).broken
    assert broken.startswith(said)
